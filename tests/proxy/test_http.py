"""Answers on their way out, on both loops: chunks in one call where it is safe, and the end of an answer in
HTTP/1.0.
"""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any, cast

import h11
import pytest
from aiohttp import web

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, RegionConfig
from gorgo.live.http.errors import Message
from gorgo.live.listener.connection.cycle import ClientTransport, RequestCycle
from gorgo.live.listener.connection.reader import read_head
from gorgo.live.listener.heads import HeadLimits
from gorgo.proxy.exchange.response import TryWrite, direct_write, no_direct_write
from tests.proxy.conftest import QUIET, Start, until
from tests.proxy.fakes import DONE, REPLICA, ROLE, Script, answer, chat, delta, hang, stream
from tests.proxy.integrity.engines import Speaker, lying, says
from tests.proxy.raw import RawClient, connected

# --- Chunks of a stream that go to the socket in one call: only where it is safe, and with the bytes of `send`.
#
# Each test over a socket runs on asyncio's own loop and on uvloop, whose transports buffer differently.


ON_BOTH_LOOPS = True

CHAT = "/v1/chat/completions"
BODY = chat(stream=True)
EVENTS = tuple(delta(f"word {n}") for n in range(20))
#: Longer than the buffers of two sockets on one machine.
FLOOD = tuple(delta("x" * 60_000) for _ in range(400))
#: At which asyncio and uvloop pause writers.
HIGH_WATER_BYTES = 64 * 1024
#: What the upstream client hands over at once, and the framing of it.
CHUNK_BYTES_MAX = 256 * 1024 + 16


class Watch:
    """Notes of every chunk whether it was written at once, and what was waiting in the transport after that."""

    def __init__(self) -> None:
        self.went: list[bool] = []
        self.waiting: list[int] = []

    def __call__(self, scope: Message) -> TryWrite:
        push = direct_write(scope)
        transport = cast(Any, push).__self__._transport._transport

        def watched(chunk: bytes) -> bool:
            over = transport.is_closing()
            self.went.append(push(chunk))
            assert not (over and self.went[-1]), "written to a transport after its end"
            self.waiting.append(transport.get_write_buffer_size())
            return self.went[-1]

        return watched


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watching = Watch()
    monkeypatch.setattr("gorgo.proxy.exchange.exchange.direct_write", watching)
    return watching


# -- over a socket
async def test_stream_takes_the_shortcut_after_its_first_content(start: Start, watch: Watch) -> None:
    fleet = await start.fleet([hang(ROLE, EVENTS[0], rest=[*EVENTS[1:], DONE])])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY, "connection: close")
        await client.head()
        fleet.replicas[0].release.set()
        assert unchunked(await client.rest()) == ROLE + b"".join(EVENTS) + DONE
    assert watch.went
    assert all(watch.went)
    await fleet.idle()


async def test_head_and_bytes_are_the_same_without_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = await start.fleet([stream(ROLE, *EVENTS, DONE)])
    head, body = await whole_answer(fleet.addresses.data)
    monkeypatch.setattr("gorgo.proxy.exchange.exchange.direct_write", lambda _: no_direct_write)
    assert await whole_answer(fleet.addresses.data) == (head, body)
    assert body == ROLE + b"".join(EVENTS) + DONE


async def test_client_of_http_1_0_gets_a_body_without_chunks(start: Start, watch: Watch) -> None:
    fleet = await start.fleet([stream(ROLE, *EVENTS, DONE)])
    async with connected(fleet.addresses.data) as client:
        client.writer.write(b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(BODY), BODY))
        assert b"transfer-encoding" not in (await client.head()).lower()
        assert await client.rest() == ROLE + b"".join(EVENTS) + DONE
    assert all(watch.went)
    await fleet.idle()


async def test_connection_serves_further_requests_after_a_stream(start: Start, watch: Watch) -> None:
    fleet = await start.fleet([stream(ROLE, *EVENTS, DONE), answer(200), stream(*EVENTS, DONE)])
    async with connected(fleet.addresses.data) as client:
        for _ in range(2):
            await client.post(CHAT, BODY)
            assert unchunked(await stream_of(client)).endswith(DONE)
            await client.post(CHAT, chat())
            assert b" 200 " in await client.head()
            await client.reader.readexactly(2)
            fleet.replicas[0].scripts[:0] = [stream(*EVENTS, DONE), answer(200)]
    assert all(watch.went)
    await fleet.idle()


@pytest.mark.parametrize(
    ("second", "status"),
    [
        (b"POST %s HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(BODY), BODY), b"200"),
        (b"POST %s HTTP/1.1\r\nhost: g\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n" % CHAT.encode(), b"100"),
        (b"this is no request\r\n\r\n", b"400"),
    ],
    ids=["a request", "one that wants to be asked", "garbage"],
)
async def test_second_request_in_the_middle_of_a_stream_waits_for_its_end(
    start: Start, watch: Watch, second: bytes, status: bytes
) -> None:
    fleet = await start.fleet([hang(EVENTS[0], rest=[*EVENTS[1:], DONE])])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        head = await client.head()
        client.writer.write(second)
        await client.writer.drain()
        fleet.replicas[0].release.set()
        assert unchunked(await stream_of(client, head)) == b"".join(EVENTS) + DONE
        assert (await client.head()).split()[1] == status
        client.reset()
    assert any(watch.went)
    await fleet.idle()


async def test_slow_client_holds_a_bounded_buffer_and_gets_every_byte(start: Start, watch: Watch) -> None:
    fleet = await start.fleet([stream(*FLOOD, DONE)])
    async with connected(fleet.addresses.data) as client:
        transport = cast(asyncio.Transport, client.writer.transport)
        transport.pause_reading()
        await client.post(CHAT, BODY, "connection: close")
        await until(lambda: False in watch.went)
        assert fleet.state.exchanges
        transport.resume_reading()
        assert digest(unchunked((await client.rest()).partition(b"\r\n\r\n")[2])) == digest(b"".join(FLOOD) + DONE)
    assert True in watch.went
    assert max(watch.waiting) < HIGH_WATER_BYTES + CHUNK_BYTES_MAX
    await fleet.idle()


async def test_client_that_never_reads_is_cut_while_its_buffer_is_bounded(start: Start, watch: Watch) -> None:
    fleet = await start.fleet([stream(*FLOOD, DONE)], stream_idle_timeout_s=0.3)
    async with connected(fleet.addresses.data) as client:
        cast(asyncio.Transport, client.writer.transport).pause_reading()
        await client.post(CHAT, BODY)
        await until(fleet.replicas[0].dropped.is_set)
        client.reset()
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).status == 499
    assert max(watch.waiting) < HIGH_WATER_BYTES + CHUNK_BYTES_MAX


@pytest.mark.parametrize("flooded", [False, True])
async def test_client_that_leaves_cancels_upstream(
    start: Start, watch: Watch, flooded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    script = stream(*FLOOD, DONE) if flooded else breaks_off(asyncio.Event())
    fleet = await start.fleet([script])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        await client.head()
        fleet.replicas[0].release.set()
        await until(lambda: True in watch.went)
        client.reset()
        await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).status == 499
    assert [record for record in caplog.records if record.getMessage() == "internal_error"] == []


async def test_error_after_the_shortcut_is_a_whole_event_and_ends_the_body(start: Start, watch: Watch) -> None:
    broken = asyncio.Event()
    fleet = await start.fleet([breaks_off(broken)])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        head = await client.head()
        fleet.replicas[0].release.set()
        await until(lambda: True in watch.went)
        broken.set()
        sent, error = unchunked(await stream_of(client, head)).split(b"\n\n\n\n")
        assert sent + b"\n\n" == b"".join(EVENTS)
        assert b"upstream_failed" in error
        # The connection is as good as new.
        fleet.replicas[0].scripts[:] = [answer(200)]
        await client.post(CHAT, chat())
        assert b" 200 " in await client.head()
    await fleet.idle()


# -- without one
class FakeClient:
    """A connection and its transport, as a request uses both."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.written: list[bytes] = []
        self.is_behind = self.is_closing = False
        self.responses = 0

    def write(self, data: bytes) -> None:
        self.written.append(data)

    write_with_others = write

    async def drained(self) -> None:
        self.is_behind = False

    def own_headers(self) -> bytes:
        return b""

    def must_close(self) -> bool:
        return False

    def body_taken(self) -> None:
        raise AssertionError("no body is expected")

    def response_ended(self) -> None:
        self.responses += 1


async def answering(
    client: FakeClient, *headers: bytes, method: bytes = b"POST", version: bytes = b"1.1"
) -> RequestCycle:
    """A request in the middle of its answer; the head is not part of what was written."""
    head = read_head(b"%b / HTTP/%b\r\nhost: g\r\n\r\n" % (method, version), HeadLimits(1000, 1.0))
    cycle = RequestCycle(client, cast(ClientTransport, client), head)
    pairs = [(name, b"3") for name in headers]
    await cycle.send_message({"type": "http.response.start", "status": 200, "headers": pairs})
    await asyncio.sleep(0)
    client.written.clear()
    return cycle


async def test_chunks_are_framed_as_h11_would_frame_them() -> None:
    client, peer = FakeClient(), h11.Connection(h11.SERVER)
    peer.receive_data(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n")
    peer.next_event()
    peer.send(h11.Response(status_code=200, headers=[]))
    chunks = [b"a", b"x" * 15, b"x" * 16, b"x" * 70_000]
    cycle = await answering(client)
    assert [cycle.try_write(chunk) for chunk in chunks] == [True] * 4
    await cycle.send_message({"type": "http.response.body", "body": b"b", "more_body": True})
    await cycle.send_message({"type": "http.response.body"})
    assert client.written == [peer.send(h11.Data(data=chunk)) for chunk in (*chunks, b"b")] + [b"0\r\n\r\n"]
    assert (client.responses, cycle.try_write(b"a")) == (1, False)


async def test_first_chunk_goes_with_the_head_and_a_head_alone_does_not_wait_for_it() -> None:
    client = FakeClient()
    head = read_head(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n", HeadLimits(1000, 1.0))
    cycle = RequestCycle(client, cast(ClientTransport, client), head)
    await cycle.send_message({"type": "http.response.start", "status": 200, "headers": []})
    assert cycle.try_write(b"a")
    assert [data.count(b"HTTP/1.1 200 OK") for data in client.written] == [1]
    assert client.written[0].endswith(b"\r\n\r\n1\r\na\r\n")
    cycle = RequestCycle(client, cast(ClientTransport, client), head)
    await cycle.send_message({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.sleep(0)
    assert client.written[1].endswith(b"\r\n\r\n")


async def test_a_head_whose_body_follows_waits_for_it() -> None:
    client = FakeClient()
    head = read_head(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n", HeadLimits(1000, 1.0))
    cycle = RequestCycle(client, cast(ClientTransport, client), head)
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]}
    await cycle.send_message({**start, "gorgo.body_follows": True})
    await asyncio.sleep(0)
    assert client.written == []
    await cycle.send_message({"type": "http.response.body", "body": b"a"})
    assert client.written == [b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na"]


async def test_client_of_http_1_0_gets_bytes_alone() -> None:
    client = FakeClient()
    cycle = await answering(client, version=b"1.0")
    assert cycle.try_write(b"a")
    assert (client.written, cycle.ends_with_connection) == ([b"a"], True)


async def test_an_empty_chunk_never_ends_the_body() -> None:
    client = FakeClient()
    assert not (await answering(client)).try_write(b"")
    assert client.written == []


@pytest.mark.parametrize("trouble", ["is_behind", "is_closing"])
async def test_client_that_is_behind_or_has_left_gets_nothing_at_once(trouble: str) -> None:
    client = FakeClient()
    cycle = await answering(client)
    setattr(client, trouble, True)
    assert not cycle.try_write(b"a")
    assert client.written == []


async def test_body_with_a_length_or_none_at_all_is_for_send() -> None:
    for cycle in (await answering(FakeClient(), b"content-length"), await answering(FakeClient(), method=b"HEAD")):
        assert not cycle.try_write(b"abc")


async def test_refused_request_writes_nothing_more() -> None:
    client = FakeClient()
    cycle = await answering(client)
    cycle.refuse()
    assert not cycle.try_write(b"a")
    await cycle.send_message({"type": "http.response.body", "body": b"a"})
    assert (client.written, client.responses) == ([], 0)


# -- helpers
def breaks_off(broken: asyncio.Event) -> Script:
    """Sends an event, when released all others, and resets the connection when `broken` is set."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        await request.app[REPLICA].release.wait()
        await response.write(b"".join(EVENTS[1:]))
        await broken.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    return script


async def whole_answer(address: tuple[str, int]) -> tuple[list[bytes], bytes]:
    """The lines of an answer's head, except the replica's date, and its body without the framing."""
    async with connected(address) as client:
        await client.post(CHAT, BODY, "connection: close", "x-request-id: one")
        head = (await client.head()).splitlines()
        return [line for line in head if not line.lower().startswith(b"date:")], unchunked(await client.rest())


async def stream_of(client: RawClient, head: bytes | None = None) -> bytes:
    """A chunked body that ends, of a connection that does not."""
    head = head or await client.head()
    assert b"transfer-encoding: chunked" in head.lower()
    return await asyncio.wait_for(client.reader.readuntil(b"\r\n0\r\n\r\n"), 10)


def unchunked(framed: bytes) -> bytes:
    """The body of exactly one chunked answer."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = framed.index(b"\r\n", at)
        size = int(framed[at:end], 16)
        parts.append(framed[end + 2 : end + 2 + size])
        assert framed[end + 2 + size : end + 4 + size] == b"\r\n"
        at = end + 4 + size
        if not size:
            assert at == len(framed)
            return b"".join(parts)


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


# --- What a client of HTTP/1.0 sees of an answer's end: it has no chunks, so only the connection can tell.


ROUTE = b"/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
#: Larger than what is retained of an answer in one piece.
SIZE = 1_100_000
PART = b"%x\r\n%b\r\n" % (SIZE, b" " * SIZE)


async def answer_to_http_1_0(start: Start, speak: Speaker) -> bytes | None:
    """What came; `None` if the connection was reset."""
    async with lying(speak) as engine:
        replica = ReplicaConfig(name="engine", region="here", url=engine.url, engine="openai")
        limits = LimitsConfig(shutdown_grace_s=1.0)
        config = Config(proxy=QUIET, regions=(RegionConfig(name="here"),), replicas=(replica,), limits=limits)
        running = await start.proxy(config, [])
        body = chat()
        async with connected(running.addresses.data) as client:
            client.writer.write(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (ROUTE, len(body), body))
            try:
                said = await asyncio.wait_for(client.reader.read(), 10)
            except ConnectionResetError:
                said = None
        await running.idle()
        return said


async def test_answer_that_is_cut_is_reset_for_a_client_of_http_1_0(start: Start) -> None:
    assert await answer_to_http_1_0(start, says(HEAD + PART, b"zz\r\n")) is None


async def test_whole_answer_ends_in_order_for_a_client_of_http_1_0(start: Start) -> None:
    said = await answer_to_http_1_0(start, says(HEAD + PART, b"0\r\n\r\n"))
    assert said is not None
    assert said.startswith(b"HTTP/1.1 200 ")
    assert said.partition(b"\r\n\r\n")[2] == b" " * SIZE
