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
from gorgo.live.process.run import Ready, read_state, run_process
from gorgo.proxy.app import data_app
from gorgo.proxy.build import build_proxy
from gorgo.proxy.state import RunningProxy


async def serve(
    config: Config,
    options: ProcessOptions,
    *,
    ready: Ready | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run the proxy until `shutdown` or a signal. `ready` and `shutdown` as in `run_process`.

    Raises `ConfigError` if it cannot listen, or a resource that `config` names is missing.
    """
    persisted = read_state(options)
    with (
        listening(config.proxy.bind, "proxy.bind") as data,
        listening(config.proxy.admin_bind, "proxy.admin_bind") as admin,
    ):
        state = build_proxy(
            config,
            policy=options.policy,
            weights=options.weights,
            environ=options.environ,
            key=options.key,
            seed=options.seed,
            state_file=options.state_file,
            persisted=persisted,
        )
        front_end = HttpFrontEnd(state, data)
        await run_process(front_end, admin, options, fresh=persisted is None, ready=ready, shutdown=shutdown)


class HttpFrontEnd:
    """The data listener of a proxy."""

    def __init__(self, state: RunningProxy, listener: socket.socket) -> None:
        self.state = state
        self.address = address_of(listener)
        self._listener = listener

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve clients until `closing` is set."""
        served = self.state.served_tls
        tls = None if served is None else served.context
        await serve_asgi(data_app(self.state), self._listener, closing, accept_limits(self.state), tls)

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """End all exchanges, after the grace period at the latest."""
        await end_exchanges(self.state, stop_now)
