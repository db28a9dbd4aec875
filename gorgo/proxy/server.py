"""The regional proxy as a process: its data listener serves clients.

At the first signal new requests are rejected; open ones may finish within the grace period, then they end with an
error.
"""

from __future__ import annotations

import asyncio
import socket

from gorgo.config.model import Config
from gorgo.live.listener.sockets import address_of, listening
from gorgo.live.process.apps import accept_limits, end_exchanges, serve_asgi
from gorgo.live.process.options import ProcessOptions
from gorgo.live.process.run import Ready, run_process
from gorgo.live.state import LiveState
from gorgo.proxy.app import data_app


async def serve(
    config: Config,
    options: ProcessOptions,
    *,
    ready: Ready | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run the proxy until `shutdown` or a signal. Parameters and errors as of `run_process`."""
    with listening(config.proxy.bind, "proxy.bind") as data:
        await run_process(config, options, lambda live: HttpFrontEnd(live, data), ready=ready, shutdown=shutdown)


class HttpFrontEnd:
    """The data listener of a proxy."""

    def __init__(self, live: LiveState, listener: socket.socket) -> None:
        self.address = address_of(listener)
        self._live = live
        self._listener = listener

    async def start(self) -> None:
        """Do nothing: the socket listens already."""

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve clients until `closing` is set."""
        served = self._live.served_tls
        tls = None if served is None else served.context
        await serve_asgi(data_app(self._live), self._listener, closing, accept_limits(self._live), tls)

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """End all exchanges, after the grace period at the latest."""
        await end_exchanges(self._live, stop_now)
