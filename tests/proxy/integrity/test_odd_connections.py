"""Connections that end or stall at odd places, on both sides of the proxy, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from logging import ERROR

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, RegionConfig
from tests.proxy.conftest import QUIET, Running, Start, until
from tests.proxy.fakes import DONE, ROLE, answer, chat, delta, hang, stream
from tests.proxy.integrity.engines import Liar, Speaker, forever, lying, peak_growth, says
from tests.proxy.raw import connected

#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True
#: Where stock hypercorn and h11 differ: why, and the tests of it.
OWN_ALONE = {
    "hypercorn takes the end of a client's side for the end of the connection": (
        "test_client_that_ends_its_side_behind_a_request_has_disconnected_and_the_proxy_s_own_routes_answer",
    ),
}

ON_BOTH_LOOPS = True
CHAT = "/v1/chat/completions"
BODY = chat(stream=True)
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = SSE + b"transfer-encoding: chunked\r\n\r\n"
GOOD = delta("good")
HONEST = b'{"honest": 1}'
END = b"0\r\n\r\n"
#: Beyond the buffers of a connection: what a proxy may have of one stream, whatever the replica sends.
STREAM_BYTES_MAX = 8 * 1024 * 1024
#: A request in chunks, with a trailer; each cut of it is one that a client may leave at.
REQUEST = (
    b"POST %b HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode()
    + b"%x;ext=1\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(BODY), BODY)
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture(autouse=True)
def _no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record for record in caplog.get_records("call") if record.levelno >= ERROR and "gorgo" in record.name] == []


class Fleet:
    """A proxy over a replica of raw bytes, with an honest one behind it or without."""

    def __init__(self, start: Start, stack: AsyncExitStack) -> None:
        self._start, self._stack = start, stack

    async def __call__(self, speak: Speaker, *, honest: bool) -> tuple[Running, Liar]:
        liar = await self._stack.enter_async_context(lying(speak))
        rows = [ReplicaConfig(name="liar", region="here", url=liar.url, engine="openai")]
        replicas = []
        if honest:
            replicas.append(await self._start.replica(answer(200, HONEST)))
            rows.append(ReplicaConfig(name="honest", region="here", url=replicas[0].url, engine="openai"))
        config = Config(
            proxy=QUIET,
            regions=(RegionConfig(name="here"),),
            replicas=tuple(rows),
            limits=LimitsConfig(shutdown_grace_s=1.0),
        )
        return await self._start.proxy(config, replicas), liar


@pytest.fixture
async def fleet(start: Start) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(start, stack)


def cut(data: bytes, *, reset: bool) -> Speaker:
    """Write this, and end the connection: in order, or with a reset once the proxy has read it."""

    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if not reset:
            writer.close()
            return
        raw = writer.get_extra_info("socket")
        await until(lambda: not _unread_bytes(raw))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    return speak


def _unread_bytes(raw: socket.socket) -> int:
    """Bytes that the other side's kernel has not acknowledged: a reset would drop nothing else on loopback."""
    # TCP_INFO: tcpi_unacked is its seventh word of 32 bits, behind eight bytes of flags.
    information = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    unacked: int = struct.unpack_from("8B24I", information)[8 + 4]
    return unacked


# -- clients


async def test_client_that_resets_at_any_byte_of_its_request_leaves_nothing(start: Start) -> None:
    running = await start.fleet([stream(GOOD, DONE)])
    for size in range(1, len(REQUEST)):
        async with connected(running.addresses.data) as client:
            client.writer.write(REQUEST[:size])
            await client.writer.drain()
            client.reset()
    async with connected(running.addresses.data) as client:
        client.writer.write(REQUEST)
        assert GOOD in await client.reader.readuntil(END)
    await running.idle()
    assert [seen.body for seen in running.replicas[0].seen] == [BODY]


async def test_client_that_ends_its_side_at_any_byte_of_its_request_gets_no_answer_of_a_replica(start: Start) -> None:
    running = await start.fleet([stream(GOOD, DONE)])
    for size in range(1, len(REQUEST)):
        async with connected(running.addresses.data) as client:
            client.writer.write(REQUEST[:size])
            client.writer.write_eof()
            assert not (await client.rest()).startswith(b"HTTP/1.1 200")
    assert running.replicas[0].seen == []
    await running.idle()


async def test_client_that_ends_its_side_behind_a_request_has_disconnected_and_the_proxy_s_own_routes_answer(
    start: Start,
) -> None:
    running = await start.fleet([hang(ROLE)])
    async with connected(running.addresses.data) as client:
        await client.post(CHAT, BODY)
        await running.replicas[0].arrived.wait()
        client.writer.write_eof()
        assert await client.rest() == b""
        await until(running.replicas[0].dropped.is_set)
    await running.idle()
    assert next(iter(running.state.routing.router.samples)).status == 499
    async with connected(running.addresses.data) as client:
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
        client.writer.write_eof()
        assert (await client.rest()).startswith(b"HTTP/1.1 200")


async def test_client_that_resets_at_any_time_of_its_answer_ends_the_replica_s(start: Start) -> None:
    running = await start.fleet([hang(ROLE, GOOD)])
    for size in range(0, 300, 7):
        async with connected(running.addresses.data) as client:
            await client.post(CHAT, BODY)
            await client.reader.readexactly(size)
            client.reset()
        await running.idle()


# -- replicas


@pytest.mark.parametrize("reset", [False, True], ids=["in order", "by a reset"])
async def test_answer_that_ends_at_any_byte_before_content_is_an_error(fleet: Fleet, reset: bool) -> None:
    sent = CHUNKED + chunk(b": comment\n\n")
    running, liar = await fleet(says(), honest=False)
    for size in range(len(sent) + 1):
        liar.speak = cut(sent[:size], reset=reset)
        response = await running.client.post(CHAT, content=BODY)
        assert response.status_code in (502, 503), size
        assert response.json()["error"]["type"] == "server_error", size
    assert liar.posts > len(sent) // 2
    await running.idle()


async def test_answer_that_ends_before_content_is_replaced_by_another_replica_s(fleet: Fleet) -> None:
    running, liar = await fleet(cut(CHUNKED + chunk(ROLE), reset=True), honest=True)
    for _ in range(2):
        response = await running.client.post(CHAT, content=BODY)
        assert (response.status_code, response.content) == (200, HONEST)
    assert liar.posts == 1
    await running.idle()


@pytest.mark.parametrize("reset", [False, True], ids=["in order", "by a reset"])
async def test_answer_that_ends_at_any_byte_behind_content_never_looks_complete(fleet: Fleet, reset: bool) -> None:
    begun, rest = CHUNKED + chunk(ROLE + GOOD), chunk(b": comment\n\n") + chunk(DONE) + END
    running, liar = await fleet(says(), honest=False)
    for size in range(len(rest)):
        liar.speak = cut(begun + rest[:size], reset=reset)
        async with connected(running.addresses.data) as client:
            await client.post(CHAT, BODY)
            said = await client.reader.readuntil(END)
        is_proven = b"[DONE]" in rest[:size]  # then the missing end of the connection takes nothing from the client
        assert (b"upstream_failed" in said) is not is_proven, size
        assert said.count(b"good") >= 1, size
    await running.idle()


async def test_answer_until_the_end_of_the_connection_is_complete_in_order_and_broken_by_a_reset(fleet: Fleet) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    running, liar = await fleet(cut(head + HONEST, reset=False), honest=False)
    response = await running.client.post(CHAT, content=chat())
    assert (response.status_code, response.content) == (200, HONEST)
    liar.speak = cut(head + HONEST, reset=True)
    response = await running.client.post(CHAT, content=chat())
    assert response.status_code in (502, 503)
    await running.idle()


@pytest.mark.parametrize(
    "behind",
    [b"\r\n", b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"HTTP/1.1 408 T\r\nconnection: close\r\n\r\n"],
    ids=["an empty line", "a byte", "an answer", "a timeout"],
)
async def test_bytes_behind_a_stream_are_of_no_answer(fleet: Fleet, behind: bytes) -> None:
    running, liar = await fleet(says(CHUNKED + chunk(GOOD) + chunk(DONE) + END + behind), honest=False)
    for _ in range(5):
        response = await running.client.post(CHAT, content=BODY)
        assert (response.status_code, response.content) == (200, GOOD + DONE)
    assert liar.posts == 5
    await running.idle()


async def test_trailers_of_both_sides_end_with_their_hop(fleet: Fleet) -> None:
    running, liar = await fleet(says(CHUNKED + chunk(GOOD) + b"0\r\nx-engine: 1\r\n\r\n"), honest=False)
    async with connected(running.addresses.data) as client:
        client.writer.write(REQUEST)
        said = await client.reader.readuntil(END)
    assert GOOD in said
    assert b"x-engine" not in said
    (heard,) = liar.heard
    assert b"x-trailer" not in heard
    assert b"content-length: %d" % len(BODY) in heard.lower()
    await running.idle()


async def test_replica_that_sends_faster_than_the_client_reads_is_paused(fleet: Fleet) -> None:
    event = delta("x" * 4000)
    running, _ = await fleet(forever(CHUNKED, chunk(event) * 16), honest=False)
    async with connected(running.addresses.data) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined] # of the transport that reads
        with peak_growth() as grown:
            await client.post(CHAT, BODY)
            await until(lambda: running.state.exchanges)
            for _ in range(3000):  # each a turn in which a replica without a bound would send 64 KiB
                await asyncio.sleep(0)
            assert grown() < STREAM_BYTES_MAX
        client.writer.transport.resume_reading()  # type: ignore[attr-defined] # of the transport that reads
        read = 0
        while read < 2 * STREAM_BYTES_MAX:
            read += len(await client.reader.read(1 << 20))
        client.reset()
    await running.idle()
