"""The proxy as a process: two listeners, background loops, signals, shutdown.

The data listener serves clients, the admin listener operators and tuners, in one event loop.

Shutdown: at the first signal `/ready` turns 503 and new requests are rejected; open ones may finish within the grace
period, then they end with an error. A second signal ends the grace period. The listeners close last, so that a load
balancer sees the 503 before a refused connection.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gorgo.config.constants import BLOCK_BYTES
from gorgo.config.model import Config, LimitsConfig
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.admin.app import admin_app
from gorgo.live.admin.bodies import BoundedBodies
from gorgo.live.control.state_file import StateFile
from gorgo.live.fleet_sources.service import FleetSources
from gorgo.live.logs import LOGGER, flush_logs, log
from gorgo.live.monitor.fleet_monitor import FleetMonitor, probe_all, run_timers
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.parsing.json_body import limit_digits
from gorgo.live.reload.file_watch import ConfigFile
from gorgo.live.reload.found_replicas import apply_found
from gorgo.live.reload.registrar import Registrar
from gorgo.live.reload.reloader import Reloader
from gorgo.live.telemetry.line_log import LineLog
from gorgo.live.telemetry.outcome_log import OutcomeLog, open_outcome_log
from gorgo.live.telemetry.request_log_file import BLOCKS_PER_HASH, RequestLogFile
from gorgo.proxy.app import data_app
from gorgo.proxy.build import build_proxy
from gorgo.proxy.http.heads import HeadLimits
from gorgo.proxy.http.hypercorn_server import ServerConfig
from gorgo.proxy.http.listener import AcceptLimits, serve_app
from gorgo.proxy.http.sockets import BACKLOG, ServerAddresses, address_of, listening
from gorgo.proxy.state import RunningProxy

#: Above the 60 s of common load balancers, so that the proxy never closes a connection under a new request.
KEEP_ALIVE_S = 75.0
#: Time for listeners to close once only idle connections are open.
CLOSE_S = 1.0
#: Operators, tuners and their tools, each with a connection or two.
ADMIN_CONNECTIONS = 256


async def serve(
    config: Config,
    *,
    policy: Policy,
    weights: Weights | None = None,
    admin_token: str | None = None,
    environ: Mapping[str, str],
    key: int,
    seed: int,
    file: ConfigFile | None = None,
    state_file: StateFile | None = None,
    request_log: Path | None = None,
    outcome_log: Path | None = None,
    ready: Callable[[ServerAddresses], None] | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run the proxy until `shutdown` or a signal.

    Raises `ConfigError` if it cannot listen, or a resource that `config` names is missing.

    Parameters
    ----------
    config:
        The fleet and every limit.
    policy, weights:
        The policy and its weights; its defaults if `weights` is `None`.
    admin_token:
        Required of admin calls; without it all are rejected.
    environ:
        Has the replicas' API keys.
    key:
        Key of the fingerprint; secret, or clients could craft prompts that collide.
    seed:
        Of the Router's random generator.
    file:
        Source of `config`, reloaded when it changes and at SIGHUP.
    state_file:
        Stores weights, policy, freeze and drain marks; its content may override `config`, `policy` and `weights`
        (`control.startup`).
    request_log:
        File of finished requests.
    outcome_log:
        File of ended attempts with the features of all candidates.
    ready:
        Called once, with the bound addresses, when requests can be routed.
    shutdown:
        Stops the proxy when set. Without it, SIGTERM and SIGINT do.
    """
    limit_digits()
    persisted = None if state_file is None else state_file.read()
    with listening(config.proxy.bind, "bind") as data, listening(config.proxy.admin_bind, "admin_bind") as admin:
        state = build_proxy(
            config,
            policy=policy,
            weights=weights,
            environ=environ,
            key=key,
            seed=seed,
            state_file=state_file,
            persisted=persisted,
        )
        try:
            await state.control.persist_initial(fresh=persisted is None)
            if request_log is not None:
                state.request_log = _open_request_log(request_log, state)
            if outcome_log is not None:
                state.outcome_log = _open_outcome_log(outcome_log, state)
            follow = _FollowConfig(file, environ)
            if shutdown is not None:
                await _run(state, data, admin, admin_token, follow, ready, shutdown, asyncio.Event())
                return
            with _signals(file) as (stop, stop_now):
                await _run(state, data, admin, admin_token, follow, ready, stop, stop_now)
        finally:
            await state.aclose()
            flush_logs()


def _open_request_log(path: Path, state: RunningProxy) -> LineLog:
    block_bytes = BLOCK_BYTES * BLOCKS_PER_HASH
    log_file = RequestLogFile(path, boot_id=state.router.boot_id, clock=state.clock, block_bytes=block_bytes)
    log_file.open()
    return LineLog(log_file, count=state.metrics.request_log)


def _open_outcome_log(path: Path, state: RunningProxy) -> LineLog:
    log = open_outcome_log(path, boot_id=state.router.boot_id, clock=state.clock, count=state.metrics.outcome_log)
    accelerators = (row.accelerator for row in state.config.replicas if row.accelerator is not None)
    state.router.record_outcomes(OutcomeLog(log.add, accelerators))
    return log


@dataclass(frozen=True, slots=True)
class _FollowConfig:
    """Arguments of changes of the fleet; `file` is `None` if none is followed."""

    file: ConfigFile | None
    environ: Mapping[str, str]


async def _run(
    state: RunningProxy,
    data: socket.socket,
    admin: socket.socket,
    admin_token: str | None,
    follow: _FollowConfig,
    ready: Callable[[ServerAddresses], None] | None,
    stop: asyncio.Event,
    stop_now: asyncio.Event,
) -> None:
    addresses = ServerAddresses(address_of(data), address_of(admin), tls=state.served_tls is not None)
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
        reloader = Reloader(state, follow.file, fleet_monitor, environ=follow.environ)
        registrar = Registrar(state, reloader, environ=follow.environ)
        sources = FleetSources(state, partial(apply_found, state, reloader), environ=follow.environ)
        loops += [tasks.create_task(reloader.run()), tasks.create_task(sources.run())]
        tls = None if state.served_tls is None else state.served_tls.context
        data_limits = partial(_data_limits, state)
        tasks.create_task(_serve(data_app(state), data, closing, data_limits, tls))
        admin_limits = partial(_admin_limits, state)
        operators = BoundedBodies(admin_app(state, registrar, admin_token, closing))
        tasks.create_task(_serve(operators, admin, closing, admin_limits))
        if ready is not None:
            ready(addresses)
        log("ready", data=addresses.data_url, admin=addresses.admin_url, replicas=len(state.targets))
        await stop.wait()
        await _stop(state, stop_now)
        closing.set()
        for line_log in state.line_logs:
            line_log.stop()
        for loop in loops:
            loop.cancel()
        fleet_monitor.stop_all()


async def _stop(state: RunningProxy, stop_now: asyncio.Event) -> None:
    """Reject new requests, let open ones finish within the grace period, then cancel them."""
    state.stopping = True
    log("stopping", in_flight=len(state.exchanges))
    await _shut_down(state, state.limits.shutdown_grace_s, stop_now)
    for task in state.exchanges:
        task.cancel()
    await _shut_down(state, CLOSE_S, asyncio.Event())


async def _shut_down(state: RunningProxy, limit_s: float, stop_now: asyncio.Event) -> None:
    """Wait until no exchange is open, `limit_s` have passed, or `stop_now` is set."""
    waiting = asyncio.create_task(_until_idle(state))
    stopped_now = asyncio.create_task(stop_now.wait())
    await asyncio.wait((waiting, stopped_now), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    stopped_now.cancel()


async def _until_idle(state: RunningProxy) -> None:
    while state.exchanges:
        await asyncio.wait(tuple(state.exchanges))


async def _serve(
    app: Any,
    listener: socket.socket,
    closing: asyncio.Event,
    limits: Callable[[], AcceptLimits],
    tls: ssl.SSLContext | None = None,
) -> None:
    config = ServerConfig()
    config.errorlog = _hypercorn_log()
    config.accesslog = None
    config.backlog = BACKLOG
    config.graceful_timeout = 3 * CLOSE_S
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    # A replica's `server` and `date` pass; responses of the proxy's own have a date.
    config.include_server_header = False
    config.include_date_header = False
    await serve_app(app, config, listener, closing, limits=limits, tls=tls)


def _data_limits(state: RunningProxy) -> AcceptLimits:
    return _accept_limits(state.limits, state.limits.max_connections)


def _admin_limits(state: RunningProxy) -> AcceptLimits:
    return _accept_limits(state.limits, ADMIN_CONNECTIONS)


def _accept_limits(limits: LimitsConfig, connections: int) -> AcceptLimits:
    return AcceptLimits(HeadLimits(limits.max_header_bytes, limits.header_timeout_s), connections)


def _hypercorn_log() -> logging.Logger:
    logger = LOGGER.getChild("hypercorn")
    logger.setLevel(logging.WARNING)
    return logger


@contextmanager
def _signals(file: ConfigFile | None) -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Yield (stop, stop_now), set by the first and the second SIGTERM or SIGINT. SIGHUP requests a reload."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    handlers: dict[signal.Signals, Callable[[], object]] = {signal.SIGTERM: on_signal, signal.SIGINT: on_signal}
    if file is not None:
        handlers[signal.SIGHUP] = file.request_reload
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield stop, stop_now
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
