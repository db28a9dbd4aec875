"""ASGI apps of a process: their listeners, and the end of their exchanges."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from gorgo.live.listener.heads import HeadLimits
from gorgo.live.listener.hypercorn_server import ServerConfig
from gorgo.live.listener.listener import AcceptLimits, serve_app
from gorgo.live.listener.sockets import BACKLOG
from gorgo.live.logs import LOGGER
from gorgo.live.state import LiveState

#: Above the 60 s of common load balancers, so that the process never closes a connection under a new request.
KEEP_ALIVE_S = 75.0
#: Time for listeners to close once only idle connections are open.
CLOSE_S = 1.0


async def serve_asgi(
    app: Any,
    listener: socket.socket,
    closing: asyncio.Event,
    limits: Callable[[], AcceptLimits],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve `app` until `closing` is set."""
    config = ServerConfig()
    config.errorlog = _hypercorn_log()
    config.accesslog = None
    config.backlog = BACKLOG
    config.graceful_timeout = 3 * CLOSE_S
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    # A replica's `server` and `date` pass; responses of the process's own have a date.
    config.include_server_header = False
    config.include_date_header = False
    await serve_app(app, config, listener, closing, limits=limits, tls=tls)


def accept_limits(state: LiveState, connections: int | None = None) -> Callable[[], AcceptLimits]:
    """Return the limits of new connections at each call; `connections` instead of the configured number."""
    return partial(_accept_limits, state, connections)


async def end_exchanges(state: LiveState, stop_now: asyncio.Event) -> None:
    """Let open exchanges finish within the grace period, or until `stop_now` is set; then cancel them."""
    await _shut_down(state, state.limits.shutdown_grace_s, stop_now)
    for task in state.exchanges:
        task.cancel()
    await _shut_down(state, CLOSE_S, asyncio.Event())


def _accept_limits(state: LiveState, connections: int | None) -> AcceptLimits:
    limits = state.limits
    head = HeadLimits(limits.max_header_bytes, limits.header_timeout_s)
    return AcceptLimits(head, limits.max_connections if connections is None else connections)


async def _shut_down(state: LiveState, limit_s: float, stop_now: asyncio.Event) -> None:
    """Wait until no exchange is open, `limit_s` have passed, or `stop_now` is set."""
    waiting = asyncio.create_task(_until_idle(state))
    stopped_now = asyncio.create_task(stop_now.wait())
    await asyncio.wait((waiting, stopped_now), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    stopped_now.cancel()


async def _until_idle(state: LiveState) -> None:
    while state.exchanges:
        await asyncio.wait(tuple(state.exchanges))


def _hypercorn_log() -> logging.Logger:
    logger = LOGGER.getChild("hypercorn")
    logger.setLevel(logging.WARNING)
    return logger
