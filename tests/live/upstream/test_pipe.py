"""A response's body passed to a sink, without a task that wakes for each read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from gorgo.live.upstream.client import PassChunk, UpstreamClient, UpstreamError
from tests.live.upstream.engine import OK, Speak, engine, whole
from tests.proxy.conftest import system_tls, until

ON_BOTH_LOOPS = True

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def taking(got: list[bytes], *, more: bool = True) -> PassChunk:
    """A sink that appends to `got`."""

    def take(piece: bytes) -> bool:
        got.append(piece)
        return more

    return take


def speaking(*pieces: bytes, ends: bool = False) -> Speak:
    """An engine that sends the pieces, each after the reader has had a turn."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)
            if ends:
                return

    return speak


async def test_each_read_reaches_the_sink_until_the_end_and_the_connection_serves_again() -> None:
    async with engine(speaking(CHUNKED, chunk(b"a"), chunk(b"b") + chunk(b"c"), END)) as (upstream, found):
        for _ in range(2):
            got: list[bytes] = []
            source = await upstream.open("/v1", [], b"")
            assert await source.pipe(taking(got))
            assert b"".join(got) == b"abc"
            await source.aclose()
        assert found.connections == 1


async def test_a_sink_that_takes_no_more_has_had_its_chunk_and_the_rest_waits() -> None:
    async with engine(speaking(CHUNKED, chunk(b"a"), chunk(b"b"), chunk(b"c"), END)) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        got: list[bytes] = []

        assert not await source.pipe(taking(got, more=False))
        await asyncio.sleep(0.05)
        assert got == [b"a"]
        async with source.chunks() as chunks:
            got.append(await anext(aiter(chunks)))
            assert await source.pipe(taking(got))
        assert b"".join(got) == b"abc"
        assert await source.pipe(taking(got))  # nothing is left
        await source.aclose()


async def test_reading_pauses_while_the_sink_takes_no_more() -> None:
    sent = 0

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20))
        for _ in range(1024):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16
        await reader.read()  # the connection ends with its client: an abort would drop what is not sent yet

    async with engine(speak) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        got = 0

        def take(piece: bytes) -> bool:
            nonlocal got
            got += len(piece)
            return got > 1 << 20  # after the first piece, only what the sockets and buffers hold may come

        assert not await source.pipe(take)
        await asyncio.sleep(0.2)
        assert sent < 32 << 20
        while not await source.pipe(take):
            pass
        assert got == 64 << 20
        await source.aclose()


async def test_an_incomplete_body_fails_after_all_that_came() -> None:
    async with engine(speaking(CHUNKED, chunk(b"a"), chunk(b"b"), ends=True)) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        got: list[bytes] = []
        with pytest.raises(UpstreamError, match="disconnected"):
            await source.pipe(taking(got))
        assert b"".join(got) == b"ab"
        await source.aclose()


async def test_what_a_sink_raises_is_raised_as_it_is() -> None:
    class OwnError(Exception):
        pass

    def fail(_: bytes) -> bool:
        raise OwnError

    async with engine(speaking(CHUNKED, chunk(b"a"), chunk(b"b"))) as (upstream, found):
        source = await upstream.open("/v1", [], b"")
        async with source.chunks():
            with pytest.raises(OwnError):
                await source.pipe(fail)
        await source.aclose()
        await until(lambda: found.open == 0)


async def test_a_cancelled_reader_ends_its_connection() -> None:
    async with engine(speaking(CHUNKED, chunk(b"a"))) as (upstream, found):
        source = await upstream.open("/v1", [], b"")
        got: list[bytes] = []
        reading = asyncio.create_task(source.pipe(taking(got)))
        await until(lambda: got == [b"a"])
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await source.aclose()
        await until(lambda: found.open == 0)


async def test_a_response_that_was_piped_to_its_end_has_no_chunks_left() -> None:
    async with engine(speaking(OK)) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        assert await source.pipe(lambda _: True)
        assert await whole(source) == b""


async def test_the_stream_of_another_transport_reaches_the_sink_too() -> None:
    class Body(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in (b"a", b"b", b"c"):
                yield piece
            raise httpx.ReadError("x")

    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Body())

    transport = httpx.MockTransport(answer)
    upstream = UpstreamClient(
        "http://replica", connections=1, connect_timeout_s=1.0, tls=system_tls(), new_transport=lambda _: transport
    )
    source = await upstream.open("/v1", [], b"")
    got: list[bytes] = []
    assert not await source.pipe(taking(got, more=False))
    with pytest.raises(UpstreamError, match="disconnected"):
        await source.pipe(taking(got))
    assert got == [b"a", b"b", b"c"]
    await source.aclose()
    await upstream.aclose()
