"""One simulated run beside a published one: the paper's set-up on a profile, and the figures of table 2.

The set-up is the authors': one replica in each of three regions, prompts up to 24,000 tokens, policies as released,
requests dispatched at once, at most 64 of them open. Every answer has 128 tokens: in all rows of table 2 but one the
typical E2E less TTFT is 132 to 145 times the typical time per token, so answers end at the cap of 128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gorgo.apps.claims.run_cache import run_key
from gorgo.apps.fleet_fit.published import RunStats
from gorgo.apps.simulate import SimJob, run_once
from gorgo.apps.traces import TraceFilters
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.sim.engine.profiles import EngineProfile
from gorgo.sim.faults.scenarios import with_accurate_priors
from gorgo.sim.fleet import SimFleet, SimReplica
from gorgo.sim.named_fleets import THREE_REGIONS
from gorgo.sim.network.links import Link
from gorgo.sim.records import SimRecord

#: Most requests that the authors' load client has open over all replicas; the time that others wait is not measured.
CLIENT_CONCURRENCY = 64
#: Longest prompt, and the length of every answer, tokens.
MAX_INPUT, OUTPUT = 24_000, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTask:
    """One policy on one window.

    Parameters
    ----------
    trace, time_scale, seed:
        As in `SimJob`.
    policy, weights:
        By name; no weights are the policy's own.
    profile:
        Of every replica.
    warm_up:
        The first so many requests fill the caches and are not measured.
    measured:
        So many requests are; None: all others.
    output:
        Tokens of every answer; None: those of the trace.
    """

    trace: str
    time_scale: float
    policy: str
    weights: tuple[tuple[str, float], ...] = ()
    profile: EngineProfile
    seed: int = 0
    warm_up: int = 0
    measured: int | None = None
    output: int | None = OUTPUT

    def key(self) -> str:
        """Return the key of the run: of the task, its shape and the code."""
        return run_key(self.policy, [self.trace], [self], code=[Path(__file__)])

    def job(self) -> SimJob:
        """Return the job of the run."""
        return SimJob(
            trace=self.trace,
            policy=self.policy,
            weights=dict(self.weights) or None,
            fleet=three_regions(self.profile),
            filters=TraceFilters(
                max_input=MAX_INPUT,
                max_output=OUTPUT,
                min_output=self.output or 1,
                limit=None if self.measured is None else self.warm_up + self.measured,
            ),
            time_scale=self.time_scale,
            seed=self.seed,
            client_concurrency=CLIENT_CONCURRENCY,
            keep_requests=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRun:
    """Figures of a run, its requests that failed, the share of prompt tokens found cached, and shares of replicas."""

    stats: RunStats
    errors: int
    cache_hit: float
    share: Mapping[str, float]
    cpu_s: float


def three_regions(profile: EngineProfile) -> SimFleet:
    """Return the paper's fleet: a replica of that profile in each region."""
    replicas = [
        SimReplica(ReplicaSpec(f"{region}-0", region), profile, Link(rtt_s=rtt_ms / 1e3))
        for region, rtt_ms in THREE_REGIONS.items()
    ]
    return with_accurate_priors(SimFleet(tuple(replicas)))


def measure(task: FitTask) -> FitRun:
    """Run the task in this process."""
    run = run_once(task.job())
    assert run.requests is not None, "the job asked for them"
    records = run.requests[task.warm_up :]
    served = [record for record in records if record.error is None]
    prompts = sum(record.input_tokens for record in served)
    names = [record.replica for record in served if record.replica is not None]
    return FitRun(
        stats=stats_of(served),
        errors=len(records) - len(served),
        cache_hit=sum(record.cached_tokens or 0 for record in served) / prompts,
        share={name: names.count(name) / len(names) for name in sorted(set(names))},
        cpu_s=run.cpu_s or 0.0,
    )


def stats_of(records: Sequence[SimRecord]) -> RunStats:
    """Return the seven figures of requests that succeeded; at least one has two output tokens."""
    ttft_ms = np.array([record.ttft_ms for record in records], dtype=float)
    e2e_s = np.array([record.e2e_s for record in records], dtype=float)
    gaps = np.array([(record.output_tokens or 1) - 1 for record in records], dtype=float)
    tpot_ms = (e2e_s * 1e3 - ttft_ms)[gaps > 0] / gaps[gaps > 0]
    shares = (0.5, 0.95, 0.99)
    stats = [*np.quantile(ttft_ms, shares), *np.quantile(e2e_s, shares), np.median(tpot_ms)]
    return RunStats(*map(float, stats))


def with_values(profile: EngineProfile, values: Mapping[str, float]) -> EngineProfile:
    """Return the profile with these fields."""
    return replace(profile, **values)  # type: ignore[arg-type]
