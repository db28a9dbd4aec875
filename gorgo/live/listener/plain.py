"""The listener of `gorgo serve --plain`: stock hypercorn, for systems without httptools or uvloop.

Owns its settings. The app is that of every proxy: without the extensions of the own listener it reads by `receive` and
writes by `send`. Stock h11 accepts requests that the own reader refuses, and hypercorn bounds neither connections nor
incomplete heads in sum, so this listener belongs behind a load balancer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

from hypercorn.asyncio import serve
from hypercorn.config import Config

from gorgo.live.http.body import draining
from gorgo.live.http.errors import HttpError, Message, Receive, Send, send_error
from gorgo.live.listener.heads import AcceptLimits


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
