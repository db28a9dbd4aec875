"""The run of a process: monitors, timers, reload, admin listener and one front end, from start to stop.

Owns the options of a process (`ProcessOptions`), the order of start and stop, signals, and the files that lines are
appended to. Leaves what serves requests to a `FrontEnd`. The front end serves requests, the admin listener operators
and tuners, in one event loop.

Shutdown: at the first signal `/ready` turns 503 and the front end ends its exchanges within the grace period. A second
signal ends the grace period. The listeners close last, so that a load balancer sees the 503 before a refused
connection.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gorgo.config.model import Config
from gorgo.config.values import BLOCK_BYTES
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.admin.app import admin_app
from gorgo.live.admin.bodies import BoundedBodies
from gorgo.live.build import build_live
from gorgo.live.control.state_file import PersistedState, StateFile
from gorgo.live.fleet_sources.service import FleetSources
from gorgo.live.listener.heads import AcceptLimits, HeadLimits
from gorgo.live.listener.sockets import BACKLOG, ServerAddresses, address_of, listening
from gorgo.live.logs import BLOCKS_PER_HASH, LOGGER, LineLog, RequestLogFile, flush_logs, log
from gorgo.live.monitor.fleet_monitor import FleetMonitor, probe_all, probe_overdue, run_timers
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.parsing.json_body import limit_digits
from gorgo.live.reload.file_watch import ConfigFile
from gorgo.live.reload.registrar import Registrar
from gorgo.live.reload.reloader import Reloader, apply_found
from gorgo.live.state import PROXY, FrontEndKind, LiveState, Routing, Telemetry

if TYPE_CHECKING:
    from gorgo.live.listener.hypercorn_server import ServerConfig
    from gorgo.live.listener.plain import PlainConfig

HypercornConfig = TypeVar("HypercornConfig", "ServerConfig", "PlainConfig")

# ASGI apps of a process: their listeners, and the end of their exchanges.


#: Above the 60 s of common load balancers, so that the process never closes a connection under a new request.
KEEP_ALIVE_S = 75.0
#: Time for listeners to close once only idle connections are open.
CLOSE_S = 1.0


def serve_asgi(
    app: Any,
    listener: socket.socket,
    closing: asyncio.Event,
    limits: Callable[[], AcceptLimits],
    tls: ssl.SSLContext | None = None,
    *,
    plain: bool = False,
) -> Coroutine[Any, Any, None]:
    """Return what serves `app` until `closing` is set: the own listener, or with `plain` stock hypercorn.

    The code of the one that serves is loaded at this call, and needs neither httptools nor uvloop with `plain`.
    """
    if plain:
        from gorgo.live.listener.plain import PlainConfig, serve_plain

        return serve_plain(app, _set_up(PlainConfig()), listener, closing, limits=limits, tls=tls)
    from gorgo.live.listener.hypercorn_server import ServerConfig
    from gorgo.live.listener.listener import serve_app

    return serve_app(app, _set_up(ServerConfig()), listener, closing, limits=limits, tls=tls)


def _set_up(config: HypercornConfig) -> HypercornConfig:
    """Set what both kinds of listeners share, and return `config`."""
    config.errorlog = _hypercorn_log()
    config.accesslog = None
    config.backlog = BACKLOG
    config.graceful_timeout = 3 * CLOSE_S
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    # A replica's `server` and `date` pass; responses of the process's own have a date.
    config.include_server_header = False
    config.include_date_header = False
    return config


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


class FrontEnd(Protocol):
    """The listener for requests, above what routes."""

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the listener, once it has started."""
        ...

    async def start(self) -> None:
        """Do what must succeed before the process is one. Raises `ConfigError`, also if it cannot listen."""
        ...

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve until `closing` is set, then close the listener."""
        ...

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """Let open exchanges end within the grace period, or until `stop_now` is set; then end them.

        Called once, before `closing` is set, with `LiveState.stopping` already true.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Options of a process.

    Parameters
    ----------
    policy, weights:
        The policy and its weights; its defaults if `weights` is `None`.
    admin_token:
        Required of admin calls; without it all are rejected.
    metrics_token:
        Good for `GET /metrics` of the admin listener, and for no other call.
    environ:
        Has the replicas' API keys.
    key:
        Key of the fingerprint; secret, or clients could craft prompts that collide.
    seed:
        Of the Router's random generator.
    file:
        Source of the configuration, reloaded when it changes and at SIGHUP.
    state_file:
        Stores weights, policy, freeze and drain marks; its content may override the configuration, `policy` and
        `weights` (`control.state_file`).
    request_log:
        File of finished requests.
    outcome_log:
        File of ended attempts with the features of all candidates.
    plain:
        HTTP by stock hypercorn, Starlette's router and httpx, without httptools and uvloop.
    """

    policy: Policy
    environ: Mapping[str, str]
    key: int
    seed: int
    weights: Weights | None = None
    admin_token: str | None = None
    metrics_token: str | None = None
    file: ConfigFile | None = None
    state_file: StateFile | None = None
    request_log: Path | None = None
    outcome_log: Path | None = None
    plain: bool = False


# Signals of a process: the first stops it in order, the second at once, SIGHUP reloads.


@contextmanager
def stop_signals(file: ConfigFile | None) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Yield (stop, stop_now), set by the first and the second SIGTERM or SIGINT. SIGHUP requests a reload."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    handlers: dict[signal.Signals, Callable[[], object]] = {signal.SIGTERM: on_signal, signal.SIGINT: on_signal}
    if file is not None and hasattr(signal, "SIGHUP"):  # not on Windows
        handlers[signal.SIGHUP] = file.request_reload
    try:
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
    except NotImplementedError:
        # The loops of Windows leave signals to the main thread, which the loop does not see.
        for number, handler in handlers.items():
            signal.signal(number, partial(_pass_signal, loop, handler))
    try:
        yield stop, stop_now
    finally:
        for number in handlers:
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)


def _pass_signal(loop: asyncio.AbstractEventLoop, handler: Callable[[], object], *_: object) -> None:
    loop.call_soon_threadsafe(handler)


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
            plain=options.plain,
        )
        try:
            front_end = make_front_end(state)
            await front_end.start()
            await state.routing.control.persist_initial(fresh=persisted is None)
            if options.request_log is not None:
                state.telemetry.request_log = open_request_log(options.request_log, state.routing, state.telemetry)
            if options.outcome_log is not None:
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
        loops.append(tasks.create_task(state.routing.control.run()))
        loops.append(tasks.create_task(probe_overdue(state.routing, fleet_monitor)))
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
        operators = BoundedBodies(
            admin_app(state, registrar, options.admin_token, closing, metrics_token=options.metrics_token)
        )
        limits = accept_limits(state, ADMIN_CONNECTIONS)
        tasks.create_task(serve_asgi(operators, admin, closing, limits, plain=state.plain))
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


# The files that a process appends lines to: request log and outcome log.


def open_request_log(path: Path, routing: Routing, telemetry: Telemetry) -> LineLog:
    """Return the log of finished requests."""
    block_bytes = BLOCK_BYTES * BLOCKS_PER_HASH
    log_file = RequestLogFile(path, boot_id=routing.router.boot_id, clock=routing.clock, block_bytes=block_bytes)
    log_file.open()
    return LineLog(log_file, count=telemetry.metrics.request_log)


def record_outcomes(path: Path, state: LiveState) -> LineLog:
    """Return the log of ended attempts, which the Router writes from now on."""
    from gorgo.live.telemetry.outcome_log import OutcomeLog, open_outcome_log

    log = open_outcome_log(
        path, boot_id=state.routing.router.boot_id, clock=state.routing.clock, count=state.telemetry.metrics.outcome_log
    )
    accelerators = (row.accelerator for row in state.config.replicas if row.accelerator is not None)
    state.routing.router.settings.record_outcomes(OutcomeLog(log.add, accelerators))
    return log
