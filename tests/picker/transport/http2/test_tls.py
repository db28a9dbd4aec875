"""TLS: a certificate that clients trust, one that is renewed, and files that are wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.model import TlsConfig
from gorgo.errors import ConfigError
from gorgo.live.http import tls
from tests.picker.transport.conftest import Served, serving
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import until

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


async def echoed(served: Served, authority: Authority) -> Any:
    call = served.call(served.channel(trusting=Path(authority.ca).read_bytes()))
    await call.write(b"one")
    return await call.read()


def shown(port: int) -> str:
    """The certificate that the server shows."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=5)


async def test_a_call_goes_over_tls_and_one_without_it_does_not(authority: Authority) -> None:
    cert, key = authority.pair("first")
    async with serving(tls=TlsConfig(cert=cert, key=key)) as served:
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
    async with serving(tls=TlsConfig(cert=files[0], key=files[1])) as served:
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
        async with serving(tls=TlsConfig(cert=cert, key=key)):
            pass


async def test_a_client_that_negotiates_no_http2_is_closed(authority: Authority) -> None:
    cert, key = authority.pair("fifth")
    context = authority.trusting()
    context.set_alpn_protocols(["http/1.1"])
    async with serving(tls=TlsConfig(cert=cert, key=key)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not served.server.connections)
