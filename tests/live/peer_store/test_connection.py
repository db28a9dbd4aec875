"""What the environment has for the store, and TLS to it."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from redis.exceptions import AuthenticationError, ConnectionError, TimeoutError

from gorgo.config.model import SharedConfig
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.prompt.parse import Prompt
from gorgo.errors import InvalidValueError
from gorgo.live.peer_store import connection
from gorgo.live.peer_store.connection import group_key, router_name, store_client, store_password, store_tls
from tests.live.peer_store.relay import relay
from tests.live.peer_store.server import RedisServer
from tests.proxy.authority import Authority, needs_openssl

SHARED = SharedConfig(url="redis://127.0.0.1:1", group="g", key_env="KEY")
KEY = "0123456789abcdef0123456789ABCDEF"


def test_key_of_the_group_is_read_from_the_environment() -> None:
    assert group_key(SHARED, {"KEY": f" {KEY}\n"}) == int(KEY, 16)


@pytest.mark.parametrize("held", [None, "", KEY[:-1], KEY[:-1] + "g", "0x" + KEY, KEY * 5])
def test_variable_without_a_key_is_named_and_its_content_is_not(held: str | None) -> None:
    with pytest.raises(InvalidValueError, match=r"shared: the environment variable KEY .*32 to 128 hex") as raised:
        group_key(SHARED, {} if held is None else {"KEY": held})
    assert not held or held not in str(raised.value)


def test_missing_password_is_named() -> None:
    with pytest.raises(InvalidValueError, match="the environment variable PASSWORD is not set"):
        store_password(replace(SHARED, password_env="PASSWORD"), {})
    assert store_password(SHARED, {}) is None


def test_router_is_named_like_its_host_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert router_name(replace(SHARED, router="eu-1")) == "eu-1"
    for host, name in {"gorgo-7f.example": "gorgo-7f.example", "-ä/b": "b", "": "router"}.items():
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert router_name(SHARED) == name


def test_fingerprints_under_one_key_have_one_id_and_no_other() -> None:
    keys = [Fingerprinter(key=key, block_bytes=size) for key, size in ((1, 64), (1, 64), (2, 64), (1, 128))]
    ids = [each.key_id for each in keys]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    prompt = Prompt(b"x" * 640, ())
    assert keys[0](prompt).blocks == keys[1](prompt).blocks != keys[2](prompt).blocks


def test_authorities_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    for name in ("no.pem", "missing.pem"):
        with pytest.raises(InvalidValueError, match=f"ca_file .*{name}.*; expected certificates of authorities"):
            store_tls(replace(SHARED, url="rediss://s", ca_file=str(tmp_path / name)))


def test_without_a_file_the_authorities_of_the_system_are_trusted() -> None:
    context = cast(ssl.SSLContext, store_tls(replace(SHARED, url="rediss://s")))
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert store_tls(SHARED) is None


async def test_password_of_a_user_is_sent(redis_server: RedisServer) -> None:
    async with store_client(redis_server.shared(), {}) as client:
        await client.acl_setuser("gorgo", enabled=True, passwords="+secret-password", keys="*", commands=["+@all"])
    with_user = replace(redis_server.shared(), username="gorgo", password_env="PASSWORD")
    async with store_client(with_user, {"PASSWORD": "secret-password"}) as client:
        assert await client.acl_whoami() == "gorgo"
    async with store_client(with_user, {"PASSWORD": "wrong"}) as client:
        with pytest.raises(AuthenticationError):
            await client.ping()


async def test_command_to_a_store_that_does_not_answer_ends(
    monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    monkeypatch.setattr(connection, "COMMAND_S", 0.05)
    async with relay(redis_server.port) as relayed:
        relayed.cut()
        async with store_client(replace(SHARED, url=f"redis://127.0.0.1:{relayed.port}"), {}) as client:
            with pytest.raises(TimeoutError):
                await client.ping()


@needs_openssl
async def test_store_with_tls_is_trusted_by_its_own_authority_alone(tmp_path: Path, redis_server: RedisServer) -> None:
    """The server's own build has no TLS: a relay before it has."""
    theirs, foreign = tmp_path / "theirs", tmp_path / "foreign"
    theirs.mkdir()
    foreign.mkdir()
    authority, other = Authority(theirs), Authority(foreign)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("store"))
    async with relay(redis_server.port, tls=context) as relayed:
        url = f"rediss://127.0.0.1:{relayed.port}"
        async with store_client(replace(SHARED, url=url, ca_file=authority.ca), {}) as client:
            assert await client.ping()
        for refusing in (replace(SHARED, url=url, ca_file=other.ca), replace(SHARED, url=url)):
            async with store_client(refusing, {}) as client:
                with pytest.raises(ConnectionError):
                    await client.ping()
