"""The seam to hypercorn: its server accepts connections, and `connection.client_connection` serves each of them.

Owns the one name of hypercorn that is replaced, and the configuration that says who serves a connection.

Theory of operation. `hypercorn.asyncio.serve` runs the lifespan of the application, accepts from the sockets that it is
given as `fd://`, closes them, and stops gracefully. For each connection it awaits
`hypercorn.asyncio.run.TCPServer(...)`, whose HTTP is lenient about ambiguous requests and costs several times as much
per request. That name is replaced by `_serve_connection` here. A server with another kind of configuration in the same
process is served by hypercorn as before.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hypercorn.asyncio import run as hypercorn_run
from hypercorn.asyncio import serve
from hypercorn.config import Config

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
