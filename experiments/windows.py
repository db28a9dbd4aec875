"""Tasks on whole windows: a policy on a workload, run as `gorgo simulate` runs it, and targets on their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from time import thread_time
from typing import Any, ClassVar, Literal, cast

import tuner
from experiments.comparison import MEASURES
from experiments.fleets import ExperimentFleet
from experiments.rules import DynamoKv, ShortSightedPolicy
from experiments.runner import Runs, run_key
from experiments.simulated import TaskRun
from experiments.tables import ClaimVerdict
from gorgo.config.load import load_config
from gorgo.core.limits import RouterLimits
from gorgo.core.policy.interface import Policy
from gorgo.lab.datasets import Shape, generate_requests
from gorgo.lab.results import ResultRow, load_text
from gorgo.lab.sim.fleet import SimFleet, fleet_of, limits_of, with_accurate_priors, with_queue_for_all
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.compare import best_of_rows, geometric_mean, ratio_of
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.simulate.job import STEADY
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import OURS, PAPER
from tuner.campaign.options import CampaignOptions
from tuner.offline.simulated_campaign import simulate_campaign

Queue = Literal["on", "off"]
#: Learned by the GORGO paper's authors on April 5 from (0.5, 0.1), and held fixed on the held-out windows.
LEARNED_WEIGHTS: Mapping[str, float] = {"w_rtt": 0.276, "w_queue": 0.5}
LEARNED = "gorgo (0.276, 0.5)"
#: The default policy with other weights, by their name in the tables: a third to twice as much of each, and of all.
CHANGED: Mapping[str, tuple[str, Mapping[str, float]]] = {
    f"{OURS}, " + ", ".join(f"{name} {value:g}" for name, value in weights.items()): (OURS, weights)
    for weights in (
        *({"lambda": value} for value in (0.1, 0.2, 0.3)),
        *({"delta": value} for value in (12.5, 17.5, 35.0, 50.0)),
        *({"eta": value} for value in (400.0, 560.0, 1120.0, 1600.0)),
        {"lambda": 0.1, "delta": 12.5, "eta": 400.0},
        {"lambda": 0.3, "delta": 50.0, "eta": 1600.0},
    )
}
#: Policies with other weights than their defaults, by their name in the tables.
WEIGHTED: Mapping[str, tuple[str, Mapping[str, float]]] = {
    LEARNED: (PAPER, LEARNED_WEIGHTS),
    "gorgo (0.23, 0)": (PAPER, {"w_rtt": 0.23, "w_queue": 0.0}),
    "gorgo (2, 0.104)": (PAPER, {"w_rtt": 2.0, "w_queue": 0.104}),
    **CHANGED,
}
#: The paper's policy from its defaults on, while the published protocol tries weights from the first request: 672
#: samples, which are a window of 128, then 17 hops of 32.
ONLINE = "gorgo, online"
PROTOCOL: tuple[tuple[str, Any], ...] = (("max_generations", 17), ("mode", "paper"))
#: The default policy without the two terms that price a placement's effect on later prompts.
SHORT_SIGHTED = f"{OURS} without room and shared"
#: Policies that no registry has, by their name in the tables.
GIVEN: Mapping[str, Callable[[], Policy]] = {
    SHORT_SIGHTED: lambda: cast(Policy, ShortSightedPolicy(policy_of(OURS))),
    DynamoKv.name: DynamoKv,
}
REGIONS = Path(__file__).parents[1] / "regions.yaml"
#: What an online run depends on beside the simulator.
_TUNER = Path(tuner.__file__ or "").parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests at a load.

    Example
    -------
    >>> window = Workload(name="windows", traces=("one", "two"), time_scale=2.0)
    >>> window.label, PolicyTask(window, "random", 3).trace
    ('windows, load 0.5', 'two')
    """

    name: str  #: Shown in tables, without the load.
    #: Files, or names of data sets or shapes. Seed s takes number s modulo their count; a shape is drawn with s.
    traces: tuple[str, ...]
    #: Drawn with the seed in the place of a trace, whose name then says nothing but what it is like.
    shape: Shape | None = None
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0  #: 2.0 is half the load.
    scenario: str = STEADY  #: Faults and other deviations.
    fleet: str | None = None  #: Name of a fleet; None: that of regions.yaml.
    pool_share: float = 1.0  #: Part of each KV pool of a named fleet that there is.
    world: SimFleet | None = None  #: Of another fleet than a named one, with the Router's own limits.
    client_concurrency: int | None = None  #: As in `SimJob`.
    #: Queue of the proxy under every policy or under none; None: under those that predict, as `gorgo serve` has it.
    queue: Queue | None = None
    seeds: int | None = None  #: Of the seeds of a check only the first so many; None: all.

    @property
    def label(self) -> str:
        """Return the name with the load, the named fleet, unless steady the scenario, and the queue if it is given."""
        fleets = [] if self.fleet is None else [ExperimentFleet(name=self.fleet, pool_share=self.pool_share).title]
        parts = [self.name, load_text(self.time_scale), *fleets, *([] if self.scenario == STEADY else [self.scenario])]
        return ", ".join(parts if self.queue is None else [*parts, f"queue {self.queue}"])

    def at(self, time_scale: float) -> Workload:
        return replace(self, time_scale=time_scale)

    def under(self, scenario: str) -> Workload:
        return replace(self, scenario=scenario)

    def on(self, fleet: str, *, pool_share: float = 1.0) -> Workload:
        """Return the same on a named fleet with so large a part of its KV pools."""
        return replace(self, fleet=fleet, pool_share=pool_share)

    def first(self, requests: int | None) -> Workload:
        """Return the same with only so many requests; None: all."""
        limits = [limit for limit in (self.filters.limit, requests) if limit is not None]
        return replace(self, filters=replace(self.filters, limit=min(limits, default=None)))


@dataclass(frozen=True, slots=True)
class PolicyTask:
    """One policy on one workload; `policy` may be a key of `WEIGHTED` or `GIVEN`, or `ONLINE`."""

    workload: Workload
    policy: str
    seed: int
    kind: ClassVar[type[TaskRun]] = TaskRun

    @property
    def trace(self) -> str:
        return self.workload.traces[self.seed % len(self.workload.traces)]

    def job(self) -> SimJob:
        """Return the job of the run, the policy with its default weights or those of `WEIGHTED`; a shape is drawn."""
        job, shape = self._job(), self.workload.shape
        return job if shape is None else replace(job, feed=drawn(shape, self.seed, self.workload.filters))

    def _job(self) -> SimJob:
        workload = self.workload
        named = OURS if self.policy in GIVEN else {ONLINE: PAPER}.get(self.policy, self.policy)
        policy, weights = WEIGHTED.get(named, (named, None))
        fleet, limits, (probe_s, scrape_s) = _regions()
        if workload.world is not None:
            fleet, limits, (probe_s, scrape_s) = workload.world, None, (30.0, 30.0)
        if workload.queue is not None:
            limits = with_queue_for_all(limits or RouterLimits(), enabled=workload.queue == "on")
        return SimJob(
            trace=self.trace, policy=policy, weights=weights, seed=self.seed, filters=workload.filters,
            fleet=fleet if workload.fleet is None else _part_of(workload.fleet, workload.pool_share), limits=limits,
            time_scale=workload.time_scale, scenario=workload.scenario, client_concurrency=workload.client_concurrency,
            probe_interval_s=probe_s, scrape_interval_s=scrape_s,
            block_tokens=None if workload.shape is None else workload.shape.block_tokens,
        )  # fmt: skip

    def key(self) -> str:
        """Return the key of the run; workloads of two names can be one run. Raises `UnknownPolicy`."""
        job, shape = self._job(), self.workload.shape
        settings: list[object] = [replace(job, trace=""), *([] if shape is None else [shape])]
        if self.policy == ONLINE:
            return run_key(job.policy, [job.trace], [*settings, PROTOCOL], code=[_TUNER])
        return run_key(job.policy, [job.trace], [*settings, *([self.policy] if self.policy in GIVEN else [])])

    def run(self) -> TaskRun:
        if self.policy == ONLINE:
            began_s = thread_time()
            row = simulate_campaign(self.job(), CampaignOptions(**dict(PROTOCOL)), seed=self.seed).row
            return TaskRun(row=row, cpu_s=thread_time() - began_s)
        run = run_once(self.job(), policy=GIVEN[self.policy]() if self.policy in GIVEN else None)
        return TaskRun(row=run.row, cpu_s=run.cpu_s or 0.0)


@lru_cache(maxsize=8)
def _part_of(fleet: str, pool_share: float) -> SimFleet:
    return ExperimentFleet(name=fleet, pool_share=pool_share).sim_fleet()


@lru_cache(maxsize=2)
def drawn(shape: Shape, seed: int, filters: TraceFilters) -> Sequence[SimRequest]:
    """Return the requests of a shape that pass the filters, in its own blocks."""
    requests = generate_requests(replace(shape, seed=seed), block_tokens=shape.block_tokens)
    return tuple(feed_of(filters.apply(requests), block_tokens=shape.block_tokens))


@lru_cache(maxsize=1)
def _regions() -> tuple[SimFleet, RouterLimits | None, tuple[float, float]]:
    """Return the fleet of regions.yaml with accurate priors of its engines, its limits and its intervals."""
    loaded = load_config(REGIONS)
    fleet = with_accurate_priors(fleet_of(loaded, source=REGIONS))
    return fleet, limits_of(loaded), (loaded.proxy.probe_interval_s, loaded.proxy.scrape_interval_s or 30.0)


@dataclass(frozen=True, slots=True)
class RatioTarget:
    """`figure` of `policy` is at most `at_most` times that of the best of `others`.

    Several workloads of one target are a geometric mean over them within each seed, so that the interval counts seeds.
    """

    group: str  #: As in `ClaimVerdict`.
    policy: str
    workloads: Sequence[Workload]  #: One, or several for their geometric mean.
    others: Sequence[str]  #: The best has the lowest mean of the figure over seeds; chosen per workload.
    figure: str  #: A key of `MEASURES`.
    at_most: float
    others_on: Sequence[Workload] | None = None  #: Workloads of the others, one per workload; None: the same.

    def tasks(self, seeds: Sequence[int]) -> Iterator[PolicyTask]:
        for workload, beside in self.pairs:
            for on, policy in ((workload, self.policy), *((beside, other) for other in self.others)):
                yield from (PolicyTask(on, policy, seed) for seed in seeds[: on.seeds])

    def on(self, change: Callable[[Workload], Workload]) -> RatioTarget:
        others_on = None if self.others_on is None else list(map(change, self.others_on))
        return replace(self, workloads=list(map(change, self.workloads)), others_on=others_on)

    @property
    def pairs(self) -> Sequence[tuple[Workload, Workload]]:
        return list(zip(self.workloads, self.others_on or self.workloads, strict=True))

    def labels(self, best: Sequence[str]) -> tuple[str, str, str, str]:
        """Return the first cells of the row; `best` has the best of the others on each workload."""
        names = [workload.label for workload in self.workloads]
        against = best[0] if len(best) == 1 else "the best"
        if len(self.others) == 1:
            against = "itself" if self.others[0] == self.policy else self.others[0]
        return names[0] if len(names) == 1 else f"geometric mean of {len(names)}", self.policy, against, self.figure

    def verdict(self, runs: Runs, seeds: Sequence[int]) -> ClaimVerdict:
        """Return the verdict, from the seeds that all of its runs have."""
        figure = MEASURES[self.figure]
        by_seed: dict[int, list[tuple[float, float]]] = {}
        best: list[str] = []
        for workload, beside in self.pairs:
            rows = _rows(runs, workload, self.policy, seeds)
            groups = {other: _rows(runs, beside, other, seeds) for other in self.others}
            name = best_of_rows({other: list(of_seed.values()) for other, of_seed in groups.items()}, figure)
            if name is None:
                return ClaimVerdict.of_ratio(self.group, self.labels(()), None, at_most=self.at_most)
            best.append(name)
            for seed, row in rows.items():
                ours, theirs = figure(row), figure(groups[name][seed]) if seed in groups[name] else None
                if ours and theirs:  # a zero has no logarithm, and no run takes no time
                    by_seed.setdefault(seed, []).append((ours, theirs))
        whole = [
            (geometric_mean([one for one, _ in pairs]), geometric_mean([other for _, other in pairs]))
            for pairs in by_seed.values()
            if len(pairs) == len(self.workloads)
        ]
        return ClaimVerdict.of_ratio(self.group, self.labels(best), ratio_of(whole), at_most=self.at_most)


def targets_of(
    group: str, workloads: Iterable[Workload], others: Sequence[str], *bounds: tuple[str, float], policy: str = OURS
) -> Iterator[RatioTarget]:
    """Yield a target per figure, with its bound, and workload."""
    found = list(workloads)
    for figure, at_most in bounds:
        for one in found:
            yield RatioTarget(group, policy, (one,), others, figure, at_most)


def _rows(runs: Runs, workload: Workload, policy: str, seeds: Sequence[int]) -> dict[int, ResultRow]:
    tasks = ((seed, PolicyTask(workload, policy, seed)) for seed in seeds)
    return {seed: runs[task].row for seed, task in tasks if task in runs}
