"""One call on a kept connection: what goes over the wire, and when the connection may carry the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import nullcontext

import httpx
import pytest

from gorgo.live.upstream import connection
from gorgo.live.upstream.client import UpstreamError, encode_head
from gorgo.live.upstream.connection import SLICE_BYTES, WRITE_BYTES, ReplicaConnection
from gorgo.live.upstream.response import MAX_INTERIM, HttpResponse
from tests.live.upstream.engine import OK, engine, whole
from tests.proxy.conftest import until

ON_BOTH_LOOPS = True

START = b"POST /v1 HTTP/1.1\r\n"


def test_a_head_has_headers_in_their_order_with_duplicates_and_bytes_as_they_are() -> None:
    headers = [(b"accept", b"a"), (b"x-y", b"\xe9"), (b"accept", b"b")]
    assert encode_head(START, headers) == START + b"accept: a\r\nx-y: \xe9\r\naccept: b\r\n\r\n"
    assert encode_head(START, []) == START + b"\r\n"


@pytest.mark.parametrize("odd", [b"a\r\nx: y", b"a\nx: y", b"a\rb", b"a\0b", b"a\x7fb", b"\x0b"])
def test_a_head_never_holds_a_line_that_is_not_its_own(odd: bytes) -> None:
    with pytest.raises(ValueError, match="control character"):
        encode_head(START, [(b"x-y", odd)])
    with pytest.raises(ValueError, match="control character"):
        encode_head(START, [(odd, b"v")])


@pytest.mark.parametrize("size", [0, 1000, 100_000, 2 * WRITE_BYTES + 1])
async def test_body_arrives_whole_and_the_connection_carries_the_next_call(size: int) -> None:
    got: list[tuple[bytes, bytes]] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            got.append((head, await reader.readexactly(size)))
            writer.write(OK)

    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    async with engine(speak) as (upstream, found):
        for _ in range(2):
            assert await whole(await upstream.open("/v1", [(b"a", b"b")], body)) == b"ok"
        assert found.connections == 1
        assert upstream.open_responses == 0
    assert [body for _, body in got] == [body, body]
    assert got[0][0].startswith(b"POST /base/v1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert got[0][0].endswith(b"\r\na: b\r\nContent-Length: %d\r\n\r\n" % size)


async def test_what_comes_before_the_answer_is_passed_over() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK)
        await reader.read()

    async with engine(speak) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        assert (source.status, await whole(source)) == (200, b"ok")


async def test_a_flood_of_interim_answers_is_a_failure_at_its_ninth() -> None:
    sent = asyncio.Event()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" * (MAX_INTERIM + 1) + OK)
        sent.set()
        await reader.read()

    async with engine(speak) as (upstream, found):
        with pytest.raises(UpstreamError, match="protocol_error"):
            await upstream.open("/v1", [], b"")
        assert sent.is_set()
        await until(lambda: found.open == 0)


@pytest.mark.parametrize("ends", [True, False])
async def test_chunks_of_one_byte_arrive_whole_and_others_run_between_them(ends: bool) -> None:
    """With `ends` the connection ends with the answer, which has no last chunk then."""
    size = 60_000

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\nx\r\n" * size + (b"" if ends else b"0\r\n\r\n"))
        await writer.drain()
        if not ends:
            await reader.read()

    async def count() -> None:
        while True:
            counted.append(None)
            await asyncio.sleep(0)

    counted: list[None] = []
    async with engine(speak) as (upstream, found):
        source = await upstream.open("/v1", [], b"")
        counting = asyncio.create_task(count())
        got = bytearray()
        with pytest.raises(UpstreamError, match="disconnected") if ends else nullcontext():
            async with source.chunks() as chunks:
                async for chunk in chunks:
                    got += chunk
        counting.cancel()
        await source.aclose()
        assert got == b"x" * size
        assert len(counted) >= 6 * size // SLICE_BYTES
        assert found.connections == 1


async def test_an_answer_that_came_before_the_body_was_sent_ends_its_connection() -> None:
    """The rest of that body would be taken for the next request."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        # Larger than what the sockets take: the client is still writing when it is read at last.
        await asked_again.wait()
        await reader.read()

    asked_again = asyncio.Event()
    async with engine(speak) as (upstream, found):
        source = await upstream.open("/v1", [], b"x" * 32 * 1024 * 1024)
        assert (source.status, await whole(source)) == (413, b"no")
        asked_again.set()
        await until(lambda: found.open == 0)
        assert await whole(await upstream.open("/v1", [], b"")) == b"no"
        assert found.connections == 2


async def test_an_answer_that_is_not_read_to_its_end_ends_its_connection() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        await reader.read()

    async with engine(speak) as (upstream, found):
        source = await upstream.open("/v1", [], b"")
        async with source.chunks() as chunks:
            assert await anext(aiter(chunks)) == b"12345"
        await source.aclose()
        await source.aclose()
        await until(lambda: found.open == 0)
        assert (upstream.connections, upstream.open_responses) == (0, 0)


async def test_an_answer_that_breaks_off_is_said_to() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        await writer.drain()

    async with engine(speak) as (upstream, _):
        source = await upstream.open("/v1", [], b"")
        with pytest.raises(UpstreamError, match="disconnected"):
            await whole(source)
        await source.aclose()


@pytest.mark.parametrize("nonsense", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n"])
async def test_an_answer_that_is_not_http_is_a_failure_of_the_protocol(nonsense: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(nonsense)
        await reader.read()

    async with engine(speak) as (upstream, found):
        with pytest.raises(UpstreamError, match="protocol_error"):
            await upstream.open("/v1", [], b"")
        await until(lambda: found.open == 0)
        assert upstream.open_responses == 0


class Given(asyncio.Transport):
    """What the socket is given, a list per write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[list[bytes]] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append([bytes(data)])

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes.append([bytes(data) for data in list_of_data])


def connected(transport: asyncio.Transport) -> ReplicaConnection:
    link = ReplicaConnection(lambda _: None, lambda _: None)
    link.connection_made(transport)
    return link


@pytest.mark.parametrize("size", [0, 1000, 100_000, 2 * WRITE_BYTES + 1])
async def test_the_head_never_travels_without_the_first_of_the_body(size: int) -> None:
    given, body = Given(), bytes(size)
    link = connected(given)
    link.write_request(b"head", body, HttpResponse(link))
    assert b"".join(given.writes[0]) == b"head" + body[:WRITE_BYTES]
    assert len(given.writes) == 1
    if link._writer is not None:
        await link._writer
    assert b"".join(part for parts in given.writes for part in parts) == b"head" + body


@pytest.mark.parametrize("lost", ["closing", "gone"])
async def test_rest_of_a_large_body_is_not_written_to_a_connection_that_is_lost(lost: str) -> None:
    given = Given()
    link = connected(given)
    link.write_request(b"head", bytes(3 * WRITE_BYTES), HttpResponse(link))
    assert link._writer is not None
    if lost == "closing":
        given.closing = True
    else:
        link.connection_lost(None)
    await asyncio.wait([link._writer])
    assert len(given.writes) == 1
    with pytest.raises(httpx.WriteError, match="the connection is closed"):
        link.write_request(b"head", b"", HttpResponse(link))


async def test_connection_of_a_repeated_request_is_closed_with_all_others() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if found.connections > 1:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
            await reader.read()
            return
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")  # and hangs up without an answer

    async with engine(speak) as (upstream, found):
        assert await whole(await upstream.open("/v1", [], b"")) == b"ok"
        again = await upstream.open("/v1", [], b"")
        assert (again.status, found.connections, found.open) == (200, 2, 1)
        await upstream.aclose()
        await until(lambda: found.open == 0)
        await again.aclose()


def test_buffers_of_a_call_are_bounded() -> None:
    assert (connection.READ_BUFFER_BYTES, SLICE_BYTES) == (65_536, 32_768)
    assert (WRITE_BYTES, connection._JOINED_BYTES) == (524_288, 65_536)
