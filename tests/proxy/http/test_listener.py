"""Connections end with their clients."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypercorn.config import Config

from gorgo.proxy.http.heads import HeadLimits
from gorgo.proxy.http.listener import LINGER_S, AcceptLimits, Connection, _Connections, _LingerTimeout, serve_app
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, chat, delta, hang, stream
from tests.proxy.raw import connected

ON_BOTH_LOOPS = True
ROUTE = "/v1/chat/completions"


async def test_connection_ends_when_its_client_has_closed_it_between_requests(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    async with connected(fleet.addresses.data) as client:
        await client.post(ROUTE, chat(stream=True))
        await client.reader.readuntil(b"0\r\n\r\n")
        client.writer.write_eof()
        assert await client.rest() == b""
    await fleet.idle()


async def test_connection_ends_when_its_client_closes_it_during_an_answer(start: Start) -> None:
    fleet = await start.fleet([hang(delta("good"))])
    async with connected(fleet.addresses.data) as client:
        await client.post(ROUTE, chat(stream=True))
        await client.reader.readuntil(b"good")
        client.writer.write_eof()
        await client.rest()
    await fleet.replicas[0].dropped.wait()
    await fleet.idle()


async def test_connection_is_kept_for_the_next_request(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    async with connected(fleet.addresses.data) as client:
        for _ in range(3):
            await client.post(ROUTE, chat(stream=True))
            assert b"good" in await client.reader.readuntil(b"0\r\n\r\n")
    await fleet.idle()


async def test_request_that_follows_at_once_on_the_same_connection_is_answered(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    body = chat(stream=True)
    assert json.loads(body)["stream"]
    async with connected(fleet.addresses.data) as client:
        await client.post(ROUTE, body)
        await client.post(ROUTE, body)
        for _ in range(2):
            assert b"good" in await client.reader.readuntil(b"0\r\n\r\n")
    await fleet.idle()


class Taking(asyncio.WriteTransport):
    """A client that has left so much at each look."""

    def __init__(self, *left: int) -> None:
        super().__init__()
        self._left = list(left)
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self._left.pop(0)

    def abort(self) -> None:
        self.aborted = True


async def test_who_takes_some_of_what_is_left_is_waited_for_and_who_takes_none_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gorgo.proxy.http.listener.LINGER_S", 0.0)
    client = Taking(400, 300, 200, 100, 100, 0)
    _LingerTimeout(asyncio.get_running_loop(), client)
    await until(lambda: client.aborted)
    assert client._left == [0]


async def test_patience_that_is_over_cuts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.proxy.http.listener.LINGER_S", 0.0)
    client = Taking(400, 400)
    _LingerTimeout(asyncio.get_running_loop(), client).stop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (client.aborted, client._left) == (False, [400])


@needs_openssl
async def test_a_connection_whose_client_disconnected_in_its_handshake_ends_without_a_traceback(tmp_path: Path) -> None:
    """The transport is closed before its connection is served: uvloop's has no write buffer then."""
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("listener"))
    served: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()

    class Closed(_Connections):
        async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: HeadLimits) -> None:
            writer.transport.abort()
            await reader.read()
            _LingerTimeout(asyncio.get_running_loop(), writer.transport).stop()
            task = asyncio.create_task(super()._serve(reader, writer, head))
            await asyncio.wait([task])
            served.set_result(task)

    connections = Closed(hang, Config(), lambda: LIMITS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = asyncio.create_task(connections.accept(listener, context))
        with suppress(OSError):
            _, client = await asyncio.open_connection(*listener.getsockname(), ssl=authority.trusting())
            client.close()
        assert (await served).exception() is None
        accepting.cancel()


class Timers:
    """In the place of a loop: what it is to call, and when."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.due: Callable[[], None] = lambda: None

    def call_later(self, delay_s: float, due: Callable[[], None]) -> None:
        self.waits.append(delay_s)
        self.due = due


def test_a_client_has_half_a_minute_for_each_part_of_what_is_left() -> None:
    timers, client = Timers(), Taking(400, 300, 300)
    _LingerTimeout(timers, client)  # type: ignore[arg-type]
    aborted = []
    for _ in range(2):
        timers.due()
        aborted.append(client.aborted)
    assert aborted == [False, True]
    assert timers.waits == [LINGER_S, LINGER_S] == [30.0, 30.0]


Message = MutableMapping[str, Any]
LIMITS = AcceptLimits(Connection.head_limits, 10)


async def test_connection_whose_client_has_closed_it_ends_with_its_answer_and_waits_for_no_request() -> None:
    """Under a keep-alive of an hour."""
    left = asyncio.Event()

    async def app(scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        assert scope["type"] == "http"
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config, closing = Config(), asyncio.Event()
    config.keep_alive_timeout = 3600.0
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    task = asyncio.create_task(serve_app(app, config, listener, closing, limits=lambda: LIMITS))
    async with asyncio.timeout(10):
        async with connected(address) as client:
            await client.post(ROUTE, b"{}")
            client.writer.write_eof()
            await client.rest()
        assert left.is_set()
        closing.set()
        await task


class Stubborn:
    """A connection's task that no cancellation ends, only its writer's abort, if anything."""

    def __init__(self, *, ends_by_abort: bool) -> None:
        self.transport = self
        self._ends_by_abort = ends_by_abort
        self.over = asyncio.Event()
        self.cancelled = 0

    def abort(self) -> None:
        if self._ends_by_abort:
            self.over.set()

    async def run(self) -> None:
        while not self.over.is_set():
            try:
                await self.over.wait()
            except asyncio.CancelledError:
                self.cancelled += 1


@pytest.mark.parametrize("ends_by_abort", [True, False])
async def test_end_waits_for_aborted_connections_and_no_longer_than_its_limit(ends_by_abort: bool) -> None:
    async def app(*_: Any) -> None:
        return

    connections, stubborn = _Connections(app, Config(), lambda: LIMITS), Stubborn(ends_by_abort=ends_by_abort)
    task = asyncio.create_task(stubborn.run())
    connections._open[task] = stubborn  # type: ignore[assignment]
    try:
        async with asyncio.timeout(2):
            await connections.end(0.01)
        assert (task.done(), stubborn.cancelled) == (ends_by_abort, 1)
    finally:
        stubborn.over.set()
        await task
