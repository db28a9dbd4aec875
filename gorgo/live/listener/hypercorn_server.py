"""The seam to hypercorn: its server accepts connections, and `connection.client_connection` serves each of them.

Owns the one name of hypercorn that is replaced, the configuration that says who serves a connection, and the listener
of `gorgo serve --plain`, which is stock hypercorn (`serve_plain`).

Theory of operation. `hypercorn.asyncio.serve` runs the lifespan of the application, accepts from the sockets that it is
given as `fd://`, closes them, and stops gracefully. For each connection it awaits
`hypercorn.asyncio.run.TCPServer(...)`, whose HTTP is lenient about ambiguous requests and costs several times as much
per request. That name is replaced by `_serve_connection` here. A server with another kind of configuration in the same
process is served by hypercorn as before.

For systems without httptools or uvloop, `serve_plain` serves the app of every proxy: without the extensions of the own
listener it reads by `receive` and writes by `send`. Stock h11 accepts requests that the own reader refuses, and
hypercorn bounds neither connections nor incomplete heads in sum, so that listener belongs behind a load balancer.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from hypercorn.asyncio import run as hypercorn_run
from hypercorn.asyncio import serve
from hypercorn.config import Config

from gorgo.live.http.body import draining
from gorgo.live.http.errors import HttpError, Message, Receive, Send, send_error
from gorgo.live.listener.heads import AcceptLimits

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ServerConfig(Config):
    """hypercorn's configuration, with the function that serves one connection.

    `Config.graceful_timeout` bounds the whole stop.
    """

    serve_connection: Serve


async def run_server(
    app: Any,
    config: ServerConfig,
    listeners: Sequence[socket.socket],
    serve_connection: Serve,
    closing: asyncio.Event,
) -> None:
    """Run hypercorn's server over `listeners` until `closing` is set and their connections have ended.

    The listeners, without TLS, are hypercorn's from now on. Without any it runs the lifespan alone.
    """
    config.bind = [f"fd://{listener.detach()}" for listener in listeners]
    config.serve_connection = serve_connection
    await serve(app, config, shutdown_trigger=closing.wait, mode="asgi")


_hypercorn: Any = hypercorn_run
_TCP_SERVER: Any = _hypercorn.TCPServer

#: Parameters of hypercorn's class, in order; another version may have others.
PARAMETERS = ("app", "loop", "config", "context", "state", "reader", "writer")


async def _serve_connection(*arguments: Any) -> None:
    config, reader, writer = arguments[PARAMETERS.index("config")], *arguments[-2:]
    if isinstance(config, ServerConfig):
        await config.serve_connection(reader, writer)
    else:
        await _TCP_SERVER(*arguments)


if tuple(inspect.signature(_TCP_SERVER).parameters) != PARAMETERS:
    raise ImportError(f"hypercorn.asyncio.run.TCPServer has moved; expected one with {', '.join(PARAMETERS)}")
_hypercorn.TCPServer = _serve_connection


class PlainConfig(Config):
    """hypercorn's configuration, with a TLS context that is renewed in place."""

    tls: ssl.SSLContext | None = None

    @property
    def ssl_enabled(self) -> bool:
        return self.tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return self.tls


async def serve_plain(
    app: Any,
    config: PlainConfig,
    listener: socket.socket,
    closing: asyncio.Event,
    *,
    limits: Callable[[], AcceptLimits],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve `app` by hypercorn until `closing` is set. The listener is closed on return.

    Of `limits` the bounds of one head are used, as they are at the start; the time counts for bodies too.
    """
    head = limits().head
    config.tls = tls
    config.bind = [f"fd://{listener.detach()}"]
    config.h11_max_incomplete_size = head.size_bytes
    config.ssl_handshake_timeout = head.timeout_s
    await serve(cast(Any, Http1Only(app)), config, shutdown_trigger=closing.wait, mode="asgi")


class Http1Only:
    """An ASGI app that refuses HTTP/2 and WebSockets, which hypercorn accepts, in the words of the own listener."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["http_version"] in ("1.0", "1.1"):
            await self._app(scope, receive, send)
            return
        message = "expected HTTP/1.1; for HTTP/2, put a load balancer or Envoy in front"
        async with draining(receive):
            await send_error(send, HttpError(505, "http_version", message))
