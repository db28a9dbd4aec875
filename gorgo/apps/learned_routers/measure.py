"""One run of a variant, and its figures.

The first requests are not measured, for any policy: caches are cold, and what learns has no model yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from time import thread_time

import numpy as np

import gorgo
from gorgo.apps.claims.run_cache import run_key
from gorgo.apps.learned_routers.model_errors import FittedRound, ModelErrors, RunTraining
from gorgo.apps.learned_routers.slices import TimeSlice, slices_of
from gorgo.apps.learned_routers.traffic import Traffic, feed_of_traffic
from gorgo.apps.learned_routers.variants import Variant, find_variant
from gorgo.apps.rank import spearman
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate import SimJob
from gorgo.apps.simulate.collector import rare_collections
from gorgo.apps.simulate.rows import simulated_run
from gorgo.config.constants import STALE_INTERVALS
from gorgo.core.messages.decision import Decision
from gorgo.core.training.model import Model
from gorgo.sim.kv_events.reports import CacheReports
from gorgo.sim.named_fleets import find_fleet
from gorgo.sim.records import SimRecord, SimResult
from gorgo.sim.simulation import Simulation
from gorgo.sim.workload import SimRequest

#: Share of the requests that are not measured.
WARM_UP = 0.3
PROBE_S = 10.0
_GORGO = Path(gorgo.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTask:
    """One variant on one fleet and traffic.

    Parameters
    ----------
    variant:
        A label of `variants`.
    fleet:
        By name.
    scrape_interval_s:
        Lodestar's is 0.1 s.
    warm_up:
        Share of the requests that are not measured.
    cache_reports:
        What engines report of their caches.
    """

    variant: str
    fleet: str
    traffic: Traffic
    seed: int = 0
    scrape_interval_s: float = 0.1
    warm_up: float = WARM_UP
    cache_reports: CacheReports = "usage"

    def key(self) -> str:
        """Return the key of the run."""
        variant, folder = find_variant(self.variant), Path(__file__).parent
        code = [
            *(folder / f"{name}.py" for name in ("measure", "model_errors", "slices", "traffic")),
            *(_GORGO / name for name in ("learning", "policies/learned")),
        ]
        return run_key(variant.policy, self.traces, [self, variant], code=code)

    @property
    def traces(self) -> list[str]:
        return [stream for phase in self.traffic.phases for stream in phase.streams if isinstance(stream, str)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRun:
    """Figures of a run.

    `row` is of the measured requests; `replica_ttft_ms` their mean TTFT by replica, `fallbacks` their decisions by the
    guard or rule that decided ("" is the policy's own). `slices` are of all requests. `adopted_s` says when each model
    was adopted, `fitted` what each round came to. `model_errors` are of the measured requests. `rho` is Spearman's of
    the shadow policy's rank of the chosen replica and the measured TTFT.
    """

    row: ResultRow
    replica_ttft_ms: Mapping[str, float]
    fallbacks: Mapping[str, int]
    slices: Sequence[TimeSlice]
    adopted_s: Sequence[float]
    rho: float | None
    cpu_s: float
    fitted: Sequence[FittedRound] = ()
    model_errors: ModelErrors = field(default_factory=ModelErrors)


def measure(task: RouterTask) -> RouterRun:
    """Run the task in this process."""
    begun_s = thread_time()
    with rare_collections():
        result, decisions, training = _simulated(task, find_variant(task.variant))
        predicted = training.forecasts()
    measured = result.records[int(len(result.records) * task.warm_up) :]
    begins_s = measured[0].scheduled_s if measured else inf
    names = {record.id for record in measured}
    return RouterRun(
        row=_row(task, replace(result, records=measured)),
        replica_ttft_ms=_by_replica(measured),
        fallbacks=dict(Counter(one.fallback or "" for one in decisions if one.request_id in names)),
        slices=slices_of(result.records, {one.request_id: one for one in decisions}, predicted),
        adopted_s=training.adopted_s,
        rho=_rho(measured),
        cpu_s=thread_time() - begun_s,
        fitted=training.fitted,
        model_errors=predicted.between(begins_s, inf).errors(),
    )


def _simulated(task: RouterTask, variant: Variant) -> tuple[SimResult, list[Decision], RunTraining]:
    feed = feed_of_traffic(task.traffic, task.seed)
    training = _training(task, variant, feed)
    simulation = _simulation(task, variant, training)
    result = simulation.run(feed)
    return result, simulation.router.view.newest_decisions(2 * task.traffic.requests), training


def _training(task: RouterTask, variant: Variant, feed: Sequence[SimRequest]) -> RunTraining:
    """Return what trains the policy, if it learns."""
    until_s = inf if variant.trains_until is None else feed[int(len(feed) * variant.trains_until)].arrival_s
    model = None if variant.trained_on is None else _trained(task, variant.trained_on)
    return RunTraining(seed=task.seed, model=model, until_s=until_s if model is None else 0.0)


def _trained(task: RouterTask, fleet: str) -> Model:
    """Return the last model of a run on another fleet with the first phase of the traffic."""
    traffic = replace(task.traffic, phases=task.traffic.phases[:1])
    variant = Variant(policy=find_variant(task.variant).policy)
    training = _training(replace(task, traffic=traffic), variant, feed := feed_of_traffic(traffic, task.seed))
    _simulation(replace(task, fleet=fleet, traffic=traffic), variant, training).run(feed)
    return training.controller.rounds[-1].model


def _simulation(task: RouterTask, variant: Variant, training: RunTraining) -> Simulation:
    traffic, policy = task.traffic, variant.make()
    stale_after_s = STALE_INTERVALS * max(PROBE_S, task.scrape_interval_s)
    return Simulation(
        find_fleet(task.fleet),
        policy,
        seed=task.seed,
        weights=variant.weights_of(policy),
        limits=variant.limits(
            block_tokens=traffic.block_tokens, stale_after_s=stale_after_s, requests=traffic.requests
        ),
        block_tokens=traffic.block_tokens,
        probe_interval_s=PROBE_S,
        scrape_interval_s=task.scrape_interval_s,
        shadow=variant.make_shadow(),
        cache_reports=task.cache_reports,
        controllers=[training.controller],
    )


def _row(task: RouterTask, result: SimResult) -> ResultRow:
    job = SimJob(trace=task.traffic.label, policy=task.variant, fleet=find_fleet(task.fleet), seed=task.seed)
    return simulated_run(job, {}, result).row


def _rho(records: Sequence[SimRecord]) -> float | None:
    """Return the rank correlation; None without a shadow policy."""
    ranked = [
        (record.shadow.rank, record.ttft_ms)
        for record in records
        if record.shadow is not None and record.shadow.rank is not None and record.ttft_ms is not None
    ]
    ranks, ttft_ms = np.array(ranked, dtype=float).reshape(-1, 2).T
    return spearman(ranks, ttft_ms)


def _by_replica(records: Sequence[SimRecord]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for record in records:
        if record.replica is not None and record.ttft_ms is not None:
            found.setdefault(record.replica, []).append(record.ttft_ms)
    return {name: float(np.mean(times)) for name, times in sorted(found.items())}
