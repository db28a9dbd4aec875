"""hypercorn serves the listeners; a failure here after an upgrade says what moved."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

from hypercorn.asyncio import run, serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config, Sockets

from gorgo.live.listener.heads import AcceptLimits, HeadLimits
from gorgo.live.listener.hypercorn_server import PARAMETERS, ServerConfig
from gorgo.live.listener.listener import serve_app
from tests.proxy.raw import connected

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
