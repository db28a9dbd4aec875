"""The background loops of all replicas, the first probe of each, the warming of new ones, and the Router's timers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gorgo.live.http.errors import HttpError
from gorgo.live.logs import log
from gorgo.live.monitor.discovery import DISCOVERY_TIMEOUT_S
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.scaling import CHAT
from gorgo.live.state import LiveState, Routing
from gorgo.live.upstream.client import UpstreamError
from gorgo.live.workers.link import WorkerLink, WorkerUnreachable


class FleetMonitor:
    """The running monitors, one task per replica in the given task group."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[str, tuple[ReplicaMonitor, asyncio.Task[None]]] = {}
        #: Probes out of turn.
        self._probing: dict[str, asyncio.Task[None]] = {}

    def start(self, monitor: ReplicaMonitor) -> None:
        name = monitor.target.name
        assert name not in self._running, f"{name} has a monitor already"
        self._running[name] = monitor, self._tasks.create_task(monitor.run())

    def stop(self, name: str) -> asyncio.Task[None]:
        """Cancel the loops of one replica. Return their task, which ends soon."""
        _, task = self._running.pop(name)
        task.cancel()
        return task

    def restart(self) -> None:
        """Restart all loops with the intervals of the current configuration."""
        for name, (monitor, _) in list(self._running.items()):
            self.stop(name)
            self.start(monitor)

    def take_learned(self, name: str, kind: str, *answer: Any) -> None:
        """Take what the worker that leads has learned of a replica; of one that has left nothing."""
        running = self._running.get(name)
        if running is not None:
            running[0].take_answer(kind, *answer)

    async def learned(self) -> Learned:
        """Return the last answers of all replicas, for a worker that joins."""
        return {name: monitor.learned for name, (monitor, _) in self._running.items()}

    def probe(self, name: str) -> None:
        """Probe a replica now, unless such a probe runs already."""
        running = self._running.get(name)
        if running is not None and name not in self._probing:
            task = self._tasks.create_task(running[0].probe())
            self._probing[name] = task
            task.add_done_callback(lambda _: self._probing.pop(name))

    async def read_models(self) -> None:
        """Read the models of all replicas now, of those that answer in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
                await asyncio.gather(*(monitor.discover() for monitor, _ in self._running.values()))

    def stop_all(self) -> None:
        for probe in self._probing.values():
            probe.cancel()
        for name in list(self._running):
            self.stop(name)


#: Of each replica the last answer of each kind.
Learned = Mapping[str, Mapping[str, tuple[object, ...]]]


async def learn_all(monitors: list[ReplicaMonitor], link: WorkerLink | None) -> None:
    """Learn of all replicas before the first request, from the worker that leads where there is one."""
    learned: Learned = {}
    if link is not None and not link.leads:
        with suppress(WorkerUnreachable):
            learned = await link.question(link.leader, "learned")
    for monitor in monitors:
        for kind, answer in learned.get(monitor.target.name, {}).items():
            monitor.take_answer(kind, *answer)
    await probe_all([monitor for monitor in monitors if monitor.target.name not in learned])


async def probe_all(monitors: list[ReplicaMonitor]) -> None:
    """Probe all replicas once, concurrently, for at most `FIRST_PROBE_TIMEOUT_S`, before the first request."""
    results = await asyncio.gather(*(monitor.probe_once() for monitor in monitors))
    for monitor, result in zip(monitors, results, strict=True):
        monitor.publish(result)


#: Pause between probes of a replica with overdue requests, s: three failures eject one that has hung.
OVERDUE_PROBE_S = 1.0


async def probe_overdue(routing: Routing, fleet: FleetMonitor) -> None:
    """Probe replicas with overdue requests out of turn, until cancelled."""
    while True:
        await asyncio.sleep(OVERDUE_PROBE_S)
        for name in routing.router.view.overdue_replicas(now=routing.clock()):
            fleet.probe(name)


async def run_timers(routing: Routing) -> None:
    """Run the Router's timers when they are due, and each second: an event can move them earlier."""
    while True:
        due = routing.router.next_timer()
        wait_s = 1.0 if due is None else min(1.0, max(0.0, due - routing.clock()))
        await asyncio.sleep(max(wait_s, 0.01))
        routing.gateway.run_timer()


#: Time for all prompts, s: those of a cold engine that compiles its kernels. For as long it may get no other request.
WARM_TIMEOUT_S = 60.0


async def warm_replica(state: LiveState, name: str, prompts: Sequence[tuple[str | None, bytes]]) -> None:
    """Send a replica that serves anew the hot prompts, one after the other; the process that leads does so alone.

    Until the last answer its requests go to others, as far as there are any: they would wait behind the prompts. Each
    answer is in the index, so that the next requests for the prompt are sent there.
    """
    target = state.replicas.targets.get(name)
    if target is None or not state.leads or not prompts:
        return
    headers = [(b"content-type", b"application/json")]
    if target.api_key is not None:
        headers.append((b"authorization", b"Bearer " + target.api_key.encode("latin-1")))
    models, clock, warmed = state.routing.models, state.routing.clock, 0
    until_s = clock() + WARM_TIMEOUT_S
    state.routing.router.replicas.warm(name)
    try:
        for model, prompt in prompts:
            served = models.served(name)
            if model is not None and served and model not in served:
                continue
            body = prompt if model is None else _with_model(prompt, models.engine_name(name, model))
            left_s = max(until_s - clock(), 0.001)
            status, _ = await target.upstream.fetch(CHAT, headers, timeout_s=left_s, body=body)
            if status == 200:
                warmed += 1
                state.routing.router.caches.on_warmed(name, _blocks(state.routing, prompt))
    except UpstreamError as failure:
        log("replica_not_warmed", level=logging.WARNING, replica=name, prompts=warmed, error=failure.reason)
        return
    finally:
        state.routing.router.replicas.warm(name, warming=False)
    log("replica_warmed", replica=name, prompts=warmed)


def _blocks(routing: Routing, prompt: bytes) -> bytes:
    """Return the blocks of a prompt; none of one that cannot be read, which an engine answered all the same."""
    with suppress(HttpError):
        fields = read_fields(CHAT, prompt, routing.fingerprinter)
        return routing.fingerprinter.hash_sketch(fields.sketch).blocks
    return b""


def _with_model(prompt: bytes, model: str) -> bytes:
    fields: Mapping[str, Any] = json.loads(prompt)
    return json.dumps({"model": model, **fields}).encode()
