"""The endpoint picker as a process: Envoy calls it for each request.

At the first signal `readiness` turns NOT_SERVING, and calls are decided until none is open or the grace period is over.
Then the open ones end with status OK: Envoy carries their replies on without the picker.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from gorgo.config.model import Config
from gorgo.live.process import ProcessOptions, Ready, run_process
from gorgo.picker.access_log import take_access_log
from gorgo.picker.call import PickerCall
from gorgo.picker.state import PICKER, PickerState
from gorgo.picker.transport.http2.server import Http2Server
from gorgo.picker.transport.services import Health, services
from gorgo.picker.transport.streams import CallHandlers, Output, TransportLimits

#: Between two resolutions of the names in replicas' URLs, s: the usual time for which DNS answers may be cached.
RESOLVE_S = 30.0
#: Between two looks at the open calls of a picker that stops, s.
_IDLE_CHECK_S = 0.05


async def serve(
    config: Config,
    options: ProcessOptions,
    *,
    ready: Ready | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run the picker until `shutdown` or a signal. Parameters and errors as of `run_process`."""
    hold_s = config.picker.hold_s
    await run_process(
        config,
        options,
        lambda live: GrpcFrontEnd(PickerState(live, hold_s)),
        kind=PICKER,
        ready=ready,
        shutdown=shutdown,
    )


class GrpcFrontEnd:
    """The listener for Envoy."""

    def __init__(self, state: PickerState) -> None:
        self.state = state
        self._health = Health(partial(_is_ready, state), lambda: state.live.stopping)
        self._services = services(partial(_open_call, state), partial(take_access_log, state), self._health)
        self._server = Http2Server(self._services, TransportLimits.of(state.live.config.limits))
        self.address = ("", 0)

    async def start(self) -> None:
        """Listen, and resolve the names of replicas. Raises `ConfigError`."""
        picker = self.state.live.config.picker
        self.address = self._server.bind(picker.bind, picker.tls)
        await self.state.endpoints.resolve()

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve Envoy until `closing` is set."""
        loops = [asyncio.create_task(self._health.run()), asyncio.create_task(_resolve(self.state))]
        try:
            await self._server.serve_calls(closing)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """Wait until no call is open, within the grace period; `serve` ends those that remain."""
        self._health.update()
        self._server.start_drain()
        deadline_s = self.state.routing.clock() + self.state.live.limits.shutdown_grace_s
        while self.state.calls and not stop_now.is_set() and self.state.routing.clock() < deadline_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop_now.wait(), _IDLE_CHECK_S)


def _open_call(state: PickerState, output: Output) -> CallHandlers:
    call = PickerCall(state, output)
    return CallHandlers(call.feed, call.closed)


def _is_ready(state: PickerState) -> bool:
    if state.live.stopping or state.replicas.found.pending(state.routing.clock()):
        return False
    return state.live.why_not_ready(required=state.live.config.proxy.min_ready_replicas) is None


async def _resolve(state: PickerState) -> None:
    while True:
        await asyncio.sleep(RESOLVE_S)
        await state.endpoints.resolve()
