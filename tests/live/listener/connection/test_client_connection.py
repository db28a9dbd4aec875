"""Connections over sockets: turns of requests, what an application sees of them, bounds, and their end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypercorn.config import Config

from gorgo.live.http.errors import Message
from gorgo.live.listener.connection.client_connection import ServerSettings
from gorgo.live.listener.connection.cycle import BODY_BYTES
from gorgo.live.listener.heads import AcceptLimits, HeadLimits, PartialHeads
from gorgo.live.listener.hypercorn_server import ServerConfig
from gorgo.live.listener.listener import Connections, serve_app
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import until
from tests.proxy.raw import RawClient, connected

ON_BOTH_LOOPS = True

App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nhost: g\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: g\r\n"


class Running:
    """Connections with an application, and the address of their listener."""

    def __init__(self, app: App, *, keep_alive_s: float = 60.0) -> None:
        config = Config()
        config.include_date_header = config.include_server_header = False
        config.keep_alive_timeout = keep_alive_s
        self.heads = PartialHeads()
        limits = AcceptLimits(HeadLimits(1000, 10.0), 100)
        self.connections = Connections(ServerSettings(app, config, self.heads), lambda: limits)
        self.address = ("", 0)

    @property
    def open_connections(self) -> int:
        return len(self.connections._open)

    async def idle(self) -> None:
        """Wait until every connection has ended."""
        await until(lambda: not self.open_connections)
        assert self.heads.used_bytes == 0


@asynccontextmanager
async def running(app: App, **options: float) -> AsyncIterator[Running]:
    made = Running(app, **options)
    server = await asyncio.start_server(made.connections.serve, "127.0.0.1", 0)
    async with server:
        made.address = server.sockets[0].getsockname()
        yield made
        await made.idle()


async def echo(scope: Message, receive: Any, send: Any) -> None:
    """Answer with the request's body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    await answer(send, body)


async def answer(send: Any, body: bytes, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def body_of(client: RawClient) -> bytes:
    """The body of the next response, which has a length."""
    head = (await client.head()).lower()
    length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return await client.reader.readexactly(int(length))


# -- turns


async def test_requests_in_one_read_are_answered_in_order() -> None:
    bodies = [b"%d" % number * number for number in range(1, 6)]
    async with running(echo) as server, connected(server.address) as client:
        client.writer.write(b"".join(POST + b"content-length: %d\r\n\r\n%b" % (len(body), body) for body in bodies))
        assert [await body_of(client) for _ in bodies] == bodies


async def test_large_body_arrives_whole_and_one_that_waits_is_bounded() -> None:
    size, begin = 8 * 1024 * 1024, asyncio.Event()

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await begin.wait()
        await echo(scope, receive, send)

    async with running(app) as server, connected(server.address) as client:
        client.writer.write(POST + b"content-length: %d\r\n\r\n" % size)
        client.writer.write(b"x" * size)
        await until(lambda: server.open_connections)
        (connection,) = server.connections._open
        await until(lambda: connection.transport._is_paused)
        assert connection._cycle is not None
        assert connection._cycle.body_bytes <= BODY_BYTES + 256 * 1024  # and the read that went beyond
        begin.set()
        assert await body_of(client) == b"x" * size


@pytest.mark.parametrize("status", [204, 304])
async def test_response_without_a_body_ends_with_its_head(status: int) -> None:
    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"none of this is sent"})

    async with running(app) as server, connected(server.address) as client:
        client.writer.write(GET * 2)
        for _ in range(2):
            assert b"transfer-encoding" not in await client.head()
        client.writer.close()


async def test_head_is_answered_by_a_head() -> None:
    async with running(echo) as server, connected(server.address) as client:
        client.writer.write(b"HEAD / HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\nok" + GET)
        assert b"content-length: 2" in await client.head()
        assert (await client.head()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_client_that_waits_for_an_interim_response_gets_it_when_its_body_is_read() -> None:
    wish = POST + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n"
    async with running(echo) as server, connected(server.address) as client:
        client.writer.write(wish)
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"{}" + wish + b"{}")  # the second does not wait
        assert [await body_of(client) for _ in range(2)] == [b"{}", b"{}"]


async def test_connection_that_is_idle_for_too_long_ends() -> None:
    async with running(echo, keep_alive_s=0.05) as server, connected(server.address) as client:
        client.writer.write(GET)
        assert (await client.rest()).startswith(b"HTTP/1.1 200 OK")


# -- what the application sees


async def test_body_that_came_with_its_head_is_taken_by_a_call_and_one_that_did_not_by_messages() -> None:
    found: list[bytes | None] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        take = scope["extensions"].get("gorgo.take_body")
        if take is None:
            found.append(None)
            await echo(scope, receive, send)
            return
        found.append(take())
        message = {"type": "http.request", "body": found[-1], "more_body": False}

        async def taken() -> Message:
            return message

        await echo(scope, taken, send)

    async with running(app) as server, connected(server.address) as client:
        await client.post("/", b"whole")
        assert await body_of(client) == b"whole"
        await client.post("/", b"", length=0)
        assert await body_of(client) == b""
        await client.post("/", b"in ", length=6)
        await until(lambda: len(found) == 3)
        client.writer.write(b"two")
        assert await body_of(client) == b"in two"
    assert found == [b"whole", b"", None]


@pytest.mark.parametrize("late", [False, True])
async def test_disconnect_is_reported_once_by_a_call_and_by_a_message(late: bool) -> None:
    calls: list[str] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        if late:
            while (await receive())["type"] != "http.disconnect":
                pass
        called = asyncio.Event()

        def note() -> None:
            calls.append("called")
            called.set()

        scope["extensions"]["gorgo.on_disconnect"](note)
        await called.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with running(app) as server, connected(server.address) as client:
        client.writer.write(GET)
        await until(lambda: server.open_connections)
        client.writer.close()
        await server.idle()
    assert calls == ["called"]


async def test_disconnect_after_the_response_is_not_reported() -> None:
    calls: list[str] = []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        scope["extensions"]["gorgo.on_disconnect"](lambda: calls.append("called"))
        await echo(scope, receive, send)

    async with running(app) as server, connected(server.address) as client:
        client.writer.write(GET)
        await client.head()
        client.reset()
        await server.idle()
    assert calls == []


async def test_half_closed_client_gets_what_its_application_still_writes() -> None:
    async with running(echo) as server, connected(server.address) as client:
        client.writer.write(POST + b"content-length: 2\r\n\r\n{}")
        client.writer.write_eof()
        assert (await client.rest()).endswith(b"\r\n\r\n{}")


async def test_abort_of_the_scope_ends_the_connection_at_once() -> None:
    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        scope["state"]["abort"]()
        await send({"type": "http.response.body", "body": b"too late"})

    async with running(app) as server, connected(server.address) as client:
        client.writer.write(GET)
        assert b"too late" not in await client.rest()


# -- resets


async def test_reset_at_each_byte_of_a_request_leaves_nothing() -> None:
    request = POST + b"transfer-encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nx-a: 1\r\n\r\n"
    async with running(echo) as server:
        for cut in range(len(request) + 1):
            async with connected(server.address) as client:
                client.writer.write(request[:cut])
                await asyncio.sleep(0)
                client.reset()
        await server.idle()


@pytest.mark.parametrize("length", [b"5000000", b"1\r\ncontent-length: 5000000"], ids=["answered", "refused"])
async def test_client_that_is_still_sending_gets_its_response(length: bytes) -> None:
    async def app(scope: Message, receive: Any, send: Any) -> None:
        await answer(send, b"early", 401)

    async with running(app) as server:
        for _ in range(5):
            async with connected(server.address) as client:
                client.writer.write(POST + b"content-length: %b\r\n\r\n" % length)
                for _ in range(50):
                    client.writer.write(b"x" * 100_000)
                    await asyncio.sleep(0)
                response = await client.rest()
                assert response.startswith(b"HTTP/1.1 40")
                assert response.count(b"HTTP/1.1 ") == 1


async def test_client_that_sends_for_ever_has_a_second_to_read_its_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.listener.connection.client_connection._SENDING_S", 0.05)
    async with running(echo) as server, connected(server.address) as client:
        client.writer.write(b"no request\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 400 ")
        await server.idle()  # though the client has not closed its side


# -- TLS


@needs_openssl
async def test_stream_over_tls_is_written_directly_and_bounded_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("listener"))
    chunk, written = b"x" * 16_000, []

    async def app(scope: Message, receive: Any, send: Any) -> None:
        write = scope["extensions"]["gorgo.write"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4000):
            written.append(write(chunk))
            if not written[-1]:
                break
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})

    closing, limits = asyncio.Event(), AcceptLimits(HeadLimits(1000, 10.0), 10)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    serving = asyncio.create_task(serve_app(app, ServerConfig(), listener, closing, limits=lambda: limits, tls=context))
    reader, writer = await asyncio.open_connection(*address, ssl=authority.trusting(), limit=1 << 24)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET)
    await until(lambda: False in written)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    body = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)
    assert body.count(b"\r\n" + chunk + b"\r\n") == len(written)
    assert written.count(True) == len(written) - 1 > 0
    writer.close()
    closing.set()
    await asyncio.wait_for(serving, 10)
