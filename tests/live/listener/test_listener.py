"""Where the proxy listens, as which socket, and connections that end with their clients."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypercorn.config import Config

from gorgo.errors import ConfigError
from gorgo.live.listener import sockets
from gorgo.live.listener.connection.client_connection import ClientConnection, ServerSettings
from gorgo.live.listener.connection.cycle import LINGER_S, LingerTimeout
from gorgo.live.listener.heads import AcceptLimits, HeadLimits, PartialHeads
from gorgo.live.listener.hypercorn_server import ServerConfig
from gorgo.live.listener.listener import Connections, serve_app
from gorgo.live.listener.sockets import ServerAddresses, address_of, listening
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, chat, delta, hang, stream
from tests.proxy.raw import connected

# --- Connections end with their clients.


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
    monkeypatch.setattr("gorgo.live.listener.connection.cycle.LINGER_S", 0.0)
    client = Taking(400, 300, 200, 100, 100, 0)
    LingerTimeout(asyncio.get_running_loop(), client)
    await until(lambda: client.aborted)
    assert client._left == [0]


async def test_patience_that_is_over_cuts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.listener.connection.cycle.LINGER_S", 0.0)
    client = Taking(400, 400)
    LingerTimeout(asyncio.get_running_loop(), client).stop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (client.aborted, client._left) == (False, [400])


@needs_openssl
async def test_a_connection_whose_client_disconnected_in_its_handshake_ends_without_a_traceback(tmp_path: Path) -> None:
    """The transport is closed before its connection is served: uvloop's has no write buffer then."""
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("listener"))
    ended: asyncio.Future[ClientConnection] = asyncio.get_running_loop().create_future()

    class Closed(Connections):
        async def handshake(
            self, connection: ClientConnection, client: socket.socket, tls: ssl.SSLContext | None
        ) -> None:
            await super().handshake(connection, client, tls)
            connection.abort_transport()
            await until(lambda: connection.transport.is_lost)
            LingerTimeout(asyncio.get_running_loop(), cast(Any, connection.transport)._transport).stop()
            connection.stop()
            ended.set_result(connection)

    connections = Closed(ServerSettings(hang, Config(), PartialHeads()), lambda: LIMITS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = asyncio.create_task(connections.accept(listener, context))
        with suppress(OSError):
            _, client = await asyncio.open_connection(*listener.getsockname(), ssl=authority.trusting())
            client.close()
        assert (await ended).transport.is_closing
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
    LingerTimeout(timers, client)  # type: ignore[arg-type]
    aborted = []
    for _ in range(2):
        timers.due()
        aborted.append(client.aborted)
    assert aborted == [False, True]
    assert timers.waits == [LINGER_S, LINGER_S] == [30.0, 30.0]


Message = MutableMapping[str, Any]
LIMITS = AcceptLimits(HeadLimits(64 * 1024, 10.0), 10)


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

    config, closing = ServerConfig(), asyncio.Event()
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


@pytest.mark.parametrize("ends_by_abort", [True, False])
async def test_end_waits_for_aborted_connections_and_no_longer_than_its_limit(ends_by_abort: bool) -> None:
    """The application ignores that it is cancelled; its client's disconnect ends it, or nothing."""
    begun, over, ended, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event(), 0

    async def app(scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        nonlocal cancelled
        begun.set()
        while True:
            try:
                if not ends_by_abort:
                    await over.wait()
                while (await receive())["type"] != "http.disconnect":
                    pass
            except asyncio.CancelledError:
                cancelled += 1
            else:
                ended.set()
                return

    connections = Connections(ServerSettings(app, Config(), PartialHeads()), lambda: LIMITS)
    server = await asyncio.start_server(connections.serve, "127.0.0.1", 0)
    async with connected(server.sockets[0].getsockname()) as client:
        await client.post(ROUTE, b"{}")
        await begun.wait()
        server.close()
        async with asyncio.timeout(2):
            await connections.end(0.05)
        assert (ended.is_set(), cancelled) == (ends_by_abort, 1)
        over.set()
        await ended.wait()


async def test_application_that_fails_is_a_500_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise ValueError("a fault")

    config = Config()
    config.errorlog = logging.getLogger("gorgo.hypercorn")
    connections = Connections(ServerSettings(app, config, PartialHeads()), lambda: LIMITS)
    server = await asyncio.start_server(connections.serve, "127.0.0.1", 0)
    async with server:
        answers = []
        for path in ("/", "/begun"):
            async with connected(server.sockets[0].getsockname()) as client:
                await client.post(path, b"{}")
                answers.append(await client.rest())
    assert answers[0].startswith(b"HTTP/1.1 500 ")
    assert b"internal_error" in answers[0]
    assert answers[1].endswith(b"\r\n\r\n4\r\npart\r\n")  # cut, which its client sees
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a fault"] * 2


async def test_responses_have_the_headers_that_the_configuration_adds() -> None:
    async def app(scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = Config()
    config.keep_alive_max_requests = 2
    connections = Connections(ServerSettings(app, config, PartialHeads()), lambda: LIMITS)
    server = await asyncio.start_server(connections.serve, "127.0.0.1", 0)
    async with server, connected(server.sockets[0].getsockname()) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: g\r\n\r\n" * 4)
        heads = (await client.rest()).split(b"HTTP/1.1 204 No Content\r\n")[1:]
    assert len(heads) == 3  # hypercorn's bound is of further requests
    for head in heads:
        assert b"server: hypercorn-h11\r\n" in head
        assert b"date: " in head
    assert [b"connection: close" in head for head in heads] == [False, False, True]


# --- Where the proxy listens, and as which socket.


@pytest.mark.parametrize(
    ("addresses", "data", "admin"),
    [
        (ServerAddresses(("0.0.0.0", 80), ("::1", 9090)), "http://0.0.0.0:80", "http://[::1]:9090"),
        (ServerAddresses(("::", 80), ("h", 1), tls=True), "https://[::]:80", "http://h:1"),
    ],
)
def test_addresses_are_urls_and_tls_is_of_the_data_listener_alone(
    addresses: ServerAddresses, data: str, admin: str
) -> None:
    assert (addresses.data_url, addresses.admin_url) == (data, admin)


def test_a_listener_may_be_bound_again_at_once_and_sends_without_delay() -> None:
    with listening("127.0.0.1:0", "proxy.bind") as listener:
        host, port = address_of(listener)
        assert (host, listener.family) == ("127.0.0.1", socket.AF_INET)
        assert port > 0
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) != 0
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        with socket.create_connection((host, port), timeout=5):
            pass
        with pytest.raises(ConfigError, match=r"proxy\.admin_bind: cannot listen on"):
            listening(f"127.0.0.1:{port}", "proxy.admin_bind").__enter__()
    assert listener.fileno() == -1


def test_a_thousand_connections_may_wait_to_be_accepted() -> None:
    assert sockets.BACKLOG == 1024
