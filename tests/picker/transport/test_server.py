"""The HTTP/2 server on real sockets: clients that greet, read or speak wrongly, and the stop."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.model import PickerTlsConfig
from gorgo.errors import ConfigError
from gorgo.live.http import tls
from gorgo.picker.transport import frames, server
from gorgo.picker.transport.frames import Code
from tests.picker.transport.conftest import Served, serving
from tests.picker.transport.peer import Frame, data, headers, message, split
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import until

GREETING = frames.PREFACE + frames.settings({})


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


async def connect(served: Served, *sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"".join(sent))
    return reader, writer


async def to_the_end(reader: asyncio.StreamReader) -> list[Frame]:
    return list(split(await asyncio.wait_for(reader.read(), 5)))


async def closed(reader: asyncio.StreamReader) -> None:
    """Wait for the end, in order or by a reset."""
    with suppress(ConnectionResetError):
        await to_the_end(reader)


def open_connections(served: Served) -> int:
    return len(served.server.connections)


async def test_a_client_of_http1_is_told_and_closed(served: Served) -> None:
    reader, writer = await connect(served, b"GET / HTTP/1.1\r\n\r\n")
    found = await to_the_end(reader)
    assert (found[-1].kind, found[-1].code) == (frames.GOAWAY, Code.PROTOCOL_ERROR)
    assert found[-1].payload[8:] == b"expected the preface of HTTP/2"
    writer.close()


async def test_a_client_that_sends_no_settings_is_closed_after_its_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.05)
    reader, writer = await connect(served, frames.PREFACE)
    found = await to_the_end(reader)
    assert found[-1].code == Code.SETTINGS_TIMEOUT
    writer.close()


async def test_a_silent_client_is_asked_for_a_sign_of_life_and_then_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HANDSHAKE_S", "KEEPALIVE_S", "KEEPALIVE_ANSWER_S"):
        monkeypatch.setattr(server, name, 0.05)
    reader, writer = await connect(served, GREETING, headers(1), data(1, message(b"one")))
    await closed(reader)
    await until(lambda: served.calls[0].ends == 1)
    assert open_connections(served) == 0
    writer.close()


async def test_a_client_that_answers_pings_stays(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HANDSHAKE_S", "KEEPALIVE_S", "KEEPALIVE_ANSWER_S"):
        monkeypatch.setattr(server, name, 0.02)
    reader, writer = await connect(served, GREETING)
    pings = 0
    while pings < 4:
        head = await reader.readexactly(frames.HEAD_BYTES)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == frames.PING:
            pings += 1
            writer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
    assert open_connections(served) == 1
    writer.close()


async def test_a_client_that_sends_and_reads_nothing_is_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNREAD_BYTES", 100_000)
    _, writer = await connect(served, GREETING)
    ping = frames.frame(frames.PING, 0, 0, bytes(8)) * 500
    await until(lambda: open_connections(served) == 1)
    with pytest.raises(ConnectionError):  # noqa: PT012 - one of many writes raises it
        async with asyncio.timeout(10):
            while True:
                writer.write(ping)
                await writer.drain()
    await until(lambda: not open_connections(served))
    writer.close()


WITHOUT_WINDOW = frames.PREFACE + frames.settings({frames.INITIAL_WINDOW_SIZE: 0})


def unread_call(stream_id: int, size: int) -> bytes:
    """A call whose answer of `size` bytes waits for a window."""
    content = message(b"x" * (size - 5))
    parts = (content[at : at + frames.FRAME_BYTES] for at in range(0, len(content), frames.FRAME_BYTES))
    return headers(stream_id) + b"".join(data(stream_id, part) for part in parts)


async def test_answers_that_no_client_reads_count_in_the_sum_of_all_and_end_their_connection(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """They were bounded by connection, and 1,024 of these are allowed."""
    buffers = served.server._buffers
    buffers.limit_bytes = 4_000_000
    reader, writer = await connect(served, WITHOUT_WINDOW, unread_call(1, 100_000))
    await until(lambda: buffers.used_bytes >= 100_000)
    for number in range(1, 100):
        if not open_connections(served):
            break
        with suppress(ConnectionError):
            writer.write(unread_call(2 * number + 1, 100_000))
            await writer.drain()
    await closed(reader)
    await until(lambda: not open_connections(served))
    assert buffers.used_bytes == 0
    assert [call.ends for call in served.calls] == [1] * len(served.calls)
    assert 10 < len(served.calls) <= 30  # half of the sum is one host's
    assert [each.message for each in caplog.records] == ["picker_client_does_not_read"]
    other, sent = await connect(served, GREETING, headers(1), data(1, message(b"one")))
    while b"echo one" not in await other.read(1000):
        pass
    assert buffers.used_bytes == 0
    for each in (writer, sent):
        each.close()


async def test_a_client_that_has_waiting_answers_and_reads_none_of_them_is_closed_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers pings, so that it counts as alive."""
    for name in ("HANDSHAKE_S", "KEEPALIVE_S", "UNREAD_S"):
        monkeypatch.setattr(server, name, 0.02)
    reader, writer = await connect(served, WITHOUT_WINDOW, unread_call(1, 1000))
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        async with asyncio.timeout(10):
            while head := await reader.readexactly(frames.HEAD_BYTES):
                payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == frames.PING:
                    writer.write(frames.frame(frames.PING, frames.ACK, 0, payload))
    await until(lambda: not open_connections(served))
    assert [each.message for each in caplog.records] == ["picker_client_does_not_read"]
    assert served.server._buffers.used_bytes == 0
    writer.close()


async def test_a_new_connection_takes_the_place_of_the_one_without_a_call_for_longest(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    open_call = headers(1) + data(1, message(b"one"))
    _, calling = await connect(served, GREETING, open_call)
    await until(lambda: len(served.calls) == 1)
    idle = []
    for count in (2, 3):
        idle.append(await connect(served, GREETING))
        await until(lambda least=count: open_connections(served) == least)  # type: ignore[misc]
    _, newest = await connect(served, GREETING, open_call)
    await closed(idle[0][0])
    await until(lambda: len(served.calls) == 2)
    assert open_connections(served) == 3
    assert served.calls[0].ends == 0
    assert [each.message for each in caplog.records] == ["picker_connections_full"]
    for writer in (calling, newest, *(writer for _, writer in idle)):
        writer.close()


async def test_a_host_that_has_all_places_leaves_one_to_another(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its connections has a call: none is idle."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    crowd = [await connect(served, GREETING, headers(1), data(1, message(b"one"))) for _ in range(3)]
    await until(lambda: len(served.calls) == 3)
    _, refused = await connect(served, GREETING)
    for protocol in served.server.connections:
        protocol.host = "10.0.0.1"
    _, other = await connect(served, GREETING, headers(1), data(1, message(b"two")))
    await until(lambda: len(served.calls) == 4)
    assert sorted(call.ends for call in served.calls) == [0, 0, 0, 1]
    assert open_connections(served) == 3
    for writer in (refused, other, *(writer for _, writer in crowd)):
        writer.close()


async def test_one_connection_more_than_the_bound_is_closed_and_those_with_calls_stay(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 1)
    _, first = await connect(served, GREETING, headers(1), data(1, message(b"one")))
    await until(lambda: len(served.calls) == 1)
    reader, second = await connect(served, GREETING)
    await closed(reader)
    assert open_connections(served) == 1
    first.close()
    second.close()


async def test_a_draining_server_serves_new_calls_and_new_connections_until_its_end(served: Served) -> None:
    """Envoy may have sent a call before it reads the announcement, and there may be no other server to connect to."""
    old_reader, old = await connect(served, GREETING, headers(1), data(1, message(b"one"), end=True))
    await until(lambda: bool(served.calls) and served.calls[0].received == [b"one"])
    served.server.start_drain()
    old.write(headers(3) + data(3, message(b"two"), end=True))
    new_reader, new = await connect(served, GREETING)
    await new_reader.readexactly(frames.HEAD_BYTES)
    new.write(headers(1) + data(1, message(b"three"), end=True))
    await until(lambda: len(served.calls) == 3)
    assert sorted(each.received[0] for each in served.calls) == [b"one", b"three", b"two"]
    served.closing.set()
    found = await to_the_end(old_reader)
    goaways = [int.from_bytes(each.payload[:4], "big") for each in found if each.kind == frames.GOAWAY]
    assert goaways == [frames.LARGEST_WINDOW, 3]
    assert open_connections(served) == 0
    old.close()
    new.close()


# --- TLS: a certificate that clients trust, one that is renewed, and files that are wrong.


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


@needs_openssl
async def test_a_call_goes_over_tls_and_one_without_it_does_not(authority: Authority) -> None:
    cert, key = authority.pair("first")
    async with serving(tls=PickerTlsConfig(cert=cert, key=key)) as served:
        assert await echoed(served, authority) == b"echo one"
        plain = served.call(served.channel())
        assert (await plain.code()).name == "UNAVAILABLE"


@needs_openssl
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


@needs_openssl
async def test_files_that_are_no_pair_are_an_error_with_their_place(authority: Authority) -> None:
    cert, _ = authority.pair("third")
    _, key = authority.pair("fourth")
    with pytest.raises(ConfigError, match=r"picker\.tls"):
        async with serving(tls=PickerTlsConfig(cert=cert, key=key)):
            pass


@needs_openssl
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


@needs_openssl
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


@needs_openssl
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


@needs_openssl
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


@needs_openssl
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
