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

from gorgo.config.model import Config
from gorgo.live.admin.app import admin_app
from gorgo.live.admin.bodies import BoundedBodies
from gorgo.live.build import build_live
from gorgo.live.control.state_file import PersistedState
from gorgo.live.fleet_sources.service import FleetSources
from gorgo.live.listener.sockets import ServerAddresses, address_of, listening
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
from gorgo.live.state import PROXY, FrontEndKind, LiveState

#: Operators, tuners and their tools, each with a connection or two.
ADMIN_CONNECTIONS = 256

Ready = Callable[[ServerAddresses], None]


async def run_process(
    config: Config,
    options: ProcessOptions,
    make_front_end: Callable[[LiveState], FrontEnd],
    *,
    kind: FrontEndKind = PROXY,
    ready: Ready | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run a process until `shutdown` or a signal.

    Parameters
    ----------
    make_front_end:
        Makes the front end of what routes.
    kind:
        Of the front end.
    ready:
        Called once, with the bound addresses, when requests can be routed.
    shutdown:
        Stops the process when set. Without it, SIGTERM and SIGINT do.

    Raises `ConfigError` if it cannot listen, or a resource that `config` names is missing.
    """
    persisted = _read_state(options)
    with listening(config.proxy.admin_bind, "proxy.admin_bind") as admin:
        state = build_live(
            config,
            policy=options.policy,
            weights=options.weights,
            environ=options.environ,
            key=options.key,
            seed=options.seed,
            state_file=options.state_file,
            persisted=persisted,
            kind=kind,
        )
        try:
            front_end = make_front_end(state)
            await front_end.start()
            await state.routing.control.persist_initial(fresh=persisted is None)
            if options.request_log is not None:
                from gorgo.live.process.logs import open_request_log

                state.telemetry.request_log = open_request_log(options.request_log, state.routing, state.telemetry)
            if options.outcome_log is not None:
                from gorgo.live.process.logs import record_outcomes

                state.telemetry.outcome_log = record_outcomes(options.outcome_log, state)
            if shutdown is not None:
                await _run(state, front_end, admin, options, ready, shutdown, asyncio.Event())
                return
            with stop_signals(options.file) as (stop, stop_now):
                await _run(state, front_end, admin, options, ready, stop, stop_now)
        finally:
            await state.aclose()
            flush_logs()


def _read_state(options: ProcessOptions) -> PersistedState | None:
    """Return the content of the state file; `None` without one."""
    limit_digits()
    return None if options.state_file is None else options.state_file.read()


async def _run(
    state: LiveState,
    front_end: FrontEnd,
    admin: socket.socket,
    options: ProcessOptions,
    ready: Ready | None,
    stop: asyncio.Event,
    stop_now: asyncio.Event,
) -> None:
    environ = options.environ
    addresses = ServerAddresses(front_end.address, address_of(admin), tls=state.served_tls is not None)
    closing = asyncio.Event()
    monitors = [ReplicaMonitor(state, target) for target in state.replicas.targets.values()]
    await asyncio.gather(probe_all(monitors), state.routing.training.start())
    async with asyncio.TaskGroup() as tasks:
        fleet_monitor = FleetMonitor(tasks)
        while monitors:  # moved, so that a removed replica is not referenced here
            fleet_monitor.start(monitors.pop())
        state.routing.models.read_all = fleet_monitor.read_models
        loops = [tasks.create_task(run_timers(state.routing)), tasks.create_task(state.routing.training.run())]
        loops.append(tasks.create_task(state.replicas.pushes.run(state.replicas.push_sources)))
        for line_log in state.telemetry.line_logs:
            tasks.create_task(line_log.run())
        reloader = Reloader(state, options.file, fleet_monitor, environ=environ)
        registrar = Registrar(state, reloader, environ=environ)
        sources = FleetSources(
            state.replicas.found, state.routing.clock, partial(apply_found, state, reloader), environ=environ
        )
        loops += [tasks.create_task(reloader.run()), tasks.create_task(sources.run())]
        if state.routing.peer_store is not None:
            state.routing.peer_store.probe = fleet_monitor.probe
            loops.append(tasks.create_task(state.routing.peer_store.run()))
            await state.routing.peer_store.wait_joined()
        tasks.create_task(front_end.serve_requests(closing))
        operators = BoundedBodies(admin_app(state, registrar, options.admin_token, closing))
        tasks.create_task(serve_asgi(operators, admin, closing, accept_limits(state, ADMIN_CONNECTIONS)))
        if ready is not None:
            ready(addresses)
        log("ready", data=addresses.data_url, admin=addresses.admin_url, replicas=len(state.replicas.targets))
        await stop.wait()
        state.stopping = True
        log("stopping", in_flight=len(state.exchanges))
        await front_end.end_exchanges(stop_now)
        closing.set()
        for line_log in state.telemetry.line_logs:
            line_log.stop()
        for loop in loops:
            loop.cancel()
        fleet_monitor.stop_all()
