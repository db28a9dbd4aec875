"""hypercorn serves the listeners; a failure here after an upgrade says what moved."""

from __future__ import annotations

import ast
import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypercorn.asyncio import run, serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config, Sockets

import gorgo
from gorgo.live.listener.connection import client_connection
from gorgo.live.listener.connection.client_connection import ServerSettings
from gorgo.live.listener.heads import AcceptLimits, HeadLimits, PartialHeads
from gorgo.live.listener.hypercorn_server import PARAMETERS, ServerConfig
from gorgo.live.listener.listener import serve_app
from tests.proxy.raw import connected
from tests.sources import syntax_tree

ON_BOTH_LOOPS = True

Message = MutableMapping[str, Any]
GET = b"GET / HTTP/1.1\r\nhost: g\r\n\r\n"
LIMITS = AcceptLimits(HeadLimits(64 * 1024, 10.0), 10)


class App:
    """Answers 204, and records the messages of its lifespan."""

    def __init__(self) -> None:
        self.lifespan: list[str] = []

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] == "lifespan":
            for answer in ("lifespan.startup.complete", "lifespan.shutdown.complete"):
                self.lifespan.append((await receive())["type"])
                await send({"type": answer})
            return
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def quiet(config: Config) -> None:
    config.errorlog = None


def test_the_class_whose_name_is_replaced_has_the_parameters_that_the_seam_expects() -> None:
    assert tuple(inspect.signature(TCPServer).parameters) == PARAMETERS
    assert "TCPServer(app, loop, config, context, lifespan_state, reader, writer)" in inspect.getsource(
        run.worker_serve
    )


async def test_the_application_has_its_lifespan_and_connections_end_with_the_server() -> None:
    app, closing = App(), asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    config = ServerConfig()
    quiet(config)
    serving = asyncio.create_task(serve_app(app, config, listener, closing, limits=lambda: LIMITS))
    async with asyncio.timeout(10), connected(address) as client:
        client.writer.write(GET)
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204 ")
        assert app.lifespan == ["lifespan.startup"]
        closing.set()
        await serving
        assert await client.rest() == b""
    assert app.lifespan == ["lifespan.startup", "lifespan.shutdown"]
    assert listener.fileno() == -1


async def test_bytes_and_an_end_that_come_with_the_connection_are_read() -> None:
    """Under uvloop they are read before the task of the connection runs."""
    app, closing = App(), asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as early:
        early.sendall(GET)
        early.shutdown(socket.SHUT_WR)
        early.setblocking(False)
        config = ServerConfig()
        quiet(config)
        serving = asyncio.create_task(serve_app(app, config, listener, closing, limits=lambda: LIMITS))
        received = b""
        async with asyncio.timeout(10):
            while part := await asyncio.get_running_loop().sock_recv(early, 65536):
                received += part
            closing.set()
            await serving
    assert received.startswith(b"HTTP/1.1 204 ")


class Listening(Config):
    """hypercorn's own server on a socket that is open already."""

    listener: socket.socket

    def create_sockets(self) -> Sockets:
        return Sockets([], [self.listener], [])


async def test_another_server_of_the_process_is_served_by_hypercorn() -> None:
    closing = asyncio.Event()
    config = Listening()
    quiet(config)
    config.listener = socket.create_server(("127.0.0.1", 0))
    address = config.listener.getsockname()
    serving = asyncio.create_task(serve(cast(Any, App()), config, shutdown_trigger=closing.wait, mode="asgi"))
    async with asyncio.timeout(10), connected(address) as client:
        client.writer.write(GET)
        assert b"server: hypercorn-h11" in await client.reader.readuntil(b"\r\n\r\n")
        closing.set()
        await serving


# --- hypercorn's configuration as connections use it; a failure here after an upgrade says what moved.


def imported(path: Path) -> set[str]:
    """The modules of hypercorn that a file imports."""
    found: set[str] = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("hypercorn", "h11", "h2")}


def test_hypercorn_is_used_in_its_seam_and_elsewhere_its_configuration_alone() -> None:
    root = Path(gorgo.__file__).parent
    files = {path.relative_to(root).as_posix(): imported(path) for path in root.rglob("*.py")}
    assert {name: found for name, found in files.items() if found} == {
        "live/listener/connection/client_connection.py": {"hypercorn.config"},
        "live/listener/hypercorn_server.py": {"hypercorn.asyncio", "hypercorn.config"},
        "live/listener/plain.py": {"hypercorn.asyncio", "hypercorn.config"},
    }


def test_timeouts_and_bounds_are_those_of_the_configuration() -> None:
    config = Config()
    config.keep_alive_timeout, config.keep_alive_max_requests, config.root_path = 7, 9, "/p"
    made = ServerSettings(None, config, PartialHeads())
    assert (made.keep_alive_s, made.requests_per_connection, made.root_path) == (7.0, 9, "/p")
    assert (config.backlog, config.graceful_timeout) == (100, 3.0)


def test_own_headers_are_made_once_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_700_000_000.25]
    monkeypatch.setattr(client_connection, "time", lambda: now[0])
    config = Config()
    made = ServerSettings(None, config, PartialHeads())
    first = made.own_headers()
    assert first.startswith(b"date: ")
    assert first.endswith(b" GMT\r\nserver: hypercorn-h11\r\n")
    config.include_date_header = False
    now[0] += 0.5
    assert made.own_headers() is first
    now[0] += 0.5
    assert made.own_headers() == b"server: hypercorn-h11\r\n"


async def test_failures_are_logged_by_the_configured_log(caplog: pytest.LogCaptureFixture) -> None:
    await ServerSettings(None, Config(), PartialHeads()).log.exception("a fault")
