"""The run of a process: monitors, timers, reload, admin listener and one front end, from start to stop.

The front end serves requests, the admin listener operators and tuners, in one event loop.

Shutdown: at the first signal `/ready` turns 503 and the front end ends its exchanges within the grace period. A second
signal ends the grace period. The listeners close last, so that a load balancer sees the 503 before a refused
connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from gorgo.live.admin.app import admin_app
from gorgo.live.admin.bodies import BoundedBodies
from gorgo.live.control.state_file import PersistedState
from gorgo.live.fleet_sources.service import FleetSources
from gorgo.live.listener.sockets import ServerAddresses, address_of
from gorgo.live.logs import flush_logs, log
from gorgo.live.monitor.fleet_monitor import FleetMonitor, probe_all, run_timers
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.parsing.json_body import limit_digits
from gorgo.live.process.apps import accept_limits, serve_asgi
from gorgo.live.process.front_end import FrontEnd
from gorgo.live.process.options import ProcessOptions
from gorgo.live.process.signals import stop_signals
from gorgo.live.reload.found_replicas import apply_found
from gorgo.live.reload.registrar import Registrar
from gorgo.live.reload.reloader import Reloader

#: Operators, tuners and their tools, each with a connection or two.
ADMIN_CONNECTIONS = 256

Ready = Callable[[ServerAddresses], None]


def read_state(options: ProcessOptions) -> PersistedState | None:
    """Return the content of the state file; `None` without one."""
    limit_digits()
    return None if options.state_file is None else options.state_file.read()


async def run_process(
    front_end: FrontEnd,
    admin: socket.socket,
    options: ProcessOptions,
    *,
    fresh: bool,
    ready: Ready | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run until `shutdown` or a signal, and close the state of the front end.

    Parameters
    ----------
    admin:
        Socket of the admin listener.
    fresh:
        The state file has no content yet.
    ready:
        Called once, with the bound addresses, when requests can be routed.
    shutdown:
        Stops the process when set. Without it, SIGTERM and SIGINT do.
    """
    state = front_end.state
    try:
        await state.control.persist_initial(fresh=fresh)
        if options.request_log is not None:
            from gorgo.live.process.logs import open_request_log

            state.request_log = open_request_log(options.request_log, state)
        if options.outcome_log is not None:
            from gorgo.live.process.logs import record_outcomes

            state.outcome_log = record_outcomes(options.outcome_log, state)
        if shutdown is not None:
            await _run(front_end, admin, options, ready, shutdown, asyncio.Event())
            return
        with stop_signals(options.file) as (stop, stop_now):
            await _run(front_end, admin, options, ready, stop, stop_now)
    finally:
        await state.aclose()
        flush_logs()


async def _run(
    front_end: FrontEnd,
    admin: socket.socket,
    options: ProcessOptions,
    ready: Ready | None,
    stop: asyncio.Event,
    stop_now: asyncio.Event,
) -> None:
    state, environ = front_end.state, options.environ
    addresses = ServerAddresses(front_end.address, address_of(admin), tls=state.served_tls is not None)
    closing = asyncio.Event()
    monitors = [ReplicaMonitor(state, target) for target in state.targets.values()]
    await asyncio.gather(probe_all(monitors), state.training.start())
    async with asyncio.TaskGroup() as tasks:
        fleet_monitor = FleetMonitor(tasks)
        while monitors:  # moved, so that a removed replica is not referenced here
            fleet_monitor.start(monitors.pop())
        state.models.read_all = fleet_monitor.read_models
        loops = [tasks.create_task(run_timers(state)), tasks.create_task(state.training.run())]
        loops.append(tasks.create_task(state.pushes.run(state.push_sources)))
        for line_log in state.line_logs:
            tasks.create_task(line_log.run())
        reloader = Reloader(state, options.file, fleet_monitor, environ=environ)
        registrar = Registrar(state, reloader, environ=environ)
        sources = FleetSources(state, partial(apply_found, state, reloader), environ=environ)
        loops += [tasks.create_task(reloader.run()), tasks.create_task(sources.run())]
        if state.peer_store is not None:
            state.peer_store.probe = fleet_monitor.probe
            loops.append(tasks.create_task(state.peer_store.run()))
            await state.peer_store.wait_joined()
        tasks.create_task(front_end.serve_requests(closing))
        operators = BoundedBodies(admin_app(state, registrar, options.admin_token, closing))
        tasks.create_task(serve_asgi(operators, admin, closing, accept_limits(state, ADMIN_CONNECTIONS)))
        if ready is not None:
            ready(addresses)
        log("ready", data=addresses.data_url, admin=addresses.admin_url, replicas=len(state.targets))
        await stop.wait()
        state.stopping = True
        log("stopping", in_flight=len(state.exchanges))
        await front_end.end_exchanges(stop_now)
        closing.set()
        for line_log in state.line_logs:
            line_log.stop()
        for loop in loops:
            loop.cancel()
        fleet_monitor.stop_all()
