"""A Router with a policy that learns, and the service that trains it with a real process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from gorgo.config.model import LearningConfig
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.policy.interface import Policy
from gorgo.core.router import Router
from gorgo.core.training.learning import TrainingSpec
from gorgo.live.telemetry.counters import LearningMetrics, MetricStore
from gorgo.live.telemetry.metric_table import METRICS
from gorgo.live.training import service as service_module
from gorgo.live.training.service import ModelStore, TrainingService
from tests.core.learners import NAMES, LeastPredicted
from tests.core.routers import a_request, specs

#: A model after 20 outcomes, the next after 10 more.
SMALL = TrainingSpec("linear", NAMES, first_samples=20, round_samples=10, fifo=200, replay=0)
#: A round that takes minutes.
LONG = replace(SMALL, kind="mlp", epochs=5000, fifo=1000, round_samples=200, first_samples=200)
ANSWERED = Outcome(AttemptResult.COMPLETED, 200, output_tokens=11)


class Bench:
    """One router and its training; `run` gives it requests that took 1 ms per token."""

    def __init__(
        self,
        folder: Path,
        spec: TrainingSpec = SMALL,
        *,
        learning: LearningConfig | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.router = Router(
            specs("a", "b"), policy or LeastPredicted(spec), rng=np.random.default_rng(0), boot_id="boot"
        )
        self.store = ModelStore(folder / "state.json")
        cells = MetricStore(METRICS)
        self.metrics = LearningMetrics(cells)
        self.registry = CollectorRegistry()
        self.registry.register(cells)
        self.service = TrainingService(
            self.router, time.time, self.metrics, learning or LearningConfig(), self.store, seed=1
        )
        self.sent = 0

    @property
    def file(self) -> Path:
        """The model file of the policy."""
        path = self.store.path(self.router.settings.policy.name)
        assert path is not None
        return path

    def version(self) -> int | None:
        """Version of the model that the Router uses."""
        return self.router.learning.model_version

    def run(self, requests: int, *, streamed: bool = True) -> None:
        """Serve so many requests, one after the other; an answer in one piece ends when a stream would begin."""
        for _ in range(requests):
            self.sent += 1
            now, tokens = float(self.sent), 100 + 37 * (self.sent % 40)
            request = a_request(f"r{self.sent}", prompt_tokens=tokens, received_s=now, streamed=streamed)
            dispatch, _ = self.router.submit(request, now=now)
            assert isinstance(dispatch, Dispatch)
            if streamed:
                self.router.on_first_token(dispatch.attempt_id, now=now + tokens / 1e3)
            self.router.on_finish(dispatch.attempt_id, ANSWERED, now=now + (10.0 if streamed else tokens / 1e3))

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def pid(self) -> int:
        pid = self.service.as_dict()["training"]["pid"]
        assert isinstance(pid, int)
        return pid

    async def training(self) -> asyncio.Task[None]:
        """A step in whose round the process has computed for longer than a start takes."""
        step = asyncio.create_task(self.service.step())
        await eventually(lambda: self.service.as_dict()["training"]["pid"] is not None)
        await eventually(lambda: cpu_s(self.pid) > 1.0)
        return step


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def eventually(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait for something that another task or process does."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a round in progress often, start another process at once after a failure, all at one priority.

    Below other tests on the same processors, a start alone took 40 s.
    """
    monkeypatch.setattr(service_module, "NICENESS", 0)
    monkeypatch.setattr(service_module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(service_module, "FIRST_RETRY_S", 0.0)
