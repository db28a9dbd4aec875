"""The HTTP/2 server on real sockets: clients that greet, read or speak wrongly, and the stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from gorgo.picker.transport.http2 import frames, server
from gorgo.picker.transport.http2.frames import Code
from tests.picker.transport.conftest import Served, serving
from tests.picker.transport.http2.peer import Frame, data, headers, message, split
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
