"""One simulated run of a variant on a fleet and traffic, and its figures.

The first requests are not measured, for any policy: caches are cold, and what learns has no model yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from time import thread_time
from typing import ClassVar, cast

import numpy as np

import gorgo.learning
import gorgo.policies.learned
from experiments import fleets, rules, traffic, variants
from experiments.fleets import ExperimentFleet
from experiments.rules import AuditedDecision, AuditedPolicy
from experiments.runner import run_key
from experiments.traffic import Traffic, feed_of_traffic
from experiments.variants import SOURCES, Variant
from gorgo.config.values import STALE_INTERVALS
from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.decision import Decision
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Policy
from gorgo.core.prefix.index import Origin
from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.lab.rank import spearman
from gorgo.lab.results import TTFT_MS, ResultRow
from gorgo.lab.sim.kv_events import CacheReports
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.routers import ONE_ROUTER, RouterGroup
from gorgo.lab.sim.simulation import Simulation, Startable
from gorgo.lab.sim.training import TrainingController, TrainingRound
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob
from gorgo.lab.simulate.overload import with_queue
from gorgo.lab.simulate.run import rare_collections, simulated_run
from gorgo.learning.trainer import Trainer
from gorgo.policies.multi_depth import MultiDepth

#: The default of `overload.hedge_budget_ratio`.
HEDGE_BUDGET = 0.03
#: More than any run here has open: a run at saturation drops nothing.
MAX_IN_FLIGHT = 100_000
#: Slices of a run, and the length of one of an audited run, s.
SLICES, AUDITED_SLICE_S = 24, 5.0
#: Slices around the time at which a router is replaced, s.
REPLACED_SLICES: Sequence[tuple[float, float]] = ((-60.0, 0.0), (0.0, 30.0), (30.0, 60.0), (60.0, 120.0))
#: Bytes of a message, a hash and a token. Of events in msgpack: a token takes 3 or 5 bytes by its id, 4 on average. Of
#: pushes in JSON.
_EVENT_BYTES, _PUSH_BYTES = (60, 9, 4), (120, 21, 0)
_CODE = (
    *(Path(module.__file__ or "") for module in (fleets, rules, traffic, variants)), Path(__file__),
    Path(gorgo.learning.__file__ or "").parent, Path(gorgo.policies.learned.__file__ or "").parent,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """Figures of a run."""

    row: ResultRow  #: Of the measured requests.
    cpu_s: float
    values: Mapping[str, float | None] = field(default_factory=dict)  #: Further figures by name.
    lists: Mapping[str, Sequence[float]] = field(default_factory=dict)  #: Several of one kind by name.
    slices: Sequence[Mapping[str, float | None]] = ()  #: Figures over time, each with `begins_s`: of all requests.
    #: Measured decisions by the guard or rule that decided ("" is the policy's own).
    fallbacks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimTask:
    """One variant on one fleet and traffic."""

    variant: Variant
    fleet: ExperimentFleet
    traffic: Traffic
    seed: int = 0
    warm_up: float = 0.0  #: Share of the requests that are not measured.
    probe_s: float = 30.0
    scrape_s: float = 30.0
    cache_reports: CacheReports = "usage"  #: Of engines, where the variant has no source of its own.
    faults: tuple[Startable, ...] = ()
    audited: bool = False  #: Every decision is compared with the engines' caches; figures over time are of that.
    routers: RouterGroup = ONE_ROUTER
    #: Share of the requests after which the first router is killed and replaced; None: it is not.
    replaced_after: float | None = None
    around_replacement: bool = False  #: Whether there are figures around that time, or around the middle.
    queueing: bool = False  #: Whether routers queue and shed, with the deadlines of goodput.
    kind: ClassVar[type[TaskRun]] = TaskRun

    def key(self) -> str:
        return run_key(self.variant.policy, self.traffic.traces, [self], code=_CODE)

    def scaled(self, factor: float) -> SimTask:
        return replace(self, traffic=cast(Traffic, self.traffic.scaled(factor)))

    def limits(self) -> RouterLimits:
        """Return the Router's bounds; every decision of the run is retained."""
        overload = OverloadLimits(queue_enabled=self.variant.queueing, queue_max_requests=MAX_IN_FLIGHT)
        limits = RouterLimits(
            max_routes=self.variant.max_routes or RouterLimits().max_routes,
            block_tokens=float(self.traffic.block_tokens), max_in_flight=MAX_IN_FLIGHT, max_samples=0,
            max_decisions=2 * self.traffic.requests, stale_after_s=STALE_INTERVALS * max(self.probe_s, self.scrape_s),
            overload=overload, hedging=HedgeLimits(budget_ratio=HEDGE_BUDGET if self.variant.queueing else 0.0),
        )  # fmt: skip
        return with_queue(replace(limits, overload=OverloadLimits())) if self.queueing else limits

    def run(self) -> TaskRun:
        begun_s = thread_time()
        with rare_collections():
            run = _run(self)
        return replace(run, cpu_s=thread_time() - begun_s)


def _run(task: SimTask) -> TaskRun:
    feed = feed_of_traffic(task.traffic, task.seed)
    training = _training(task, feed)
    policy = task.variant.make()
    audited = AuditedPolicy(policy) if task.audited else None
    simulation = _simulation(task, policy if audited is None else cast(Policy, audited), training)
    replaced_s = _replace_router(task, simulation, feed)
    result = simulation.run(feed)
    decisions = simulation.router.view.newest_decisions(2 * task.traffic.requests)
    predicted = training.forecasts()
    measured = result.records[int(len(result.records) * task.warm_up) :]
    names = {record.id for record in measured}
    job = SimJob(trace=task.traffic.label, policy=task.variant.policy, fleet=task.fleet.sim_fleet(), seed=task.seed)
    simulated = simulated_run(job, {}, replace(result, records=measured))
    phantom, missed, _ = cached_errors(measured)
    values = {
        "rho": _rho(measured), "phantom": phantom, "missed": missed, "lasted_s": simulation.kernel.now,
        "good": None if simulated.goodput is None else simulated.goodput.good,
    }  # fmt: skip
    around = {} if replaced_s is None else dict(_around(result.records, replaced_s))
    if audited is None:
        slices = _slices(result.records, {one.request_id: one for one in decisions}, predicted)
    else:
        slices = _audited_slices(result.records, audited.decisions)
    begins_s = measured[0].scheduled_s if measured else inf
    return TaskRun(
        row=simulated.row,
        cpu_s=0.0,
        values={**values, **predicted.between(begins_s, inf).errors(), **_sent(task, simulation, len(feed))},
        lists={"adopted_s": training.adopted_s, **_delays(simulation), **around},
        slices=slices,
        fallbacks=dict(Counter(one.fallback or "" for one in decisions if one.request_id in names)),
    )


def _simulation(task: SimTask, policy: Policy, training: RunTraining) -> Simulation:
    source, block_tokens = task.variant.source, task.traffic.block_tokens
    return Simulation(
        task.fleet.sim_fleet(), policy, seed=task.seed, weights=task.variant.weights_of(policy), faults=task.faults,
        limits=task.limits(), block_tokens=block_tokens, probe_interval_s=task.probe_s, scrape_interval_s=task.scrape_s,
        shadow=task.variant.make_shadow(), controllers=[training.controller], routers=task.routers,
        cache_reports=task.cache_reports if source is None else SOURCES[source][1],
        slo_ttft_s=TTFT_MS / 1e3 if task.queueing else None,
    )  # fmt: skip


def _training(task: SimTask, feed: Sequence[SimRequest]) -> RunTraining:
    variant = task.variant
    until_s = inf if variant.trains_until is None else feed[int(len(feed) * variant.trains_until)].arrival_s
    model = None if variant.trained_on is None else _trained(task, variant.trained_on)
    return RunTraining(seed=task.seed, model=model, until_s=until_s if model is None else 0.0)


def _trained(task: SimTask, fleet: str) -> Model:
    """Return the last model of a run on another fleet with the first phase of the traffic."""
    assert isinstance(task.traffic, traffic.PhasedTraffic), "other traffic has no phases"
    first = replace(task.traffic, phases=task.traffic.phases[:1])
    task = replace(task, traffic=first, fleet=ExperimentFleet(name=fleet), variant=Variant(policy=task.variant.policy))
    feed = feed_of_traffic(first, task.seed)
    training = _training(task, feed)
    _simulation(task, task.variant.make(), training).run(feed)
    return training.controller.rounds[-1].model


def _replace_router(task: SimTask, simulation: Simulation, feed: Sequence[SimRequest]) -> float | None:
    """Plan the replacement of the first router; return its time, or that around which there are figures."""
    if task.replaced_after is None and not task.around_replacement:
        return None
    at_s = feed[int(len(feed) * (task.replaced_after or 0.5))].arrival_s
    if task.replaced_after is not None:
        simulation.kernel.at(at_s, partial(simulation.replace_router, 0))
    return at_s


def _rho(records: Sequence[SimRecord]) -> float | None:
    """Return Spearman's of the shadow policy's rank of the chosen replica and the TTFT; None without a shadow."""
    ranked = [
        (record.shadow.rank, record.ttft_ms)
        for record in records
        if record.shadow is not None and record.shadow.rank is not None and record.ttft_ms is not None
    ]
    ranks, ttft_ms = np.array(ranked, dtype=float).reshape(-1, 2).T
    return spearman(ranks, ttft_ms)


def cached_errors(records: Sequence[SimRecord]) -> tuple[float, float, float]:
    """Return phantom, missed and found tokens of the last attempts as shares of the prompt tokens."""
    known = [(one.estimated_cached_tokens or 0, one.cached_tokens, one.input_tokens) for one in records
             if one.cached_tokens is not None]  # fmt: skip
    whole = sum(tokens for _, _, tokens in known) or 1
    phantom = sum(max(0, estimated - found) for estimated, found, _ in known)
    missed = sum(max(0, found - estimated) for estimated, found, _ in known)
    return phantom / whole, missed / whole, sum(found for _, found, _ in known) / whole


def _sent(task: SimTask, simulation: Simulation, requests: int) -> dict[str, float | None]:
    """Return what a request costs: bytes of cache reports, of routers' reports, and evicted routes of `multi-depth`."""
    totals = [feed.path.totals for feed in simulation.caches.feeds.values()]
    found: dict[str, float | None] = {}
    if totals and task.variant.source != "exact":
        message, per_hash, per_token = _PUSH_BYTES if task.variant.source == "push" else _EVENT_BYTES
        sent = sum(one.messages * message + one.hashes * per_hash + one.tokens * per_token for one in totals)
        found["bytes_per_request"] = sent / requests
    if simulation.store is not None:
        found["report_bytes"] = simulation.store.bytes / requests
    policies = [shell.router.settings.policy for shell in simulation.shells]
    for origin in (Origin.REMOTE, Origin.LOCAL):
        evicted = sum(policy.routes.evicted[origin] for policy in policies if isinstance(policy, MultiDepth))
        found[f"{origin.name.lower()} routes"] = evicted / requests
    return found


def _delays(simulation: Simulation) -> dict[str, list[float]]:
    """Return p50, p95 and p99 of the time until an eviction is known, ms, by region."""
    by_region: dict[str, list[float]] = {}
    for name, feed in simulation.caches.feeds.items():
        region = simulation.engines[name].replica.region
        by_region.setdefault(region, []).extend(feed.path.totals.eviction_delays_s)
    return {
        f"delay {region}": [float(1e3 * one) for one in np.quantile(delays_s, (0.5, 0.95, 0.99))]
        for region, delays_s in by_region.items()
        if delays_s
    }


def _around(records: Sequence[SimRecord], replaced_s: float) -> Iterator[tuple[str, list[float]]]:
    """Yield the hit share and p95 TTFT in ms of each of `REPLACED_SLICES`."""
    for begin_s, end_s in REPLACED_SLICES:
        part = [one for one in records
                if begin_s <= one.scheduled_s - replaced_s < end_s and one.ttft_ms is not None]  # fmt: skip
        hit = sum(one.cached_tokens or 0 for one in part) / (sum(one.input_tokens for one in part) or 1)
        ttft_ms = float(np.quantile([one.ttft_ms or 0.0 for one in part], 0.95)) if part else 0.0
        yield f"{begin_s:g} to {end_s:g} s", [hit, ttft_ms]


def _slices(
    records: Sequence[SimRecord], decisions: Mapping[str, Decision], predicted: Forecasts
) -> list[dict[str, float | None]]:
    edges = np.linspace(0.0, max((one.scheduled_s for one in records), default=0.0) + 1e-9, SLICES + 1)
    begins = np.searchsorted(np.array([one.scheduled_s for one in records]), edges)
    found = []
    for (begin_s, end_s), (begin, end) in zip(pairwise(map(float, edges)), pairwise(begins), strict=True):
        means_ms = predicted.between(begin_s, end_s).means_ms()
        found.append({"begins_s": begin_s, **_slice(records[begin:end], decisions), **means_ms})
    return found


def _slice(records: Sequence[SimRecord], decisions: Mapping[str, Decision]) -> dict[str, float | None]:
    good = [one for one in records if one.error is None and one.ttft_ms is not None]
    errors = [abs(one.predicted_ttft_ms - (one.ttft_ms or 0.0)) / (one.ttft_ms or 1.0) for one in good
              if one.predicted_ttft_ms is not None]  # fmt: skip
    chosen = [decisions[one.id] for one in records if one.id in decisions]
    prompts = sum(one.prompt_tokens for one in chosen)
    return {
        "n": float(len(records)),
        "ttft_ms_mean": _mean([one.ttft_ms or 0.0 for one in good]),
        "error_ratio": _mean(errors),
        "hit": sum(one.estimated_cached_tokens for one in chosen) / prompts if prompts else None,
        "best_hit": sum(one.best_cached_tokens for one in chosen) / prompts if prompts else None,
    }


def _audited_slices(
    records: Sequence[SimRecord], decisions: Sequence[AuditedDecision]
) -> list[dict[str, float | None]]:
    """Return slices: `phantom` as a share of all estimated tokens, `missed` of all cached ones, `hit` of prompts."""
    by_slice: dict[int, tuple[list[SimRecord], list[AuditedDecision]]] = {}
    for record in records:
        by_slice.setdefault(int(record.scheduled_s / AUDITED_SLICE_S), ([], []))[0].append(record)
    for decision in decisions:
        by_slice.setdefault(int(decision.at_s / AUDITED_SLICE_S), ([], []))[1].append(decision)
    found: list[dict[str, float | None]] = []
    for number, (part, audited) in sorted(by_slice.items()):
        if part:
            phantom = sum(one.phantom_tokens for one in audited) / (sum(one.estimated_tokens for one in audited) or 1.0)
            missed = sum(one.missed_tokens for one in audited) / (sum(one.cached_tokens for one in audited) or 1.0)
            hit = cached_errors(part)[2]
            found.append({"begins_s": number * AUDITED_SLICE_S, "phantom": phantom, "missed": missed, "hit": hit})
    return found


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


# -- errors of a run's models: each outcome beside what the model in use at its dispatch predicts for its features
#
# A model is trained before the outcomes that it is measured by, so none of these is one that it has seen. A decision
# that a guard took counts as well: the model would have predicted it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Outcomes in the order in which they ended: measured times and the predicted ones, NaN where unknown. In s."""

    dispatched_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    predicted_ttft_s: Floats
    predicted_tpot_s: Floats

    def between(self, begin_s: float, end_s: float) -> Forecasts:
        """Return the outcomes of requests that were dispatched in a span of time."""
        inside = (self.dispatched_s >= begin_s) & (self.dispatched_s < end_s)
        return Forecasts(**{name: getattr(self, name)[inside] for name in self.__slots__})

    def errors(self) -> dict[str, float | None]:
        """Return mean and median errors as shares of the measured time; None without a prediction."""
        found: dict[str, float | None] = {}
        for name, predicted, measured in self._both():
            known = np.isfinite(predicted) & (measured > 0.0)
            errors = np.abs(predicted[known] - measured[known]) / measured[known]
            found[f"{name}_mean"] = float(errors.mean()) if len(errors) else None
            found[f"{name}_median"] = float(np.median(errors)) if len(errors) else None
        return found

    def means_ms(self) -> Mapping[str, float | None]:
        """Return means of predictions and, of the same outcomes, of measured times, ms."""
        found: dict[str, float | None] = {}
        for name, predicted, measured in self._both():
            known = np.isfinite(predicted) & np.isfinite(measured)
            for word, values in (("predicted", predicted), ("modelled", measured)):
                found[f"{word}_{name}_ms"] = float(np.mean(values[known] * 1e3)) if known.any() else None
        return found

    def _both(self) -> Sequence[tuple[str, Floats, Floats]]:
        return ("ttft", self.predicted_ttft_s, self.ttft_s), ("tpot", self.predicted_tpot_s, self.tpot_s)


class RecordedTrainer(Trainer):
    """A trainer that retains what it was given."""

    def __init__(self, spec: TrainingSpec, seed: int, incumbent: Model | None = None) -> None:
        super().__init__(spec, seed, incumbent)
        self.rows: list[TrainingRows] = []

    def add(self, rows: TrainingRows) -> None:
        super().add(rows)
        self.rows.append(rows)


class RunTraining:
    """The training of a run, and what there is to say of its models; parameters as in `TrainingController`."""

    def __init__(self, *, seed: int, model: Model | None = None, until_s: float = inf) -> None:
        self.controller = TrainingController(self._make_trainer, seed=seed, model=model, until_s=until_s)
        self._model = model
        self._trainers: list[RecordedTrainer] = []

    @property
    def adopted_s(self) -> list[float]:
        return [one.adopted_s for one in self.controller.rounds if one.adopted_s is not None]

    def forecasts(self) -> Forecasts:
        parts = [rows for trainer in self._trainers for rows in trainer.rows]
        return forecasts(parts, self.controller.rounds, self._model)

    def _make_trainer(self, spec: TrainingSpec, seed: int, incumbent: Model | None) -> RecordedTrainer:
        trainer = RecordedTrainer(spec, seed, incumbent)
        self._trainers.append(trainer)
        return trainer


def forecasts(parts: Sequence[TrainingRows], rounds: Sequence[TrainingRound], first: Model | None) -> Forecasts:
    """Return every outcome that is not censored with the prediction of the model that was in use at its dispatch.

    `first` is the model at the start; a round that was not adopted predicts nothing.
    """
    if not parts:
        return Forecasts(**dict.fromkeys(Forecasts.__slots__, np.empty(0)))
    rows = TrainingRows.concat(parts)
    rows = rows.select(~rows.censored)
    used = [(-inf, first), *((one.adopted_s, one.model) for one in rounds if one.adopted_s is not None)]
    place = np.searchsorted([adopted_s for adopted_s, _ in used], rows.dispatched_s, side="right") - 1
    ttft_s, tpot_s = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for number, (_, model) in enumerate(used):
        chosen = np.flatnonzero(place == number)
        if model is None or not len(chosen):
            continue
        table = rows.features[chosen]
        ttft_s[chosen] = model.ttft_s(table)
        if (per_token := model.tpot_s(table)) is not None:
            tpot_s[chosen] = per_token
    return Forecasts(
        dispatched_s=rows.dispatched_s, ttft_s=rows.ttft_s, tpot_s=rows.tpot_s, predicted_ttft_s=ttft_s,
        predicted_tpot_s=tpot_s,
    )  # fmt: skip
