"""Time of one routing decision of a learned policy with its model: `Router.submit`, 64 replicas, a 24k-token prompt.

Target: p99 under 2 ms, with one thread of BLAS as `gorgo serve` has it (`OPENBLAS_NUM_THREADS=1`). Each policy learns
from outcomes of its own cold start, so that models and guards are those of traffic. Its own time alone is measured;
ends of requests are not. `predicted-latency` has trees where LightGBM is installed, else a linear model.

The second table has `lodestar` at the rates at which Lodestar publishes an overhead of 3 ms, 4.5 ms at the tail: as
many replicas as it has, each request open for two seconds. The rates are those of the Router's own time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice

import numpy as np

from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.core.training.learning import Model
from gorgo.learning.trainer import fit
from tests.bench.router_submit import BODY_BYTES, PROMPT_TOKENS, filled_router, hashed_requests

POLICIES = ("gorgo-ms", "lodestar", "predicted-latency", "gorgo-residual")
REPLICAS = 64
#: More than the rows of the first model of any of them.
COLD, MEASURED, ROUNDS = 1500, 2000, 10
IN_FLIGHT = 32
#: Of the second table: replicas, requests a second, and how long each is open.
FEW_REPLICAS, RATES, OPEN_S = 16, (10, 20, 40, 80), 2.0
#: No guard spares a decision the model.
MODEL_DECIDES = {"epsilon": 0.0, "range_margin": 10.0}
COMPLETED = Outcome(AttemptResult.COMPLETED, 200, PROMPT_TOKENS, 0, 64)


def run() -> None:
    """Print p50 and p99 of the wall time and p99 of the processor's, us, all policies measured in turn."""
    print(f"Router.submit with a model, {REPLICAS} replicas, {PROMPT_TOKENS:,} tokens, us; {MEASURED:,} requests a row")
    print(f"{'policy':<18}  {'model':<9}  {'p50':>8}  {'p99':>8}  {'p99, of CPU':>11}  by a guard")
    rows = [Bench(policy) for policy in POLICIES]
    for row in rows:
        row.learn()
    for _ in range(ROUNDS):
        for row in rows:
            row.measure(MEASURED // ROUNDS)
    for row in rows:
        p50, p99 = np.percentile(row.spent_ns, [50, 99]) / 1e3
        processor = np.percentile(row.processor_ns, 99) / 1e3
        guarded = sum(count for guard, count in row.guards.items() if guard) / row.guards.total()
        kind = "-" if row.model is None else row.model.kind
        print(f"{row.policy:<18}  {kind:<9}  {p50:>8.1f}  {p99:>8.1f}  {processor:>11.1f}  {guarded:.0%}")
    print(f"\nlodestar, {FEW_REPLICAS} replicas, us of the processor\n{'requests/s':<10}  {'mean':>8}  {'p99':>8}")
    for rate in RATES:
        row = Bench("lodestar", replicas=FEW_REPLICAS, rate_per_s=rate, in_flight=round(OPEN_S * rate))
        row.learn()
        row.measure(MEASURED)
        mean_us, p99_us = np.mean(row.processor_ns) / 1e3, np.percentile(row.processor_ns, 99) / 1e3
        print(f"{rate:<10}  {mean_us:>8.1f}  {p99_us:>8.1f}")


class Bench:
    """A Router with requests in flight, in a time of its own."""

    def __init__(
        self, policy: str, *, replicas: int = REPLICAS, rate_per_s: float = 50.0, in_flight: int = IN_FLIGHT
    ) -> None:
        self.policy = policy
        self.router: Router = filled_router(policy, replicas, 0)
        self._replicas, self._interval_s, self._in_flight = replicas, 1.0 / rate_per_s, in_flight
        self.model: Model | None = None
        self.spent_ns: list[int] = []
        #: Of this thread: without the time that a busy machine gives to others.
        self.processor_ns: list[int] = []
        self.guards: Counter[str | None] = Counter()
        self._rng = np.random.default_rng(7)
        self._now = 0.0
        self._open: deque[str] = deque()
        self._requests = self._endless()

    def learn(self) -> None:
        """Serve requests from a cold start, and adopt the model of their outcomes; measure nothing."""
        self.measure(COLD)
        learner, outcomes = self.router.learning.learner, self.router.learning.outcomes
        if learner is not None and outcomes is not None:
            self.model = fit(outcomes.since(0), learner.training, seed=0, version=1)
            self.router.learning.adopt(self.model)
            settings = {name: value for name, value in MODEL_DECIDES.items() if name in self.router.settings.weights}
            self.router.settings.set_weights(
                Weights.of(self.router.settings.policy.weight_specs, settings), now=self._now
            )
        for measured in (self.spent_ns, self.processor_ns, self.guards):
            measured.clear()

    def measure(self, count: int) -> None:
        """Submit the next requests; the first tenth of them is warm-up."""
        for number, request in enumerate(islice(self._requests, count)):
            self._now += self._interval_s
            start, processor_start = time.perf_counter_ns(), time.thread_time_ns()
            action, _ = self.router.submit(request, now=self._now)
            processor_ns, spent_ns = time.thread_time_ns() - processor_start, time.perf_counter_ns() - start
            assert isinstance(action, Dispatch)
            if number >= count // 10:
                self.spent_ns.append(spent_ns)
                self.processor_ns.append(processor_ns)
                self.guards[action.decision.fallback] += 1
            self._open.append(action.attempt_id)
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Keep so many in flight, half of them before their first token; engines report at times."""
        if len(self._open) > self._in_flight // 2:
            self.router.on_first_token(self._open[-self._in_flight // 2], now=self._now)
        if len(self._open) > self._in_flight:
            self.router.on_finish(self._open.popleft(), COMPLETED, now=self._now)
        if self._rng.random() < 0.1:
            running, queued = self._rng.integers(0, 9, 2)
            sample = EngineSample(float(running), float(queued), 1e4 * running, 1e5, 64.0)
            self.router.replicas.on_engine_sample(
                f"replica-{self._rng.integers(self._replicas)}", sample, now=self._now
            )

    def _endless(self) -> Iterator[RouteRequest]:
        round_number = 0
        while True:
            for make in hashed_requests():
                request = make()
                yield RouteRequest(
                    f"{round_number}-{request.request_id}",
                    self._now,
                    PROMPT_TOKENS,
                    request.blocks,
                    request.block_tokens,
                    request.prefix_hash,
                    body_bytes=BODY_BYTES,
                )
            round_number += 1
