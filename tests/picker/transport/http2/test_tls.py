"""TLS: a certificate that clients trust, one that is renewed, and files that are wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.model import PickerTlsConfig
from gorgo.errors import ConfigError
from gorgo.live.http import tls
from tests.picker.transport.conftest import Served, serving
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import until

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def echoed(served: Served, authority: Authority, shown: tuple[str, str] | None = None) -> Any:
    call = served.call(served.channel(trusting=Path(authority.ca).read_bytes(), shown=shown))
    await call.write(b"one")
    return await call.read()


async def refused(served: Served, authority: Authority, shown: tuple[str, str] | None) -> bool:
    """Whether the server ends a client's handshake, and opens no call of it."""
    before = len(served.calls)
    context = authority.trusting()
    context.set_alpn_protocols(["h2"])
    if shown is not None:
        context.load_cert_chain(*shown)
    try:
        # A client of TLS 1.3 has ended its handshake before the server has read the certificate: it reads the refusal.
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        try:
            return await reader.read(1) == b"" and len(served.calls) == before
        finally:
            writer.close()
    except (ssl.SSLError, ConnectionError):
        return len(served.calls) == before


def shown(port: int) -> str:
    """The certificate that the server shows."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=5)


async def test_a_call_goes_over_tls_and_one_without_it_does_not(authority: Authority) -> None:
    cert, key = authority.pair("first")
    async with serving(tls=PickerTlsConfig(cert=cert, key=key)) as served:
        assert await echoed(served, authority) == b"echo one"
        plain = served.call(served.channel())
        assert (await plain.code()).name == "UNAVAILABLE"


async def test_a_renewed_certificate_is_shown_without_a_restart(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tls, "RENEW_S", 0.02)
    pairs = [authority.pair("before"), authority.pair("after")]
    files = [str(tmp_path / name) for name in ("served.crt", "served.key")]
    for source, target in zip(pairs[0], files, strict=True):
        shutil.copy(source, target)
    async with serving(tls=PickerTlsConfig(cert=files[0], key=files[1])) as served:
        assert await asyncio.to_thread(shown, served.port) == Path(pairs[0][0]).read_text()
        for source, target in zip(pairs[1], files, strict=True):
            shutil.copy(source, f"{target}.new")
            os.replace(f"{target}.new", target)
        expected, found = Path(pairs[1][0]).read_text(), ""
        async with asyncio.timeout(5):
            while found != expected:
                found = await asyncio.to_thread(shown, served.port)
        assert await echoed(served, authority) == b"echo one"


async def test_files_that_are_no_pair_are_an_error_with_their_place(authority: Authority) -> None:
    cert, _ = authority.pair("third")
    _, key = authority.pair("fourth")
    with pytest.raises(ConfigError, match=r"picker\.tls"):
        async with serving(tls=PickerTlsConfig(cert=cert, key=key)):
            pass


async def test_a_client_that_negotiates_no_http2_is_closed(authority: Authority) -> None:
    cert, key = authority.pair("fifth")
    context = authority.trusting()
    context.set_alpn_protocols(["http/1.1"])
    async with serving(tls=PickerTlsConfig(cert=cert, key=key)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not served.server.connections)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other"))


async def test_with_client_ca_only_a_certificate_of_that_authority_opens_a_call(
    authority: Authority, other: Authority
) -> None:
    cert, key = authority.pair("sixth")
    async with serving(tls=PickerTlsConfig(cert=cert, key=key, client_ca=authority.ca)) as served:
        assert await refused(served, authority, None)
        assert await refused(served, authority, other.pair("stranger"))
        stranger = served.call(served.channel(trusting=Path(authority.ca).read_bytes()))
        assert (await stranger.code()).name == "UNAVAILABLE"
        assert served.calls == []
        assert await echoed(served, authority, authority.pair("envoy")) == b"echo one"


async def test_another_authority_of_clients_is_in_force_without_a_restart_and_the_old_one_no_more(
    authority: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tls, "RENEW_S", 0.02)
    cert, key = authority.pair("seventh")
    before, after = authority.pair("before-envoy"), other.pair("after-envoy")
    client_ca = tmp_path / "clients.pem"
    shutil.copy(authority.ca, client_ca)
    context = authority.trusting()
    context.load_cert_chain(*before)
    async with serving(tls=PickerTlsConfig(cert=cert, key=key, client_ca=str(client_ca))) as served:
        assert await echoed(served, authority, before) == b"echo one"
        assert await asyncio.to_thread(greeted, served.port, context)
        shutil.copy(other.ca, f"{client_ca}.new")
        os.replace(f"{client_ca}.new", client_ca)
        async with asyncio.timeout(10):
            while await refused(served, authority, after):
                pass
        assert await refused(served, authority, before)
        assert not await asyncio.to_thread(greeted, served.port, context)
        assert await echoed(served, authority, after) == b"echo one"


async def test_with_client_ca_no_session_can_be_resumed_past_its_authority(authority: Authority) -> None:
    cert, key = authority.pair("ninth")
    context = authority.trusting()
    context.load_cert_chain(*authority.pair("tenth"))
    async with serving(tls=PickerTlsConfig(cert=cert, key=key, client_ca=authority.ca)) as served:
        session = await asyncio.to_thread(greeted, served.port, context)
        assert session is not None
        assert not session.has_ticket
        # Of TLS 1.2 the server retains sessions without tickets too.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await asyncio.to_thread(greeted, served.port, context) is None


def greeted(port: int, context: ssl.SSLContext) -> ssl.SSLSession | None:
    """The session of a client whom the server greets; `None` for one that it refuses."""
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as client:
                return client.session if client.recv(1) else None
        except (ssl.SSLError, ConnectionError):
            return None


async def test_a_file_without_an_authority_is_an_error_with_its_place(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.pair("eighth")
    words = tmp_path / "words.pem"
    words.write_text("nonsense")
    for file in (cert, key, str(words), "/nowhere.pem"):
        with pytest.raises(
            ConfigError, match=r"picker\.tls: client_ca .*; expected certificates of authorities in PEM"
        ):
            async with serving(tls=PickerTlsConfig(cert=cert, key=key, client_ca=file)):
                pass
