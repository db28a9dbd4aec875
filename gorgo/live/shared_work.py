"""What is done once for all workers of a router, and how it reaches each of them.

Owns what passes between the leader and the others (`SharedWork`): what the leader has learned of replicas and caches,
the configuration that it has read, the models that it trains, and what the others leave for it: samples for tuners,
outcomes for the training, and lines of logs. Leaves the
connection to `workers.link`, and changes by operators to `admin.workers`.

Theory of operation. The others pass on what has ended since they last did, ten times a second. What a worker had not
passed on when it is killed is lost with it, as with a router of one process. A worker that becomes the leader begins
its own stream of samples, under its own boot id: a tuner sees a restart.

A worker that joins late knows nothing of what events said before. So a feed is not complete for it until the leader
has lost it, or begun anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.core.messages.request import Sample
from gorgo.core.training.outcomes import TrainingRows
from gorgo.live.admin.page.snapshot import Loads, own_loads
from gorgo.live.admin.workers import APPLIED_S, WorkersApp, restart_differing
from gorgo.live.control.state_file import encode_state
from gorgo.live.logs import Line, LineLog, WrittenLine
from gorgo.live.monitor.fleet_monitor import FleetMonitor
from gorgo.live.reload.reloader import Reloader
from gorgo.live.state import LiveState
from gorgo.live.telemetry.metrics import Family, families_of
from gorgo.live.workers.link import WorkerLink

#: Between two passes of what has ended, s.
INTERVAL_S = 0.1
#: Samples in one pass: what a worker ends in a second; more are those of a worker that has just lost its leader.
MAX_SAMPLES = 5000


class SharedWork:
    """One worker's part of the work.

    Parameters
    ----------
    state, link, app, reloader, monitors:
        Of the process.
    text:
        Of the configuration at the start.
    """

    def __init__(
        self,
        state: LiveState,
        link: WorkerLink,
        app: WorkersApp,
        reloader: Reloader,
        monitors: FleetMonitor,
        *,
        text: bytes,
    ) -> None:
        self._state = state
        self._link = link
        self._app = app
        self._reloader = reloader
        self._text = text
        self._passed_seq = self._passed_outcomes = 0
        self._models: list[asyncio.Task[None]] = []
        #: Replicas with a feed that this worker has from its beginning.
        self._whole_feeds: set[str] = set()
        self._monitors = monitors
        link.on_event("replica", monitors.take_learned)
        link.on_event("kv_events", self._take_kv_events)
        link.on_event("kv_lost", self._lose_kv_events)
        link.on_event("samples", self._take_samples)
        link.on_event("lines", self._take_lines)
        link.on_event("outcomes", self._take_outcomes)
        link.on_question("model", state.routing.training.take_model)
        state.routing.training.on_adopted = self._publish_model
        state.routing.training.trains = link.leads
        link.on_question("join", self._join)
        link.on_question("config", self._take_config)
        link.on_question("metrics", self._metrics)
        link.on_question("loads", self._loads)
        link.on_question("learned", monitors.learned)
        reloader.on_applied = self._publish_config

    async def run(self) -> None:
        """Pass on to the leader what has ended here, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.pass_on()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs as long as the worker does."""
        peers = self._state.routing.local_peers
        if peers is None:
            return [self.run()]
        peers.probe = self._probe
        return [self.run(), peers.run()]

    def _probe(self, replica: str) -> None:
        """Probe a replica that another worker has ejected; the leader does for all."""
        if self._link.leads:
            self._monitors.probe(replica)

    def pass_on(self) -> None:
        """Pass on what has ended since the last call; a leader notes alone that it has it."""
        ring = self._state.routing.router.samples
        ended = ring.last_seq - self._passed_seq
        self._passed_seq = ring.last_seq
        if ended and not self._link.leads:
            samples = ring.newest(min(ended, MAX_SAMPLES))[::-1]
            self._link.publish("samples", samples, to=self._link.leader)
        outcomes = self._state.routing.router.learning.outcomes
        if outcomes is None:
            return
        self._passed_outcomes = min(self._passed_outcomes, outcomes.next_seq)  # a new policy has a new ring
        if not self._link.leads and outcomes.next_seq > self._passed_outcomes:
            self._link.publish("outcomes", outcomes.since(self._passed_outcomes), to=self._link.leader)
        self._passed_outcomes = outcomes.next_seq

    # -- at every worker

    async def _metrics(self) -> list[Family]:
        return families_of(self._state.telemetry.metrics.registry)

    async def _loads(self) -> Loads:
        return own_loads(self._state)

    # -- at the leader

    async def _join(self, worker: int) -> tuple[bytes, bytes]:
        """Return the configuration and the state in force, between two changes: the worker executes the next one."""
        async with self._app.turn, self._reloader.turn:
            self._link.joined.add(worker)
            return self._text, encode_state(self._state.routing.control.in_force())

    async def _publish_config(self, text: bytes) -> None:
        """Let the others apply what was read of the file."""
        self._text = text
        link = self._link
        if link.leads:
            answers = await link.question_all("config", text, limit_s=APPLIED_S, workers=link.others)
            restart_differing(link, {worker: 200 if done else 500 for worker, done in answers.items()}, 200)

    def _take_samples(self, samples: Sequence[Sample]) -> None:
        if not self._link.leads:  # it led when they were sent
            self._link.publish("samples", samples, to=self._link.leader)
            return
        ring = self._state.routing.router.samples
        for sample in samples:
            ring.append(replace(cast(Any, sample), seq=ring.next_seq))
        self._passed_seq = ring.last_seq

    def _take_outcomes(self, rows: TrainingRows) -> None:
        """Train with the outcomes of another worker too. Workers have one fleet, so a slot is the same replica."""
        outcomes = self._state.routing.router.learning.outcomes
        if outcomes is not None and self._link.leads:
            outcomes.extend(rows)
            self._passed_outcomes = outcomes.next_seq

    def _publish_model(self, data: bytes) -> None:
        self._models = [each for each in self._models if not each.done()]
        self._models.append(asyncio.create_task(self._send_model(data)))

    async def _send_model(self, data: bytes) -> None:
        """Let the others use a model that was trained here; one that cannot goes on with the model before."""
        await self._link.question_all("model", data)

    def _take_lines(self, log: str, texts: Iterable[str]) -> None:
        line_log: LineLog | None = getattr(self._state.telemetry, log)
        for text in texts if line_log is not None else ():
            assert line_log is not None
            line_log.add(WrittenLine(text))

    # -- at the others

    async def _take_config(self, text: bytes) -> bool:
        """Apply what the leader has read of the file; return whether it could be applied."""
        async with self._app.turn:
            return await self._reloader.apply_text(text)

    def _take_kv_events(
        self, replica: str, batch: KvEventBatch, model: str | None, block_tokens: int, complete: bool
    ) -> None:
        routing = self._state.routing
        routing.gateway.apply(
            routing.router.caches.on_kv_events(
                replica,
                batch,
                model=model,
                block_tokens=block_tokens,
                complete=complete and replica in self._whole_feeds,
                now=routing.clock(),
            )
        )

    def _lose_kv_events(self, replica: str) -> None:
        self._whole_feeds.add(replica)
        routing = self._state.routing
        routing.gateway.apply(routing.router.caches.on_kv_lost(replica, now=routing.clock()))


class LinesForLeader:
    """The file of a log that the leader writes.

    Parameters
    ----------
    name:
        Of the log, as `Telemetry` has it.
    """

    def __init__(self, path: Path, name: str, link: WorkerLink) -> None:
        self.path = path
        self._name = name
        self._link = link
        self._loop = asyncio.get_running_loop()

    def write(self, lines: Iterable[Line]) -> None:
        """Pass the lines on; called in a thread."""
        texts = [line.as_line() for line in lines]
        self._loop.call_soon_threadsafe(self._publish, texts)

    def close(self) -> None:
        """Do nothing: the leader closes the file."""

    def _publish(self, texts: list[str]) -> None:
        self._link.publish("lines", self._name, texts, to=self._link.leader)


def count_nothing(*_: Any) -> None:
    """Count no lines: the leader counts them as it writes them."""
