"""The proxy as a process: two listeners, the loops behind them, and how it stops.

Owns signals, what runs, and the order of shutdown; the sockets are `sockets`'. The data listener answers requests, the
admin listener operators and tuners; both are hypercorn's, in one event loop.

Stopping: at the first signal `/ready` turns 503 and new requests are refused, while open ones may finish for the grace
period. What is then still open is told so and cut. A second signal ends the grace at once. Only then do the listeners
close, so that a load balancer is never left with a refused connection before it has seen the 503.
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

from hypercorn.config import Config as HypercornConfig

from gorgo.config.constants import BLOCK_BYTES
from gorgo.config.model import Config, LimitsConfig
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.proxy.admin.app import admin_app
from gorgo.proxy.admin.bodies import BoundedBodies
from gorgo.proxy.app import data_app
from gorgo.proxy.build import build_proxy
from gorgo.proxy.control.state_file import StateFile
from gorgo.proxy.http.http1 import HeadLimits
from gorgo.proxy.http.listener import AcceptLimits, serve_app
from gorgo.proxy.http.sockets import BACKLOG, ServerAddresses, address_of, listening
from gorgo.proxy.logs import LOGGER, log
from gorgo.proxy.monitor.fleet_monitor import FleetMonitor, probe_all, run_timers
from gorgo.proxy.monitor.replica_monitor import ReplicaMonitor
from gorgo.proxy.reload.file_watch import ConfigFile
from gorgo.proxy.reload.reloader import Reloader
from gorgo.proxy.state import RunningProxy
from gorgo.proxy.telemetry.request_log import RequestLog
from gorgo.proxy.telemetry.request_log_file import BLOCKS_PER_HASH, RequestLogFile

#: Above the 60 s of common load balancers, so that it is never we who close a connection under a new request.
KEEP_ALIVE_S = 75.0
#: Listeners close within this once nothing is open any more: idle connections only.
CLOSE_S = 1.0
#: Of operators, tuners and their tools, each with a connection or two.
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
    ready: Callable[[ServerAddresses], None] | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run the proxy until it is told to stop.

    Raises `ConfigError` where it cannot listen, or something that `config` names cannot be had.

    Parameters
    ----------
    config:
        The fleet and every limit.
    policy, weights:
        What to route by; the policy's defaults where `weights` is `None`.
    admin_token:
        What admin calls must bear; without one they are all refused.
    environ:
        Where replicas' API keys are.
    key:
        Of the fingerprint; secret, or clients could craft prompts that collide.
    seed:
        Of the Router's chance.
    file:
        Where `config` came from, followed from now on: when it changes, and at SIGHUP where signals are minded.
    state_file:
        Where weights, policy, freeze and drain marks are kept; what it holds may go before `config`, `policy` and
        `weights` (`resume`).
    request_log:
        Where finished requests are written.
    ready:
        Called once, with the bound addresses, when requests can be routed.
    shutdown:
        Stops the proxy when set. Without it, SIGTERM and SIGINT do.
    """
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
            follow = None if file is None else _FollowConfig(file, environ)
            if shutdown is not None:
                await _run(state, data, admin, admin_token, follow, ready, shutdown, asyncio.Event())
                return
            with _signals(file) as (stop, hurry):
                await _run(state, data, admin, admin_token, follow, ready, stop, hurry)
        finally:
            await state.aclose()


def _open_request_log(path: Path, state: RunningProxy) -> RequestLog:
    block_bytes = BLOCK_BYTES * BLOCKS_PER_HASH
    log_file = RequestLogFile(path, boot_id=state.router.boot_id, clock=state.clock, block_bytes=block_bytes)
    log_file.open()
    return RequestLog(log_file, count=state.metrics.request_log)


@dataclass(frozen=True, slots=True)
class _FollowConfig:
    """What a reload needs beside the running proxy."""

    file: ConfigFile
    environ: Mapping[str, str]


async def _run(
    state: RunningProxy,
    data: socket.socket,
    admin: socket.socket,
    admin_token: str | None,
    follow: _FollowConfig | None,
    ready: Callable[[ServerAddresses], None] | None,
    stop: asyncio.Event,
    hurry: asyncio.Event,
) -> None:
    addresses = ServerAddresses(address_of(data), address_of(admin), tls=state.served_tls is not None)
    closing = asyncio.Event()
    watchers = [ReplicaMonitor(state, target) for target in state.targets.values()]
    await probe_all(watchers)
    async with asyncio.TaskGroup() as tasks:
        at_work = FleetMonitor(tasks)
        while watchers:  # handed over: who leaves the fleet later must not be kept here
            at_work.start(watchers.pop())
        loops = [tasks.create_task(run_timers(state))]
        if state.request_log is not None:
            tasks.create_task(state.request_log.run())
        if follow is not None:
            reloader = Reloader(state, follow.file, at_work, environ=follow.environ)
            loops.append(tasks.create_task(reloader.run()))
        tls = None if state.served_tls is None else state.served_tls.context
        data_limits = partial(_data_limits, state)
        tasks.create_task(_serve(data_app(state), data, closing, data_limits, tls))
        admin_limits = partial(_admin_limits, state)
        operators = BoundedBodies(admin_app(state, admin_token, closing))
        tasks.create_task(_serve(operators, admin, closing, admin_limits))
        if ready is not None:
            ready(addresses)
        log("ready", data=addresses.data_url, admin=addresses.admin_url, replicas=len(state.targets))
        await stop.wait()
        await _stop(state, hurry)
        closing.set()
        if state.request_log is not None:
            state.request_log.stop()
        for loop in loops:
            loop.cancel()
        at_work.stop_all()


async def _stop(state: RunningProxy, hurry: asyncio.Event) -> None:
    """Take nothing new, let what is open finish, then cut it."""
    state.stopping = True
    log("stopping", in_flight=len(state.exchanges))
    await _shut_down(state, state.limits.shutdown_grace_s, hurry)
    for task in state.exchanges:
        task.cancel()
    await _shut_down(state, CLOSE_S, asyncio.Event())


async def _shut_down(state: RunningProxy, limit_s: float, hurry: asyncio.Event) -> None:
    """Until no exchange is open, `limit_s` have passed, or someone is in a hurry."""
    waiting = asyncio.create_task(_until_idle(state))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait((waiting, hurried), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    hurried.cancel()


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
    config = HypercornConfig()
    config.errorlog = _hypercorn_log()
    config.accesslog = None
    config.backlog = BACKLOG
    config.graceful_timeout = CLOSE_S
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 1_000_000
    # The replica's own `server` and `date` pass; the proxy's own answers bring a date.
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
    """(stop, hurry): set by the first and the second SIGTERM or SIGINT. SIGHUP asks for the file, if there is one."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def arrived() -> None:
        (hurry if stop.is_set() else stop).set()

    handlers: dict[signal.Signals, Callable[[], None]] = {signal.SIGTERM: arrived, signal.SIGINT: arrived}
    if file is not None:
        handlers[signal.SIGHUP] = file.request_reload
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield stop, hurry
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
