"""The training of the policy or shadow policy that learns, beside the event loop.

Owns the round trip: outcomes of the Router to the process, its model into the Router and onto the disk; the errors of
its predictions; and which of several model files counts first (`ModelStore`). Leaves the mathematics and the form of
files to `gorgo.learning`, and decisions to the policy.

Theory of operation. Every second the new outcomes go to the process, at most one message at a time. While a round
trains, outcomes wait in the Router's ring, which is bounded; a model is put in by one synchronous `Learning.adopt`. The
process can fail at any time: routing goes on with the model in use, and another process begins with the outcomes that
the ring still has. The ring is saved with the model, so that a restart goes on in the same way. A round whose model is
worse than the one in use leaves that one (`learning.trainer`). While weights are frozen nothing is sent, and no model
is adopted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.config.atomic import write_atomically
from gorgo.config.model import LearningConfig
from gorgo.config.router_settings import training_spec
from gorgo.core.backoff import backoff_s
from gorgo.core.numeric import Floats
from gorgo.core.router import Router
from gorgo.core.training.learning import Learner, Model, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import GorgoError, ModelFileError
from gorgo.learning.model_file import NATIVE_KINDS, dump_outcomes, dumps, load_outcomes, loads, read
from gorgo.live.event_loop import Clock
from gorgo.live.helper_process import HelperFailed, HelperProcess
from gorgo.live.helper_worker import pickled
from gorgo.live.logs import log
from gorgo.live.telemetry.counters import LearningMetrics, ModelGauges
from gorgo.live.training.messages import GivenModel, Outcomes, Reply, Settings
from gorgo.live.training_status import ModelInUse, TrainingState


def error_shares(model: Model, rows: TrainingRows) -> tuple[Floats, Floats]:
    """Return the absolute errors of time to first token and time per output token, as shares of the measured time.

    Rows without a measured time have none; nor has a model that does not predict it. An answer in one piece has no
    first token: its error is that of the time to its end (`answer_shares`).
    """
    ended = ~rows.censored & ~rows.unstreamed & (rows.ttft_s > 0.0)
    timed = rows.tpot_s > 0.0
    ttft_s = model.ttft_s(rows.features[ended]) if ended.any() else np.empty(0)
    tpot_s = model.tpot_s(rows.features[timed]) if timed.any() else None
    gaps = np.empty(0) if tpot_s is None else np.abs(tpot_s - rows.tpot_s[timed]) / rows.tpot_s[timed]
    return np.abs(ttft_s - rows.ttft_s[ended]) / rows.ttft_s[ended], gaps


def answer_shares(model: Model, rows: TrainingRows) -> Floats:
    """Return the absolute errors of answers in one piece, as shares of the time to their end."""
    whole = ~rows.censored & rows.unstreamed & (rows.ttft_s > 0.0)
    predicted_s = model.ttft_s(rows.features[whole]) if whole.any() else np.empty(0)
    return np.abs(predicted_s - rows.ttft_s[whole]) / rows.ttft_s[whole]


#: Between two messages to the process, and between two looks at a round in progress.
INTERVAL_S = 1.0
#: Outcomes in one message: half a megabyte.
MAX_ROWS = 2000
#: Outcomes per second that errors are measured by: a millisecond of a thread.
MAX_MEASURED = 200
#: Time for one round; the largest takes tens of seconds on a core of its own.
ROUND_TIMEOUT_S = 900.0
#: Time to start a process, load a model and predict once: seconds on a busy machine.
TRY_TIMEOUT_S = 60.0
WORKER = "gorgo.live.training.worker"
#: Added to the proxy's own: where processors are few, the event loop goes first.
NICENESS = 19
#: Delay of the next process after a failure; doubles from the first to the last.
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0


async def _try(given: GivenModel) -> None:
    """Load a model and predict in another process. Raises `ModelFileError` if that ends it, or it has no times."""
    process = HelperProcess(WORKER, niceness=0, timeout_s=TRY_TIMEOUT_S, again=False)
    try:
        problem = await process.answer(pickled(given))
    except HelperFailed as failure:
        problem = f"loading it and predicting once in another process: it {failure}"
    finally:
        await process.aclose()
    if problem is not None:
        raise ModelFileError(given.place, problem, "a model file that GORGO wrote")


class TrainingService:
    """The training of one proxy.

    Parameters
    ----------
    learning:
        Settings of the configuration; replaced by `configure`.
    seed:
        Of the training.
    """

    def __init__(
        self,
        router: Router,
        clock: Clock,
        metrics: LearningMetrics,
        learning: LearningConfig,
        store: ModelStore,
        *,
        seed: int,
    ) -> None:
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._learning = learning
        self._store = store
        self._seed = seed
        self._learner: Learner | None = None
        #: The learner's own settings, which those of the configuration replace in part.
        self._own_spec: TrainingSpec | None = None
        self._model_file: str | None = None
        self._in_use: ModelInUse | None = None
        self._process: HelperProcess | None = None
        #: Numbers of the first outcome that the process does not have, and of the first one that is not measured.
        self._next_seq = self._measured_seq = 0
        #: Processes that failed in a row.
        self._failures = 0
        self._retry_at_s = float("-inf")
        #: A failed write is logged once until one succeeds.
        self._unwritten = False
        #: The next outcome when the ring was last saved.
        self._saved_seq = 0
        self._state = TrainingState()
        #: Called with each model that was trained here and is used from now on.
        self.on_adopted: Callable[[bytes], None] = lambda _: None

    def configure(self, learning: LearningConfig) -> None:
        """Train by other settings from the next step on; another model file is read then."""
        self._learning = learning

    async def start(self) -> None:
        """Load the model before the first request."""
        await self._follow()

    async def run(self) -> None:
        """Train until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.step()

    async def step(self) -> None:
        """Follow changes of the policy and the configuration, then pass new outcomes to the process."""
        changed = self._router.learning.learner is not self._learner
        if changed or (self._learning.model_file != self._model_file and not self._router.settings.frozen):
            await self._follow()
        await self._measure()
        learner, ring = self._learner, self._router.learning.outcomes
        if learner is None or ring is None or not self._may_train(learner):
            await self._end("frozen" if learner is not None and self._router.settings.frozen else "off")
        elif self._clock() >= self._retry_at_s:
            if self._process is None or self._settled() != learner.training:
                await self._begin(learner)
            rows = ring.since(self._next_seq, MAX_ROWS)
            if len(rows):
                await self._pass_on(learner, rows)

    async def aclose(self, *, save: bool = True) -> None:
        """End the process, and save the outcomes since the last round."""
        await self._end("off")
        learner = self._learner
        if save and learner is not None and self._router.learning.learner is learner and self._learning.online:
            await self._save_outcomes(learner)

    async def take_model(self, data: bytes) -> None:
        """Use a model that another process of this router has trained. Raises `ModelFileError` for one of another kind.

        Frozen weights are those of all, so there is none while they are.
        """
        if self._router.learning.learner is not self._learner:
            await self._follow()
        learner = self._learner
        if learner is None:
            return
        model = await asyncio.to_thread(loads, data, "another worker", names=learner.feature_names)
        if self._router.learning.learner is learner:
            self._adopt(ModelInUse(model, self._clock(), None))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `GET /admin/model`."""
        learner, now = self._router.learning.learner, self._clock()
        in_use = self._in_use if learner is self._learner else None
        spec = None if learner is None else learner.training
        self._state.pid = None if self._process is None else self._process.pid
        return {
            "policy": None if learner is None else learner.name,
            "is_shadow": learner is not None and learner is self._router.settings.shadow,
            "model": None if in_use is None else in_use.as_dict(now),
            "training": self._state.as_dict(spec),
        }

    # -- steps

    def _may_train(self, learner: Learner) -> bool:
        return self._learning.online and not self._router.settings.frozen and self._router.learning.learner is learner

    def _settled(self) -> TrainingSpec:
        """Return the learner's training with the settings of the configuration."""
        assert self._own_spec is not None, "set with the learner"
        return training_spec(self._own_spec, self._learning)

    async def _follow(self) -> None:
        """Take over another learner or another model file, with the newest model that there is for it."""
        learner, configured = self._router.learning.learner, self._learning.model_file
        joins = learner is not self._learner
        if joins:
            await self._end("off")
            self._in_use = self._metrics.model = None
            self._own_spec = None if learner is None else learner.training
            self._measured_seq = 0
        self._learner, self._model_file = learner, configured
        if learner is None:
            return
        learner.training = self._settled()
        file = None if configured is None else Path(configured)
        stored = await self._stored(learner, file, own=joins)
        if stored is not None and self._router.learning.learner is learner:
            self._adopt(stored)
        if joins:
            await self._restore(learner)

    async def _stored(self, learner: Learner, configured: Path | None, *, own: bool) -> ModelInUse | None:
        """Return the newest model that `learner` can use; a file that cannot be used is logged."""
        names, kind = learner.feature_names, learner.training.kind
        for file in await asyncio.to_thread(self._store.files, learner.name, configured, own=own):
            try:
                data = await asyncio.to_thread(read, file.path)
                if kind in NATIVE_KINDS:
                    await _try(GivenModel(data, str(file.path), names))
                model = await asyncio.to_thread(loads, data, str(file.path), names=names, kinds=(kind,))
            except (GorgoError, OSError) as error:
                log(
                    "model_not_loaded",
                    level=logging.ERROR,
                    file=str(file.path),
                    policy=learner.name,
                    reason=str(error),
                )
                continue
            return ModelInUse(model, file.changed_s, file.path)
        return None

    async def _restore(self, learner: Learner) -> None:
        """Put the outcomes of a former process into the ring."""
        before = await asyncio.to_thread(self._store.load_outcomes, learner)
        ring = self._router.learning.outcomes
        if before is None or ring is None or self._router.learning.learner is not learner:
            return
        ring.restore(before)
        # They are no news of the model in use: it may have been trained on them.
        self._saved_seq = self._measured_seq = ring.next_seq
        log("outcomes_restored", policy=learner.name, outcomes=len(before))

    async def _save_outcomes(self, learner: Learner) -> None:
        """Write the ring, if something has come since; a failure is logged."""
        ring = self._router.learning.outcomes
        if ring is None or ring.next_seq == self._saved_seq:
            return
        rows, next_seq = ring.since(0), ring.next_seq
        try:
            await asyncio.to_thread(self._store.save_outcomes, learner.name, rows)
        except OSError as error:
            path = self._store.outcomes_path(learner.name)
            log("outcomes_not_written", level=logging.ERROR, file=str(path), reason=error.strerror or str(error))
            return
        self._saved_seq = next_seq

    async def _begin(self, learner: Learner) -> None:
        """Make a process for the settings in force; it starts with its first outcomes."""
        await self._end("waiting")
        ring = self._router.learning.outcomes
        assert ring is not None, "a learner has a ring"
        learner.training = self._settled()
        in_use = self._in_use
        incumbent = None if in_use is None else await asyncio.to_thread(dumps, in_use.model)
        self._process = HelperProcess(
            WORKER,
            niceness=NICENESS,
            timeout_s=ROUND_TIMEOUT_S,
            first=Settings(learner.training, self._seed, incumbent),
            again=False,  # the process has the buffers
        )
        self._next_seq = ring.first_seq

    async def _pass_on(self, learner: Learner, rows: TrainingRows) -> None:
        """Send outcomes and wait for the reply, unless the training must end before."""
        process, lost = self._process, rows.first_seq - self._next_seq
        assert process is not None, "begun before"
        self._next_seq = rows.first_seq + len(rows)
        self._state.count_taken(rows, lost)
        self._metrics.outcomes(len(rows), lost)
        self._state.state = "training"
        ring = self._router.learning.outcomes
        more = ring is not None and ring.next_seq > self._next_seq
        exchange = asyncio.create_task(process.answer(pickled(Outcomes(rows, more))))
        try:
            while not exchange.done() and self._may_train(learner):
                await asyncio.wait((exchange,), timeout=INTERVAL_S)
                await self._measure()
        finally:
            if not exchange.done():
                exchange.cancel()
                await asyncio.wait((exchange,))
        if exchange.cancelled():
            self._process = None
            return
        failure = exchange.exception()
        if failure is None:
            self._failures, self._state.state, self._state.failure = 0, "waiting", None
            await self._take(learner, exchange.result())
        else:  # whatever it is: routing goes on
            is_ended = isinstance(failure, HelperFailed)
            self._failed(f"the training process {failure}" if is_ended else str(failure) or type(failure).__name__)

    async def _take(self, learner: Learner, reply: Reply) -> None:
        """Adopt the model of a reply, if it has one, and write it; after each round write the outcomes."""
        if reply.is_round:
            await self._save_outcomes(learner)
        if reply.model is None:
            if reply.is_round:
                self._state.refused += 1
                self._metrics.round("refused", reply.seconds)
                log("model_refused", policy=learner.name, reason=reply.report.get("verdict"), seconds=reply.seconds)
            return
        try:
            model = await asyncio.to_thread(loads, reply.model, "the training process", names=learner.feature_names)
        except GorgoError as error:
            self._failed(str(error))
            return
        if not self._may_train(learner):
            self._metrics.round("discarded", reply.seconds)
            return
        self._adopt(ModelInUse(model, self._clock(), None, reply.report, reply.seconds))
        self._measured_seq = max(self._measured_seq, self._next_seq)
        self._metrics.round("adopted", reply.seconds)
        self.on_adopted(reply.model)
        await self._write(learner, reply.model)

    def _adopt(self, model_in_use: ModelInUse) -> None:
        """Put a model into the Router, in one step."""
        model, report = model_in_use.model, model_in_use.report
        self._router.learning.adopt(model)
        self._in_use = model_in_use
        self._metrics.model = ModelGauges(model.version, model.samples, model_in_use.trained_s)
        log(
            "model_adopted",
            kind=model.kind,
            version=model.version,
            samples=model.samples,
            file=None if model_in_use.file is None else str(model_in_use.file),
            error_ttft=report.get("ttft_mape"),
            error_tpot=report.get("tpot_mape"),
            seconds=model_in_use.seconds,
        )

    async def _write(self, learner: Learner, data: bytes) -> None:
        try:
            path = await asyncio.to_thread(self._store.save, learner.name, data)
        except OSError as error:
            self._metrics.model_written(False)
            if not self._unwritten:
                path = self._store.path(learner.name)
                log("model_not_written", level=logging.ERROR, file=str(path), reason=error.strerror or str(error))
            self._unwritten = True
            return
        if path is None:
            return
        self._metrics.model_written(True)
        if self._unwritten:
            self._unwritten = False
            log("model_written_again", file=str(path))
        if self._in_use is not None:
            self._in_use = replace(self._in_use, file=path)

    def _failed(self, reason: str) -> None:
        """Leave the process and wait before the next one."""
        self._process = None
        self._metrics.round("failed")
        self._state.state, self._state.failure = "failed", reason
        self._state.failures += 1
        self._failures += 1
        retry_s = backoff_s(self._failures, first_s=FIRST_RETRY_S, longest_s=LAST_RETRY_S)
        log("training_failed", level=logging.WARNING, reason=reason, retry_s=retry_s)
        self._retry_at_s = self._clock() + retry_s

    async def _end(self, state: str) -> None:
        self._state.state = state
        process, self._process = self._process, None
        if process is not None:
            await process.aclose()

    async def _measure(self) -> None:
        """Compare the model's predictions with new outcomes, which it was not trained on."""
        ring, in_use = self._router.learning.outcomes, self._in_use
        if ring is None or self._router.learning.learner is not self._learner:
            return
        rows = ring.since(max(self._measured_seq, ring.next_seq - MAX_MEASURED))
        self._measured_seq = ring.next_seq
        if in_use is not None and len(rows):
            ttft, tpot = await asyncio.to_thread(error_shares, in_use.model, rows)
            e2e = await asyncio.to_thread(answer_shares, in_use.model, rows)
            self._metrics.errors("ttft", ttft.tolist())
            self._metrics.errors("tpot", tpot.tolist())
            self._metrics.errors("e2e", e2e.tolist())


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model and the time of its last change, seconds since the epoch."""

    path: Path
    changed_s: float


class ModelStore:
    """The files of one proxy.

    Parameters
    ----------
    state_path:
        The state file; without one no model is written.
    """

    def __init__(self, state_path: Path | None) -> None:
        self._state_path = state_path

    def path(self, policy: str) -> Path | None:
        """Return the file of a policy's model beside the state file.

        >>> str(ModelStore(Path("/var/lib/gorgo/state.json")).path("lodestar"))
        '/var/lib/gorgo/state.json.lodestar.npz'
        """
        state = self._state_path
        return None if state is None else state.with_name(f"{state.name}.{policy}.npz")

    def outcomes_path(self, policy: str) -> Path | None:
        """Return the file of a policy's outcomes beside the state file.

        >>> str(ModelStore(Path("/var/lib/gorgo/state.json")).outcomes_path("lodestar"))
        '/var/lib/gorgo/state.json.lodestar.outcomes.npz'
        """
        state = self._state_path
        return None if state is None else state.with_name(f"{state.name}.{policy}.outcomes.npz")

    def files(self, policy: str, configured: Path | None, *, own: bool = True) -> list[StoredFile]:
        """Return the files that a policy's model may be in, newest first: its own, and the configured one.

        One that cannot be looked at is logged. With `own=False` it is the configured one alone.
        """
        paths = [path for path in (self.path(policy) if own else None, configured) if path is not None]
        times = {path: _changed_s(path, required=path is configured) for path in paths}
        stored = [StoredFile(path, changed_s) for path, changed_s in times.items() if changed_s is not None]
        return sorted(stored, key=lambda file: file.changed_s, reverse=True)

    def save(self, policy: str, data: bytes) -> Path | None:
        """Write the bytes of a model file durably; return the file, `None` without one. Raises `OSError`."""
        path = self.path(policy)
        if path is not None:
            write_atomically(path, data)
        return path

    def load_outcomes(self, learner: Learner) -> TrainingRows | None:
        """Return the outcomes that a former process left; `None` without a file that can be used, which is logged."""
        path = self.outcomes_path(learner.name)
        if path is None or not path.exists():
            return None
        try:
            return load_outcomes(path, names=learner.feature_names)
        except (GorgoError, OSError) as error:
            log("outcomes_not_loaded", level=logging.ERROR, file=str(path), policy=learner.name, reason=str(error))
            return None

    def save_outcomes(self, policy: str, rows: TrainingRows) -> None:
        """Write outcomes durably, if there is a state file. Raises `OSError`."""
        path = self.outcomes_path(policy)
        if path is not None:
            write_atomically(path, dump_outcomes(rows))


def _changed_s(path: Path, *, required: bool) -> float | None:
    """Return when the file was last changed; `None` without one, which is logged if it is `required`."""
    try:
        return path.stat().st_mtime
    except OSError as error:
        if required or not isinstance(error, FileNotFoundError):
            log("model_not_loaded", level=logging.ERROR, file=str(path), reason=error.strerror or str(error))
        return None
