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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gorgo.config.model import Config
from gorgo.config.values import BLOCK_BYTES
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.admin.app import admin_app
from gorgo.live.admin.calls import BoundedBodies
from gorgo.live.admin.workers import WorkersApp
from gorgo.live.build import build_live
from gorgo.live.control.state_file import PersistedState, StateFile
from gorgo.live.event_loop import first_of
from gorgo.live.fleet_sources.service import FleetSources
from gorgo.live.huge_pages import use_huge_pages
from gorgo.live.listener.heads import AcceptLimits, HeadLimits
from gorgo.live.listener.sockets import BACKLOG, ServerAddresses, address_of, listening
from gorgo.live.logs import BLOCKS_PER_HASH, LOGGER, LineFile, LineLog, RequestLogFile, flush_logs, log
from gorgo.live.monitor.fleet_monitor import FleetMonitor, learn_all, probe_overdue, run_timers, warm_replica
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.parsing.json_body import limit_digits
from gorgo.live.reload.file_watch import ConfigFile
from gorgo.live.reload.registrar import Registrar
from gorgo.live.reload.reloader import Reloader, apply_found
from gorgo.live.shared_work import LinesForLeader, SharedWork, count_nothing
from gorgo.live.state import PROXY, FrontEndKind, LiveState, Routing
from gorgo.live.workers.link import WorkerLink

if TYPE_CHECKING:
    from gorgo.live.listener.hypercorn_server import ServerConfig
    from gorgo.live.listener.listener import SharedListener
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
    shared: SharedListener | None = None,
) -> Coroutine[Any, Any, None]:
    """Return what serves `app` until `closing` is set: the own listener, or with `plain` stock hypercorn.

    The code of the one that serves is loaded at this call, and needs neither httptools nor uvloop with `plain`.
    """
    if plain:
        from gorgo.live.listener.plain import PlainConfig, serve_plain

        return serve_plain(app, _set_up(PlainConfig()), listener, closing, limits=limits, tls=tls)
    from gorgo.live.listener.hypercorn_server import ServerConfig
    from gorgo.live.listener.listener import serve_app

    return serve_app(app, _set_up(ServerConfig()), listener, closing, limits=limits, tls=tls, shared=shared)


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
    link:
        To the other workers of this router; `None` for a router of one process.
    persisted:
        The state in force, where another worker has the state file.
    text:
        Of the configuration, for other workers.
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
    link: WorkerLink | None = None
    persisted: PersistedState | None = None
    text: bytes = b""


# Signals of a process: the first stops it in order, the second at once, SIGHUP reloads. SIGUSR2 is for the parent of
# several processes: elsewhere its default would end the process and every stream with it.


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
    if hasattr(signal, "SIGUSR2"):
        handlers[signal.SIGUSR2] = _refuse_takeover
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


def _refuse_takeover() -> None:
    reason = "SIGUSR2 is for the parent of several processes (proxy.processes); this one goes on"
    log("takeover_failed", level=logging.WARNING, reason=reason)


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
    link = options.link
    persisted = _read_state(options)
    with _admin_listener(config, link) as admin:
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
            link=link,
        )
        try:
            front_end = make_front_end(state)
            await front_end.start()
            await state.routing.control.persist_initial(fresh=persisted is None)
            if options.request_log is not None:
                state.telemetry.request_log = open_request_log(options.request_log, state)
            if options.outcome_log is not None:
                state.telemetry.outcome_log = record_outcomes(options.outcome_log, state)
            if shutdown is not None:
                await _run(state, front_end, admin, options, ready, shutdown, asyncio.Event())
                return
            with stop_signals(options.file) as (stop, stop_now):
                if link is not None:
                    link.when_ended(stop.set)
                await _run(state, front_end, admin, options, ready, stop, stop_now)
        finally:
            await state.aclose()
            flush_logs()


def _admin_listener(config: Config, link: WorkerLink | None) -> AbstractContextManager[socket.socket]:
    """Return the admin listener, bound here or by the parent of the workers."""
    if link is not None:
        return link.listener(link.start.admin)
    return listening(config.proxy.admin_bind, "proxy.admin_bind")


def _read_state(options: ProcessOptions) -> PersistedState | None:
    """Return the state in force of the leader, or the content of the state file; `None` without one."""
    limit_digits()
    if options.persisted is not None:
        return options.persisted
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
    environ, link = options.environ, options.link
    addresses = ServerAddresses(front_end.address, address_of(admin), tls=state.served_tls is not None)
    # The second one is set too when the listeners and files are a successor's.
    closing, admin_closing = asyncio.Event(), asyncio.Event()
    monitors = [ReplicaMonitor(state, target) for target in state.replicas.targets.values()]
    await asyncio.gather(learn_all(monitors, link), state.routing.training.start())
    async with asyncio.TaskGroup() as tasks:
        fleet_monitor = FleetMonitor(tasks)
        while monitors:  # moved, so that a removed replica is not referenced here
            fleet_monitor.start(monitors.pop())
        state.routing.models.read_all = fleet_monitor.read_models
        loops = [tasks.create_task(run_timers(state.routing))]
        loops.append(tasks.create_task(_when_leading(link, _train(state), unless=admin_closing)))
        loops.append(tasks.create_task(state.routing.control.run()))
        loops.append(tasks.create_task(use_huge_pages()))
        loops.append(tasks.create_task(probe_overdue(state.routing, fleet_monitor)))
        loops.append(tasks.create_task(state.routing.scaling.run(partial(warm_replica, state))))
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
        app: Any = admin_app(state, registrar, options.admin_token, admin_closing, metrics_token=options.metrics_token)
        limits = accept_limits(state, ADMIN_CONNECTIONS)
        if link is not None:
            app = WorkersApp(app, state, link)
            work = SharedWork(state, link, app, reloader, fleet_monitor, text=options.text)
            loops += [tasks.create_task(each) for each in work.loops()]
            if not link.leads:
                loops.append(tasks.create_task(_when_leading(link, _take_files(state, options))))
        operators = serve_asgi(BoundedBodies(app), admin, admin_closing, limits, plain=state.plain)
        serving = tasks.create_task(_when_leading(link, operators, unless=admin_closing))
        if link is not None:
            link.ready()
        if ready is not None:
            ready(addresses)
        log("ready", data=addresses.data_url, admin=addresses.admin_url, replicas=len(state.replicas.targets))
        await (stop.wait() if link is None else _until_stopped(state, link, stop, admin_closing))
        state.stopping = True
        log("stopping", in_flight=len(state.exchanges))
        await front_end.end_exchanges(stop_now)
        closing.set()
        admin_closing.set()
        if link is not None:
            await link.end_lead()
        for line_log in state.telemetry.line_logs:
            line_log.stop()
        for loop in loops:
            loop.cancel()
        if link is not None and not link.leads_now.is_set():
            serving.cancel()  # the listener is another worker's
        fleet_monitor.stop_all()


#: A process that leaves its listener to others waits so long for another request of its connections, s.
QUIET_S = 2.0


async def _until_stopped(state: LiveState, link: WorkerLink, stop: asyncio.Event, admin_closing: asyncio.Event) -> None:
    """Wait for a stop. Of a worker that retires open requests end first, and the files are its successor's at once.

    Its connections end with their next response. Those without one within `QUIET_S` of the last are closed, as those
    that are idle for long always are. The grace period bounds it all.
    """
    await first_of(stop, link.retiring)
    if stop.is_set():
        return
    log("worker_retires", worker=link.number, in_flight=len(state.exchanges))
    state.routing.control.write_no_more()
    admin_closing.set()
    with suppress(TimeoutError):
        async with asyncio.timeout(state.limits.shutdown_grace_s):
            while not stop.is_set():
                await _until_idle(state)
                started = state.routing.router.samples.last_seq
                with suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_S):
                        await stop.wait()
                if not state.exchanges and state.routing.router.samples.last_seq == started:
                    return


async def _when_leading(
    link: WorkerLink | None, work: Coroutine[Any, Any, None], *, unless: asyncio.Event | None = None
) -> None:
    """Do what is done once for all workers of a router, from when this process leads; not if `unless` is set then."""
    try:
        if link is not None:
            await link.leads_now.wait()
        if unless is None or not unless.is_set():
            await work
    finally:
        work.close()


async def _train(state: LiveState) -> None:
    state.routing.training.trains = True
    await state.routing.training.run()


# The files that a process appends lines to: request log and outcome log.


def open_request_log(path: Path, state: LiveState) -> LineLog:
    """Return the log of finished requests; the leader of several workers writes the file."""
    if not state.leads and state.link is not None:
        return LineLog(LinesForLeader(path, "request_log", state.link), count=count_nothing)
    file = request_log_file(path, state.routing)
    file.open()
    return LineLog(file, count=state.telemetry.metrics.request_log)


def request_log_file(path: Path, routing: Routing) -> RequestLogFile:
    """Return the file of the request log; opened, or else its first lines open it."""
    block_bytes = BLOCK_BYTES * BLOCKS_PER_HASH
    return RequestLogFile(path, boot_id=routing.router.boot_id, clock=routing.clock, block_bytes=block_bytes)


def record_outcomes(path: Path, state: LiveState) -> LineLog:
    """Return the log of ended attempts, which the Router writes from now on; of several workers the leader's file."""
    from gorgo.live.telemetry.outcome_log import OutcomeLog, outcome_log

    if not state.leads and state.link is not None:
        log = outcome_log(LinesForLeader(path, "outcome_log", state.link), count=count_nothing)
    else:
        file = _outcome_file(path, state)
        file.open()
        log = outcome_log(file, count=state.telemetry.metrics.outcome_log)
    state.routing.router.settings.record_outcomes(OutcomeLog(log.add))
    return log


def _outcome_file(path: Path, state: LiveState) -> LineFile:
    from gorgo.live.telemetry.outcome_log import outcome_log_file

    return outcome_log_file(path, boot_id=state.routing.router.boot_id, clock=state.routing.clock)


async def _take_files(state: LiveState, options: ProcessOptions) -> None:
    """Write the files of the router from now on: the worker that led before has ended.

    The state file is a successor's where there is one, which appends to the same logs. A log is opened by its next
    lines: of a worker that leads for the moments of a stop there are none.
    """
    telemetry = state.telemetry
    if options.state_file is not None and options.link is not None and not options.link.retiring.is_set():
        await state.routing.control.write_to(options.state_file)
    if options.request_log is not None and telemetry.request_log is not None:
        file = request_log_file(options.request_log, state.routing)
        telemetry.request_log.write_to(file, count=telemetry.metrics.request_log)
    if options.outcome_log is not None and telemetry.outcome_log is not None:
        outcomes = _outcome_file(options.outcome_log, state)
        telemetry.outcome_log.write_to(outcomes, count=telemetry.metrics.outcome_log)
