"""Responses, whatever their bytes and their cuts: the parser, lost connections, and bodies passed to a sink."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from gorgo.live.upstream import client, response
from gorgo.live.upstream.client import PassChunk, ResponseSource, UpstreamClient, UpstreamError
from gorgo.live.upstream.response import MAX_HEAD_BYTES, MAX_HEADERS, MAX_INTERIM, ResponseParser
from tests.live.upstream.engine import OK, Speak, engine, whole
from tests.proxy.conftest import system_tls, until

# --- One response, whatever its bytes and their cuts.


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OK_RESPONSE_PARSER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def parsed(data: bytes, *, cut: int | None = None, head_only: bool = False) -> tuple[ResponseParser, bytes]:
    """The parser after `data` in pieces of `cut` bytes, and the body it found."""
    parser = ResponseParser(head_only=head_only)
    size = cut or len(data)
    body = bytearray()
    for start in range(0, len(data), size):
        if parser.failure is None:
            body += parser.feed(data[start : start + size])
    return parser, bytes(body)


#: Responses that are complete with their last byte: status, body, and whether the connection may carry another.
COMPLETE = {
    "a length": (OK_RESPONSE_PARSER, 200, b"ok", True),
    "chunks": (CHUNKED + b"1\r\na\r\n2;x=y\r\nbc\r\n0\r\n\r\n", 200, b"abc", True),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\nset-cookie: a\r\nx: y\r\n\r\n", 200, b"a", True),
    "no content": (b"HTTP/1.1 204 None\r\n\r\n", 204, b"", True),
    "not modified, with the length of what is not sent": (
        b"HTTP/1.1 304 Same\r\nContent-Length: 9\r\n\r\n",
        304,
        b"",
        True,
    ),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", True),
    "to be closed": (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
    "an old version": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
    "an old version that would stay open": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        200,
        b"ok",
        False,
    ),
    "chunks of an old version": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        200,
        b"a",
        False,
    ),
    "interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + OK_RESPONSE_PARSER,
        200,
        b"ok",
        True,
    ),
    "an empty body": (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b"", True),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_a_response_reads_alike_however_it_is_cut(name: str) -> None:
    data, status, body, reusable = COMPLETE[name]
    for cut in (None, 1, 2, 3, 7):
        parser, found = parsed(data, cut=cut)
        assert (parser.status, found, parser.complete, parser.reusable) == (status, body, True, reusable), cut
        assert parser.failure is None
        assert not {b"Link", b"set-cookie"} & {name for name, _ in parser.headers}


@pytest.mark.parametrize("name", COMPLETE)
def test_a_response_is_complete_with_its_last_byte_and_not_before(name: str) -> None:
    data = COMPLETE[name][0]
    for end in range(1, len(data)):
        parser, _ = parsed(data[:end])
        assert not parser.complete
        assert not parser.feed_eof()
        assert not parser.reusable


REFUSED = {
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "one length twice": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "a list of lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nok",
    "a signed length": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
    "a length and chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nxx",
    "another coding of an interim answer": b"HTTP/1.1 100 Continue\r\nTransfer-Encoding: gzip\r\n\r\n"
    + OK_RESPONSE_PARSER,
    "a coding before chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a folded line": b"HTTP/1.1 200 OK\r\na: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    "a bare line feed": b"HTTP/1.1 200 OK\r\na: b\nContent-Length: 2\r\n\r\nok",
    "a bare carriage return": b"HTTP/1.1 200 OK\r\na: b\rc\r\nContent-Length: 2\r\n\r\nok",
    "a space before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
    "a NUL": b"HTTP/1.1 200 OK\r\na: \0\r\n\r\n",
    "no name": b"HTTP/1.1 200 OK\r\n: b\r\n\r\n",
    "a switch of protocols": b"HTTP/1.1 101 Switch\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nxx",
    "a status below 100": b"HTTP/1.1 099 Low\r\nContent-Length: 2\r\n\r\nok",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
    "no HTTP": b"ICY 200 OK\r\n\r\n",
    "chunks by line feed": CHUNKED + b"1\na\n0\n\n",
    "a chunk size with a prefix": CHUNKED + b"0x1\r\na\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": CHUNKED + b"f" * 17 + b"\r\na",
    "a chunk longer than its size": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "a length in the trailers": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    "an empty length in the trailers": CHUNKED + b"0\r\nx: y\r\nContent-Length:\r\n\r\n",
    "a coding in the trailers": CHUNKED + b"0\r\nTransfer-Encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_response_with_two_readings_or_none_is_refused(name: str) -> None:
    for cut in (None, 1, 5):
        parser, body = parsed(REFUSED[name], cut=cut)
        assert parser.failure is not None, cut
        assert not parser.complete
        assert not parser.reusable
        assert b"ok" not in body


def test_what_came_before_a_broken_chunk_is_of_the_body() -> None:
    parser, body = parsed(CHUNKED + b"1\r\na\r\n1\r\nb\r\nzz\r\n")
    assert body == b"ab"
    assert parser.failure is not None


@pytest.mark.parametrize("extra", [OK_RESPONSE_PARSER, b"x", b"HTTP/1.1 200 OK\r\n", b"0\r\n\r\n"])
def test_bytes_after_a_response_leave_it_whole_and_its_connection_unusable(extra: bytes) -> None:
    for cut in (None, 1):
        parser, body = parsed(OK_RESPONSE_PARSER + extra, cut=cut)
        assert (body, parser.complete, parser.reusable, parser.failure) == (b"ok", True, False, None)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser, body = parsed(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
    assert (body, parser.complete) == (b"until the end", False)
    assert parser.feed_eof()
    assert not parser.reusable


def test_a_response_to_head_ends_with_its_head_whatever_its_length() -> None:
    parser, body = parsed(OK_RESPONSE_PARSER, head_only=True)
    assert (parser.status, body, parser.complete, parser.reusable) == (200, b"", True, False)


def test_interim_answers_are_bounded() -> None:
    interim = b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"
    parser, _ = parsed(interim * MAX_INTERIM + OK_RESPONSE_PARSER)
    assert parser.complete
    parser, _ = parsed(interim * (MAX_INTERIM + 1) + OK_RESPONSE_PARSER)
    assert "interim" in str(parser.failure)


def test_headers_are_bounded_in_number_the_trailers_too() -> None:
    fits = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_HEADERS - 1))
    head = b"HTTP/1.1 200 OK\r\n" + fits + b"Content-Length: 2\r\n\r\nok"
    parser, _ = parsed(head)
    assert (parser.complete, len(parser.headers)) == (True, MAX_HEADERS)
    parser, _ = parsed(head.replace(b"x-0", b"x: z\r\nx-0"))
    assert f"more than {MAX_HEADERS} headers" in str(parser.failure)
    parser, _ = parsed(CHUNKED + b"0\r\n" + b"x: y\r\n" * MAX_HEADERS + b"\r\n")
    assert f"more than {MAX_HEADERS} headers" in str(parser.failure)


@pytest.mark.parametrize(
    ("start", "endless"),
    [
        (b"HTTP/1.1 200 ", b"reason "),
        (b"HTTP/1.1 200 OK\r\nx: ", b"a" * 8),
        (CHUNKED + b"0\r\nx: ", b"a" * 8),
        (CHUNKED + b"1;", b"a" * 8),
    ],
)
def test_bytes_that_bring_no_body_are_bounded(start: bytes, endless: bytes) -> None:
    parser = ResponseParser()
    fed = len(start)
    parser.feed(start)
    while parser.failure is None:
        parser.feed(endless)
        fed += len(endless)
        assert fed <= MAX_HEAD_BYTES + len(start) + len(endless)
    assert fed > MAX_HEAD_BYTES
    assert "without a body" in str(parser.failure)


def test_a_body_has_no_bound_here() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED)
    for _ in range(3 * MAX_HEAD_BYTES // 1000):
        assert len(parser.feed(b"3e8\r\n" + bytes(1000) + b"\r\n")) == 1000
    assert parser.failure is None


def test_chunks_of_one_byte_cost_little() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED)
    slice_ = (b"1\r\na\r\n" * 3000)[:16_384]
    shortest_s = float("inf")
    for _ in range(5):
        begun_s = time.perf_counter()
        parser.feed(slice_ + slice_ + slice_)  # 49,152 bytes are whole chunks
        shortest_s = min(shortest_s, time.perf_counter() - begun_s)
    # Measured: 0.4 ms; the bound is for a busy machine.
    assert shortest_s < 0.02


def test_bounds_of_a_response() -> None:
    found = response.MAX_INTERIM, response.MAX_HEADERS, response.MAX_HEAD_BYTES
    assert found == (8, 128, 65_536)


# --- A connection that ends at any byte of a response, or carries bytes that are not one.


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


# --- A response's body passed to a sink, without a task that wakes for each read.


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
