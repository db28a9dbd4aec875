"""A connection that ends at any byte of a response, or carries bytes that are not one."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from gorgo.live.upstream import client
from gorgo.live.upstream.client import PassChunk, ResponseSource, UpstreamError
from tests.live.upstream.engine import OK, Speak, engine, whole
from tests.proxy.conftest import until

ON_BOTH_LOOPS = True

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


def cut(response: bytes, *, reset: bool) -> Speak:
    """An engine whose connection ends after `response`, by a reset or in order."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await writer.drain()
        if reset:
            # The bytes are read first: a reset drops what is not.
            await asyncio.sleep(0.002)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return speak


@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_ends_at_any_byte_of_a_head_is_lost(reset: bool) -> None:
    for end in range(len(HEAD)):
        async with engine(cut(HEAD[:end], reset=reset)) as (upstream, found):
            with pytest.raises(UpstreamError, match="disconnected"):
                await upstream.open("/v1", [], b"{}")
            assert (found.connections, upstream.open_responses) == (1, 0), end


async def iterate(source: ResponseSource, take: PassChunk) -> bool:
    async with source.chunks() as chunks:
        async for chunk in chunks:
            take(chunk)
    return True


@pytest.mark.parametrize("piped", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_connection_that_ends_at_any_byte_of_the_chunks_leaves_an_incomplete_body(
    reset: bool, piped: bool
) -> None:
    for end in range(len(CHUNKS)):
        async with engine(cut(HEAD + CHUNKS[:end], reset=reset)) as (upstream, found):
            source = await upstream.open("/v1", [], b"{}")
            got = bytearray()

            def take(chunk: bytes, got: bytearray = got) -> bool:
                got.extend(chunk)
                return True

            with pytest.raises(UpstreamError, match="disconnected"):
                await (source.pipe(take) if piped else iterate(source, take))
            assert b"abcde".startswith(bytes(got)), end
            assert len(got) == (0 if end < 4 else min(end - 3, 3) if end < 12 else min(end - 11, 2) + 3)
            await source.aclose()
            assert (found.connections, upstream.open_responses, upstream.connections) == (1, 0, 0)


@pytest.mark.parametrize("extra", [b"x", b"HTTP/1.1 200 OK\r\n", OK, b"\r\n\r\nx"])
async def test_bytes_after_a_response_close_its_connection(extra: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + extra)
        await reader.read()

    async with engine(speak) as (upstream, found):
        for number in (1, 2):
            assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
            await until(lambda: found.open == 0)
            assert found.connections == number


async def test_bytes_on_an_idle_connection_close_it() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await idle.wait()
        writer.write(OK)
        await reader.read()

    idle = asyncio.Event()
    async with engine(speak) as (upstream, found):
        assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        idle.set()
        await until(lambda: found.open == 0)
        assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        assert found.connections == 2


def closing_at_second(response: bytes, *, after_s: float = 0.0) -> Speak:
    """An engine that ends each first connection at its second request, with `response` instead of an answer."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(after_s)
        writer.write(response)

    return speak


async def test_a_request_on_a_connection_closed_meanwhile_is_sent_once_more_on_a_new_one() -> None:
    async with engine(closing_at_second(b"")) as (upstream, found):
        for _ in range(2):
            assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        assert found.connections == 2
        # The new connection is kept in its turn.
        assert upstream.connections == 1


async def test_a_replica_that_refuses_the_repeated_request_has_broken_the_connection_of_the_first() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")
        found.server.close()

    async with engine(speak) as (upstream, found):
        assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        with pytest.raises(UpstreamError, match="disconnected"):
            await upstream.open("/v1", [], b"")
        assert (upstream.open_responses, upstream.connections) == (0, 0)


async def test_what_follows_a_request_is_done_after_each_write_and_before_the_response() -> None:
    async with engine(closing_at_second(b"")) as (upstream, found):
        order: list[str] = []
        for number in (1, 2):
            source = await upstream.open("/v1", [], b"", on_sent=lambda: order.append("sent"))
            order.append(f"response {number}")
            await whole(source)
        assert (order, found.connections) == (["sent", "response 1", "sent", "sent", "response 2"], 2)


async def test_a_fault_in_what_follows_a_request_closes_its_connection() -> None:
    def fail() -> None:
        raise KeyError("a fault of the proxy itself")

    async with engine(closing_at_second(b"")) as (upstream, found):
        with pytest.raises(KeyError):
            await upstream.open("/v1", [], b"", on_sent=fail)
        await until(lambda: found.open == 0)
        assert (upstream.open_responses, upstream.connections) == (0, 0)


@pytest.mark.parametrize("first", [b"H", b"HTTP/1.1 103 Hints\r\n\r\n"])
async def test_a_request_is_not_repeated_after_a_byte_of_an_answer(first: bytes) -> None:
    async with engine(closing_at_second(first)) as (upstream, found):
        assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        with pytest.raises(UpstreamError, match="disconnected"):
            await upstream.open("/v1", [], b"")
        assert found.connections == 1


async def test_a_request_is_not_repeated_after_the_time_of_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STALE_S", 0.02)
    async with engine(closing_at_second(b"", after_s=0.05)) as (upstream, found):
        assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        with pytest.raises(UpstreamError, match="disconnected"):
            await upstream.open("/v1", [], b"")
        assert found.connections == 1


async def test_a_request_on_a_new_connection_is_never_repeated() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async with engine(speak) as (upstream, found):
        with pytest.raises(UpstreamError, match="disconnected"):
            await upstream.open("/v1", [], b"")
        assert found.connections == 1


async def test_a_cancelled_request_closes_its_connection_before_the_head() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        received.set()
        await reader.read()

    received = asyncio.Event()
    async with engine(speak) as (upstream, found):
        request = asyncio.create_task(upstream.open("/v1", [], b""))
        await received.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await until(lambda: found.open == 0)
        assert (upstream.open_responses, upstream.connections) == (0, 0)


async def test_a_replica_faster_than_the_reader_waits_and_nothing_is_lost() -> None:
    size = 8 << 20
    written = 0

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for start in range(0, size, 1 << 16):
            writer.write(bytes([start >> 16 & 255]) * (1 << 16))
            await writer.drain()
            written += 1 << 16
        await reader.read()

    async with engine(speak) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        await asyncio.sleep(0.1)  # the sockets' buffers fill, and one of the reader's
        assert written < size
        body = await whole(source)
        assert len(body) == size
        assert all(body[start] == start >> 16 & 255 for start in range(0, size, 1 << 16))
