"""The shortcut past hypercorn: taken only where it is safe, and nobody can tell from the bytes that it was.

Each test over a socket runs on asyncio's own loop and on uvloop, whose transports buffer differently.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, cast

import h11
import pytest
from aiohttp import web
from h11._writers import ChunkedWriter
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from gorgo.proxy.http import response_writer
from gorgo.proxy.http.direct_write import HIGH_WATER_BYTES, TryWrite, direct_write, no_direct_write
from gorgo.proxy.http.listener import Connection
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, REPLICA, ROLE, Script, answer, chat, delta, hang, stream
from tests.proxy.raw import RawClient, connected

ON_BOTH_LOOPS = True

CHAT = "/v1/chat/completions"
BODY = chat(stream=True)
EVENTS = tuple(delta(f"word {n}") for n in range(20))
#: Longer than the buffers of two sockets on one machine.
FLOOD = tuple(delta("x" * 60_000) for _ in range(400))
#: What aiohttp hands over at once, and the framing of it.
CHUNK_BYTES_MAX = 16 * 1024 + 16

#: What the shortcut replaces or relies on: digests of the sources that it was last compared with.
REVIEWED: dict[Callable[..., Any], str] = {
    HTTPStream.app_send: "c806044b99736985",
    H11Protocol.stream_send: "56a36254a368d71a",
    H11Protocol._send_h11_event: "5e40283daa303ec7",
    H11Protocol._handle_events: "bd4a76b2837e8722",
    H11Protocol._maybe_recycle: "3ac53f52bc4e65de",
    TCPServer.protocol_send: "06144915fc094c1b",
    TCPServer._close: "ea76225e14315206",
    h11.Connection.send: "cd6b139277cf57fa",
    h11.Connection.send_with_data_passthrough: "e8332d21fb1a2963",
    ChunkedWriter.send_data: "0fbc8fb565f7029f",
}


class Watch:
    """Notes of every chunk whether it took the shortcut, and what was waiting in the transport after that."""

    def __init__(self) -> None:
        self.went: list[bool] = []
        self.waiting: list[int] = []

    def __call__(self, send: Any) -> TryWrite:
        push = direct_write(send)
        transport = send.__self__.send.__self__.send.__self__.writer.transport

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
    monkeypatch.setattr(response_writer, "direct_write", watching)
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
    monkeypatch.setattr(response_writer, "direct_write", lambda _: no_direct_write)
    assert await whole_answer(fleet.addresses.data) == (head, body)
    assert body == ROLE + b"".join(EVENTS) + DONE


async def test_client_of_http_1_0_gets_a_body_without_chunks(start: Start, watch: Watch) -> None:
    fleet = await start.fleet([stream(ROLE, *EVENTS, DONE)])
    async with connected(fleet.addresses.data) as client:
        client.writer.write(b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(BODY), BODY))
        assert b"transfer-encoding" not in (await client.head()).lower()
        assert await client.rest() == ROLE + b"".join(EVENTS) + DONE
    assert not any(watch.went)
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
    assert next(iter(fleet.state.router.samples)).status == 499
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
    assert next(iter(fleet.state.router.samples)).status == 499
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


class FakeTransport:
    """What a transport has of which the shortcut makes use."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.waiting = 0
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing


def answering(
    transport: FakeTransport,
    *,
    kind: type[TCPServer] = Connection,
    version: bytes = b"1.1",
    tls: bool = False,
    length: bytes | None = None,
) -> HTTPStream:
    """Hypercorn's own objects for one client, in the middle of an answer."""
    config, context, unused = Config(), WorkerContext(None), cast(Any, None)
    client = kind(unused, unused, config, context, unused, unused, cast(Any, SimpleNamespace(transport=transport)))
    protocol = H11Protocol(unused, config, context, unused, unused, tls, None, None, client.protocol_send)
    connection = cast(h11.Connection, protocol.connection)
    connection.receive_data(b"POST / HTTP/%s\r\nhost: g\r\ncontent-length: 0\r\n\r\n" % version)
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[(b"content-length", length)] if length else []))
    return HTTPStream(unused, config, context, unused, tls, None, None, protocol.stream_send, 1)


async def test_chunks_are_framed_as_h11_would_frame_them() -> None:
    transport = FakeTransport()
    send = answering(transport).app_send
    connection = cast(Any, send).__self__.send.__self__.connection
    chunks = [b"a", b"x" * 15, b"x" * 16, b"x" * 70_000]
    push = direct_write(send)
    assert [push(chunk) for chunk in chunks] == [True] * 4
    assert transport.written == [connection.send(h11.Data(data=chunk)) for chunk in chunks]
    assert connection.send(h11.EndOfMessage()) == b"0\r\n\r\n"


async def test_an_empty_chunk_never_ends_the_body() -> None:
    transport = FakeTransport()
    assert not direct_write(answering(transport).app_send)(b"")
    assert transport.written == []


@pytest.mark.parametrize(
    ("waiting", "closing", "goes"),
    [(HIGH_WATER_BYTES - 1, False, True), (HIGH_WATER_BYTES, False, False), (0, True, False)],
)
async def test_transport_that_is_behind_or_closing_gets_nothing(waiting: int, closing: bool, goes: bool) -> None:
    transport = FakeTransport()
    push = direct_write(answering(transport).app_send)
    transport.waiting, transport.closing = waiting, closing
    assert push(b"a") is goes
    assert bool(transport.written) is goes


async def plain_send(message: object) -> None:
    """An ASGI server that is not hypercorn."""


class AnotherProtocol:
    """Speaks something else than HTTP/1.1 to the client."""

    async def stream_send(self, event: object) -> None: ...


def over_another_protocol() -> Any:
    stream = answering(FakeTransport())
    stream.send = AnotherProtocol().stream_send
    return stream.app_send


def finished() -> Any:
    send = answering(FakeTransport()).app_send
    cast(Any, send).__self__.send.__self__.connection.send(h11.EndOfMessage())
    return send


def renamed(*path: str) -> Any:
    """Hypercorn with an attribute of another name than the shortcut knows."""
    send = answering(FakeTransport()).app_send
    at = cast(Any, send).__self__
    for name in path[:-1]:
        at = getattr(at, name)
        at = getattr(at, "__self__", at)
    delattr(at, path[-1])
    return send


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: plain_send, id="another server"),
        pytest.param(lambda: partial(answering(FakeTransport()).app_send), id="a wrapper around hypercorn"),
        pytest.param(over_another_protocol, id="another protocol"),
        pytest.param(lambda: answering(FakeTransport(), version=b"1.0").app_send, id="HTTP/1.0"),
        pytest.param(lambda: answering(FakeTransport(), tls=True).app_send, id="TLS"),
        pytest.param(lambda: answering(FakeTransport(), kind=TCPServer).app_send, id="another connection"),
        pytest.param(finished, id="a finished answer"),
        pytest.param(lambda: renamed("send"), id="other stream"),
        pytest.param(lambda: renamed("send", "connection"), id="other protocol"),
        pytest.param(lambda: renamed("send", "send", "writer"), id="other server object"),
        pytest.param(lambda: renamed("send", "send", "writer", "transport"), id="other writer"),
    ],
)
async def test_whatever_is_not_as_expected_goes_the_servers_own_way(make: Callable[[], object]) -> None:
    assert direct_write(make()) is no_direct_write
    assert not no_direct_write(b"a")


@pytest.mark.parametrize("function", REVIEWED, ids=lambda function: function.__qualname__)
def test_what_the_shortcut_replaces_has_not_changed(function: Callable[..., Any]) -> None:
    """Fail after an upgrade: compare `gorgo.proxy.http.direct_write` with the new source, then update the digest."""
    assert sha256(inspect.getsource(function).encode()).hexdigest()[:16] == REVIEWED[function]


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
