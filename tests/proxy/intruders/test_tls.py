"""TLS on both sides, with certificates made for the test by the `openssl` program."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.load import parse_config
from gorgo.config.model import TlsConfig
from gorgo.errors import ConfigError
from gorgo.live.http import tls
from gorgo.live.http.tls import expiry_s, served_tls, shared_tls, upstream_tls
from tests.proxy.authority import OPENSSL, Authority, needs_openssl
from tests.proxy.conftest import QUIET, Running, Start, config_for
from tests.proxy.fakes import DONE, answer, chat, delta, stream
from tests.proxy.followed import follow, regions
from tests.proxy.raw import RawClient, connected

pytestmark = needs_openssl
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> tuple[str, str]:
    return authority.pair("one")


# -- clients


async def served(start: Start, pair: tuple[str, str]) -> Running:
    proxy = replace(QUIET, tls=TlsConfig(cert=pair[0], key=pair[1]))
    return await start.fleet([stream(delta("good"), delta("more"), DONE)], proxy=proxy, header_timeout_s=0.5)


async def test_clients_are_served_by_tls_and_no_other_way(
    start: Start, authority: Authority, pair: tuple[str, str]
) -> None:
    fleet = await served(start, pair)
    assert fleet.addresses.data_url.startswith("https://")
    async with httpx.AsyncClient(base_url=fleet.addresses.data_url, verify=authority.trusting()) as client:
        for _ in range(2):
            response = await client.post(CHAT, content=chat(stream=True))
            assert response.content == delta("good") + delta("more") + DONE
        assert (await client.get("/health")).status_code == 200
    async with httpx.AsyncClient(base_url=fleet.addresses.data_url) as stranger:
        with pytest.raises(httpx.ConnectError, match="verify failed"):
            await stranger.get("/health")
    for noise in (b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n", b"\x16\x03\x01\x00\xff" + b"\0" * 255):
        async with connected(fleet.addresses.data) as plain:
            plain.writer.write(noise)
            assert b"HTTP/1.1 200" not in await plain.rest()
    async with connected(fleet.addresses.data) as silent:
        assert await silent.rest() == b""  # given up after `header_timeout_s`
    await fleet.idle()


async def test_connections_that_never_agree_on_tls_make_room_for_those_that_do(
    start: Start, authority: Authority, pair: tuple[str, str]
) -> None:
    proxy = replace(QUIET, tls=TlsConfig(cert=pair[0], key=pair[1]))
    fleet = await start.fleet([stream(delta("good"), DONE)], proxy=proxy, header_timeout_s=60.0, max_connections=4)
    async with AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(fleet.addresses.data)) for _ in range(4)]
        async with asyncio.timeout(10):
            assert await answers(fleet, authority)
            with suppress(ConnectionError):
                assert await silent[0].rest() == b""
    await fleet.stop()


async def answers(fleet: Running, authority: Authority) -> bool:
    try:
        async with over_tls(fleet, authority.trusting()) as client:
            await client.post(CHAT, chat(stream=True), "connection: close")
            return b"good" in await client.rest()
    except OSError:
        return False


async def test_http_1_1_alone_and_no_old_tls_are_offered(
    start: Start, authority: Authority, pair: tuple[str, str]
) -> None:
    fleet = await served(start, pair)
    context = authority.trusting()
    for offered, taken in ((["h2", "http/1.1"], "http/1.1"), (["http/1.1"], "http/1.1"), (["h2"], None)):
        context.set_alpn_protocols(offered)
        async with over_tls(fleet, context) as client:
            assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == taken
            await client.post(CHAT, chat(stream=True), "connection: close")
            said = await client.rest()
            assert said.startswith(b"HTTP/1.1 200 ")
            assert delta("good") in said
    assert fleet.state.served_tls is not None
    assert fleet.state.served_tls.context.minimum_version >= ssl.TLSVersion.TLSv1_2


async def test_a_client_renegotiates_nothing(start: Start, authority: Authority, pair: tuple[str, str]) -> None:
    fleet = await served(start, pair)
    assert fleet.state.served_tls is not None
    assert fleet.state.served_tls.context.options & ssl.OP_NO_RENEGOTIATION
    command = ("s_client", "-connect", "{}:{}".format(*fleet.addresses.data), "-tls1_2", "-CAfile", authority.ca)
    assert OPENSSL is not None
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(OPENSSL, *command, stdin=pipe, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(20):
        _, said = await client.communicate(b"R\n")
    assert b"no renegotiation" in said
    async with over_tls(fleet, authority.trusting()) as other:
        await other.post(CHAT, chat(stream=True), "connection: close")
        assert b"good" in await other.rest()
    await fleet.idle()


async def test_a_handshake_that_drips_ends_with_the_time_of_a_head(start: Start, pair: tuple[str, str]) -> None:
    fleet = await served(start, pair)
    started = asyncio.get_running_loop().time()
    async with connected(fleet.addresses.data) as client:
        for byte in b"\x16\x03\x01\x00\xff\x01\x00\x00\xfb" + bytes(100):
            client.writer.write(bytes([byte]))
            if client.reader.at_eof() or client.writer.is_closing():
                break
            await asyncio.sleep(0.05)
        assert await client.rest() == b""
    assert asyncio.get_running_loop().time() - started < 5
    await fleet.idle()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_protocols_find_no_handshake(
    start: Start, authority: Authority, pair: tuple[str, str], version: ssl.TLSVersion
) -> None:
    fleet = await served(start, pair)
    context = authority.trusting()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        async with over_tls(fleet, context):
            pass
    await fleet.idle()


async def test_client_that_vanishes_in_the_middle_of_tls_leaves_nothing(
    start: Start, authority: Authority, pair: tuple[str, str]
) -> None:
    fleet = await served(start, pair)
    for _ in range(3):
        async with over_tls(fleet, authority.trusting()) as client:
            await client.post(CHAT, chat(stream=True))
            client.reset()
    async with over_tls(fleet, authority.trusting()) as client:
        client.writer.write(b"POST / HTTP/1.1\r\n")  # and never more
        assert b" 408 " in await client.rest()
    await fleet.idle()


async def test_renewed_certificate_is_shown_from_the_next_handshake_on(
    start: Start, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.pair("renewed")
    replica = await start.replica(stream(delta("good"), DONE))
    text = regions({"a": replica}, proxy={"tls": {"cert": cert, "key": key}})
    followed = await follow(start, tmp_path, text, [replica])
    async with over_tls(followed.fleet, authority.trusting()) as before:
        first = before.writer.get_extra_info("ssl_object").getpeercert(True)
        authority.pair("renewed")
        await followed.rewrite(text)
        async with over_tls(followed.fleet, authority.trusting()) as after:
            assert after.writer.get_extra_info("ssl_object").getpeercert(True) != first
        Path(key).write_text("no key")
        await followed.rewrite(text)
        assert followed.count("refused") == 1
        async with over_tls(followed.fleet, authority.trusting()) as still:
            assert still.writer.get_extra_info("ssl_object").getpeercert(True) != first
        before.writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
        assert (await before.head()).startswith(b"HTTP/1.1 200")


async def test_tls_that_is_turned_off_in_the_file_stays_on_and_the_log_says_so(
    start: Start, authority: Authority, pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await start.replica(answer(200))
    text = regions({"a": replica}, proxy={"tls": {"cert": pair[0], "key": pair[1]}})
    followed = await follow(start, tmp_path, text, [replica])
    for _ in range(2):
        await followed.rewrite(regions({"a": replica}))
    told = [record.fields for record in caplog.records if record.getMessage() == "config_reloaded"]  # type: ignore[attr-defined]
    assert [fields["restart_needed"] for fields in told] == [["proxy.tls"], ["proxy.tls"]]
    async with over_tls(followed.fleet, authority.trusting()) as client:
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200")


async def test_renewed_authority_of_a_replica_is_believed_after_a_reload(
    start: Start, authority: Authority, pair: tuple[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    ca = tmp_path / "ca.crt"
    ca.write_bytes(Path(Authority(other).ca).read_bytes())
    url = await start.tls_engine(pair, None)
    text = regions({"a": {"url": url, "ca_file": str(ca)}})
    followed = await follow(start, tmp_path, text, [])
    assert (await followed.fleet.client.post(CHAT, content=chat())).status_code == 503
    ca.write_bytes(Path(authority.ca).read_bytes())
    await followed.rewrite(text)
    assert (await followed.fleet.client.post(CHAT, content=chat())).status_code == 200
    ca.write_text("no certificate")
    await followed.rewrite(text)
    assert followed.count("refused") == 1
    assert (await followed.fleet.client.post(CHAT, content=chat())).status_code == 200


async def test_new_certificate_is_shown_without_a_new_start(authority: Authority, pair: tuple[str, str]) -> None:
    served = served_tls(TlsConfig(cert=pair[0], key=pair[1]))
    assert served is not None
    cert, key = authority.pair("two")
    before_s = served.expires_s
    served.renew(TlsConfig(cert=cert, key=key))
    assert before_s is not None
    assert served.expires_s is not None
    assert served.expires_s >= before_s
    with pytest.raises(ConfigError, match="expected a certificate chain"):
        served.renew(TlsConfig(cert=pair[0], key=key))  # another's key: the pair in force stays
    assert served_tls(TlsConfig()) is None


async def test_renewed_files_are_shown_without_a_signal(
    start: Start, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "RENEW_S", 0.02)
    pairs = [authority.pair("before"), authority.pair("after")]
    files = [str(tmp_path / name) for name in ("served.crt", "served.key")]
    for source, target in zip(pairs[0], files, strict=True):
        shutil.copy(source, target)
    replica = await start.replica(answer(200))
    proxy = replace(QUIET, tls=TlsConfig(cert=files[0], key=files[1]))
    fleet = await start.proxy(config_for([replica], proxy=proxy), [replica])
    place = httpx.URL(fleet.addresses.data_url)

    def shown() -> str:
        return ssl.get_server_certificate((place.host, place.port or 443))

    assert await asyncio.to_thread(shown) == Path(pairs[0][0]).read_text()
    for source, target in zip(pairs[1], files, strict=True):
        shutil.copy(source, f"{target}.new")
        os.replace(f"{target}.new", target)
    expected, found = Path(pairs[1][0]).read_text(), ""
    async with asyncio.timeout(5):
        while found != expected:
            found = await asyncio.to_thread(shown)


def test_expiry_is_that_of_the_first_of_the_chain_to_expire(authority: Authority, pair: tuple[str, str]) -> None:
    assert OPENSSL is not None
    ends = []
    for file in (pair[0], authority.ca):
        said = subprocess.run((OPENSSL, "x509", "-enddate", "-noout", "-in", file), capture_output=True, check=True)
        text = said.stdout.decode().strip().partition("=")[2]
        ends.append(datetime.strptime(text, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC).timestamp())
        assert expiry_s(file) == ends[-1]
    chain = Path(pair[0]).with_name("chain.crt")
    chain.write_text(Path(pair[0]).read_text() + Path(authority.ca).read_text())
    assert expiry_s(str(chain)) == min(ends)
    chain.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    assert expiry_s(str(chain)) is None
    assert expiry_s("/nowhere") is None


def test_files_that_do_not_fit_are_named(authority: Authority, pair: tuple[str, str], tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for cert, key in (("/nowhere", pair[1]), (pair[0], "/nowhere"), (str(empty), pair[1]), (pair[0], authority.ca)):
        with pytest.raises(ConfigError, match=r"proxy\.tls"):
            served_tls(TlsConfig(cert=cert, key=key))
    with pytest.raises(ConfigError, match=r"^proxy\.tls: '/nowhere' with '.*': No such file or directory; expected"):
        served_tls(TlsConfig(cert="/nowhere", key=pair[1]))
    locked = str(tmp_path / "locked.key")
    authority._openssl("ec", "-in", pair[1], "-aes256", "-passout", "pass:secret", "-out", locked)
    with pytest.raises(ConfigError, match="without a passphrase"):
        served_tls(TlsConfig(cert=pair[0], key=locked))
    pipe = str(empty.with_name("pipe"))
    os.mkfifo(pipe)
    for cert, key in ((pipe, pair[1]), (pair[0], pipe)):
        with pytest.raises(ConfigError, match="pipe' is a pipe; expected a certificate chain"):
            served_tls(TlsConfig(cert=cert, key=key))
    with pytest.raises(ConfigError, match=r"ca_file .*pipe' is a pipe; expected certificates"):
        upstream_tls(ReplicaConfig(name="a", region="here", url="https://a", ca_file=pipe), shared_tls())
    replica = ReplicaConfig(name="a", region="here", url="https://a", ca_file=str(empty))
    with pytest.raises(ConfigError, match="ca_file"):
        upstream_tls(replica, shared_tls())


# -- replicas


@pytest.mark.parametrize(
    ("asks", "trusts", "shows", "status"),
    [
        (False, True, False, 200),
        (False, False, False, 503),
        (True, True, True, 200),
        (True, True, False, 502),
    ],
    ids=["own authority", "unknown authority", "mutual", "no certificate of ours"],
)
async def test_replica_is_believed_and_believes_by_certificates(
    start: Start, authority: Authority, pair: tuple[str, str], asks: bool, trusts: bool, shows: bool, status: int
) -> None:
    url = await start.tls_engine(pair, authority.ca if asks else None)
    honest = await start.replica(answer(200))
    row = ReplicaConfig(name="a", region="here", url=url, engine="openai", ca_file=authority.ca if trusts else None)
    if shows:
        row = replace(row, client_cert=pair[0], client_key=pair[1])
    config = config_for([honest])
    config = replace(config, replicas=(row,))
    fleet = await start.proxy(config, [])
    assert (await fleet.client.post(CHAT, content=chat())).status_code == status


CONFIG = """
proxy: {region: us%s}
regions: [{name: us}]
replicas: [{name: a, region: us, url: "%s"%s}]
"""


@pytest.mark.parametrize(
    ("proxy", "url", "replica", "said"),
    [
        (", tls: {cert: a.crt}", "http://a", "", "proxy.tls"),
        (", tls: {key: a.key}", "http://a", "", "cert and key, both or neither"),
        ("", "http://a", ", ca_file: a", "replicas[0].ca_file (line 4): given for a url without TLS"),
        ("", "https://a", ", client_cert: a", "client_cert and client_key, both or neither"),
        ("", "https://a", ", client_key: a", "client_cert and client_key, both or neither"),
        ("", "https://a", ", ca_file: ''", "replicas[0].ca_file"),
    ],
)
def test_half_a_pair_and_files_without_use_are_refused(proxy: str, url: str, replica: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config((CONFIG % (proxy, url, replica)).encode())
    assert said in str(raised.value)


@asynccontextmanager
async def over_tls(fleet: Running, context: ssl.SSLContext) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection(*fleet.addresses.data, ssl=context)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
