"""A plan: the cheapest fleets for a demand, how far the first one reaches, and what it does with less.

Owns the simulation of one fleet, the questions about the chosen one, and the files. Leaves the search to `search`.

The simulated router is the one that `gorgo serve` runs, with its queue. A client's times are the router's and the
client's round trip.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.numeric import Floats
from gorgo.lab.plan.demand import Demand, LowerBounds, read_demand
from gorgo.lab.plan.search import Counts, FleetSearch, Measured, search
from gorgo.lab.plan.settings import ClientGroup, Kind, PlanSettings
from gorgo.lab.report import require_extra
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.records import ClientRecord, SimRecord
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest
from gorgo.lab.simulate.compare import mean_interval
from gorgo.lab.simulate.job import SimJob
from gorgo.lab.simulate.run import run_many
from gorgo.lab.traces import TraceFilters

#: Disjoint windows of the demand whose shares give the interval of the attained share.
WINDOWS = 24
#: Loads between which the headroom is sought, relative to the demand, and how exactly.
HEADROOM_MAX, HEADROOM_EXACT = 4.0, 1.03
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned.

    Parameters
    ----------
    trace, filters:
        As in `SimJob`.
    growth:
        Load relative to that of the trace.
    fleets:
        Serving fleets to find.
    seeds:
        A fleet serves if it does in the mean of these runs.
    most:
        Simulated fleets after which the search ends.
    n_jobs:
        As in `run_many`.
    limits:
        Of the router; None: those of `gorgo serve` without a file.
    """

    trace: str
    settings: PlanSettings
    filters: TraceFilters = field(default_factory=TraceFilters)
    growth: float = 1.0
    fleets: int = 3
    seeds: int = 3
    most: int = 400
    n_jobs: int = -1
    limits: RouterLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The chosen fleet without something: what, and what is attained then."""

    without: str
    measured: Measured | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result.

    Parameters
    ----------
    kinds:
        Of the fleets' counts.
    demand:
        What was planned for.
    found:
        The fleets, the first of which is the chosen one.
    intervals:
        95 % interval of the chosen fleet's attained share over windows of the demand, for each region's clients.
    headroom:
        Highest load, relative to the demand, that the chosen fleet serves; `HEADROOM_MAX` is the highest tried.
    losses:
        The chosen fleet with a replica less, and without a region.
    alone:
        For each region's clients the cheapest fleet of their own region for them alone; None where there is none. All
        together cost `static_peak`.
    """

    kinds: tuple[Kind, ...]
    demand: Demand
    found: FleetSearch
    intervals: tuple[tuple[float, ...], ...] = ()
    headroom: float | None = None
    losses: tuple[Loss, ...] = ()
    alone: tuple[Measured | None, ...] = ()

    @property
    def chosen(self) -> Measured | None:
        return self.found.serving[0] if self.found.serving else None

    @property
    def static_peak(self) -> float | None:
        """Return the cost of an hour with a fleet of its own in each region; None if one has none."""
        costs = [one.cost for one in self.alone if one is not None]
        return sum(costs) if costs and len(costs) == len(self.alone) else None

    def as_json(self) -> dict[str, Any]:
        return {
            "kinds": [
                {"region": kind.region, "accelerator": kind.accelerator, "price_per_hour": kind.price_per_hour}
                for kind in self.kinds
            ],
            "clients": [group.region for group in self.demand.groups],
            "requests": len(self.demand.feed),
            "serving": [_as_json(one) for one in self.found.serving],
            "simulated": [_as_json(one) for one in self.found.measured],
            "excluded_by_bounds": self.found.excluded,
            "excluded_by_larger_fleets": self.found.dominated,
            "is_complete": self.found.is_complete,
            "intervals": [list(one) for one in self.intervals],
            "headroom": self.headroom,
            "losses": [
                {"without": one.without, "measured": None if one.measured is None else _as_json(one.measured)}
                for one in self.losses
            ],
            "alone": [None if one is None else _as_json(one) for one in self.alone],
            "static_peak": self.static_peak,
        }


def _as_json(one: Measured) -> dict[str, Any]:
    return {**asdict(one), "cost": one.cost, "serves": one.serves}


def make_plan(options: PlanOptions, *, advance: Callable[[str], None]) -> Plan:
    """Search, and ask the questions about the cheapest fleet. `advance` is called after each simulated fleet.

    Raises `TraceError`, `UnknownProfile` and `UnknownPolicy`.
    """
    settings = options.settings
    demand = read_demand(options.trace, settings.groups, options.filters, growth=options.growth)
    world = World(options, demand, settings.kinds(), advance)
    outcome = world.search(wanted=options.fleets)
    plan = Plan(kinds=world.kinds, demand=demand, found=outcome)
    chosen = plan.chosen
    if chosen is None:
        return plan
    return replace(
        plan,
        intervals=world.intervals(chosen.counts),
        headroom=world.headroom(chosen.counts),
        losses=tuple(world.losses(chosen.counts)),
        alone=tuple(_alone(options, demand, group_index, advance) for group_index in range(len(demand.groups))),
    )


def _alone(options: PlanOptions, demand: Demand, group_index: int, advance: Callable[[str], None]) -> Measured | None:
    """Return the cheapest fleet of a region for its own clients, with a router of its own; None if there is none."""
    settings, group = options.settings, demand.groups[group_index]
    near_s = settings.rtt_ms.get(settings.router, 0.0) / 1e3
    kinds = tuple(replace(kind, rtt_s=near_s) for kind in settings.kinds() if kind.region == group.region)
    if not kinds:
        return None
    alone = replace(demand.of(group_index), groups=(replace(group, rtt_ms=min(group.rtt_ms, near_s * 1e3)),))
    outcome = World(options, alone, kinds, advance).search(wanted=1)
    return outcome.serving[0] if outcome.serving else None


class World:
    """The simulations of one demand on fleets of some kinds."""

    def __init__(
        self, options: PlanOptions, demand: Demand, kinds: tuple[Kind, ...], advance: Callable[[str], None]
    ) -> None:
        self._options = options
        self._demand = demand
        self._advance = advance
        self.kinds = kinds

    def search(self, *, wanted: int) -> FleetSearch:
        bounds = LowerBounds(self._demand, self.kinds)
        workers = self._options.n_jobs if self._options.n_jobs > 0 else 2
        return search(
            self.kinds,
            self.measured,
            excludes=bounds.excludes,
            wanted=wanted,
            at_once=max(1, workers),
            most=self._options.most,
        )

    def headroom(self, counts: Counts) -> float:
        """Return the highest load that the fleet serves, relative to the demand."""
        low, high = 1.0, HEADROOM_MAX
        if self._serves(counts, high):
            return high
        while high / low > HEADROOM_EXACT:
            middle = sqrt(low * high)
            low, high = (middle, high) if self._serves(counts, middle) else (low, middle)
        return low

    def losses(self, counts: Counts) -> Iterator[Loss]:
        """Yield the fleet with a replica less of each kind, and without each region."""
        without = {
            f"one {kind.name}": _less(counts, kind_index)
            for kind_index, kind in enumerate(self.kinds)
            if counts[kind_index]
        }
        regions = dict.fromkeys(kind.region for kind, count in zip(self.kinds, counts, strict=True) if count)
        for region in regions:
            left = tuple(0 if kind.region == region else count for kind, count in zip(self.kinds, counts, strict=True))
            without[f"all of {region}"] = left
        fleets = {one.counts: one for one in self.measured([left for left in without.values() if any(left)])}
        for words, left in without.items():
            yield Loss(without=words, measured=fleets.get(left))

    def intervals(self, counts: Counts) -> tuple[tuple[float, ...], ...]:
        """Return the mean and interval of the attained share over disjoint windows, for each region's clients."""
        met, _ = self._run([self._job(counts, seed=0)])[0]
        origins = np.array(self._demand.origins)
        arrivals = np.array([request.arrival_s for request in self._demand.feed])
        window = np.minimum((arrivals / (self._demand.span_s or 1.0) * WINDOWS).astype(int), WINDOWS - 1)
        return tuple(
            _interval(met[origins == group_index], window[origins == group_index])
            for group_index in range(len(self._demand.groups))
        )

    def _serves(self, counts: Counts, load: float) -> bool:
        return self._mean(counts, self._run([self._job(counts, seed=0, load=load)])).serves

    def measured(self, fleets: Sequence[Counts]) -> Iterable[Measured]:
        """Simulate each with the first seed, and those that nearly serve with the others too."""
        first = dict(zip(fleets, self._run([self._job(counts, seed=0) for counts in fleets]), strict=True))
        more = {counts: self._mean(counts, [run]).margin > -0.01 for counts, run in first.items()}
        again = [(counts, seed) for counts in fleets if more[counts] for seed in range(1, self._options.seeds)]
        runs: dict[Counts, list[_Run]] = {counts: [run] for counts, run in first.items()}
        others = self._run([self._job(counts, seed=seed) for counts, seed in again])
        for (counts, _), run in zip(again, others, strict=True):
            runs[counts].append(run)
        for counts in fleets:
            self._advance(fleet_text(self.kinds, counts))
            yield self._mean(counts, runs[counts])

    def _job(self, counts: Counts, *, seed: int, load: float = 1.0) -> SimJob:
        limits = self._options.limits or RouterLimits()
        return SimJob(
            trace=self._options.trace,
            feed=self._demand.feed,
            policy=self._options.settings.policy,
            fleet=fleet_of(self.kinds, counts),
            time_scale=1 / load,
            seed=seed,
            limits=limits,
            keep_requests=True,
            block_tokens=self._demand.block_tokens,
        )

    def _run(self, jobs: Sequence[SimJob]) -> list[_Run]:
        """Return in their order which requests of each run met their objectives, and its records."""
        runs: dict[tuple[str, int, float], _Run] = {}
        # A single run is quicker here than in a process to which the feed has to be sent.
        n_jobs = 1 if len(jobs) == 1 else self._options.n_jobs
        for run in run_many(jobs, n_jobs=n_jobs):
            records = run.requests or ()
            runs[_key(run.job)] = _met(records, self._demand), records
        return [runs[_key(job)] for job in jobs]

    def _mean(self, counts: Counts, runs: Sequence[_Run]) -> Measured:
        origins = np.array(self._demand.origins)
        groups = self._demand.groups
        met = np.mean([met for met, _ in runs], axis=0)
        price = sum(kind.price_per_hour * count for kind, count in zip(self.kinds, counts, strict=True))
        return Measured(
            counts=counts,
            price=price,
            egress=self._egress(runs[0][1]),
            attained=tuple(float(met[origins == group_index].mean()) for group_index in range(len(groups))),
            objective=tuple(group.objective.share for group in groups if group.objective is not None),
            quantiles=tuple(
                _quantiles(runs[0][1], origins == group_index, group) for group_index, group in enumerate(groups)
            ),
        )

    def _egress(self, records: Sequence[SimRecord]) -> float:
        """Return the price of an hour of what crosses regions: answers to the router's, prompts to the replicas'."""
        settings = self._options.settings
        if not settings.egress_per_gb:
            return 0.0
        prices, home = settings.egress_per_gb, settings.router
        paid = 0.0
        for record, request in zip(records, self._demand.feed, strict=True):
            if record.region is None or record.region == home:
                continue
            paid += prices.get(home, 0.0) * request.body_bytes / _GB
            answer = (record.output_tokens or 0) * settings.bytes_per_token
            paid += prices.get(record.region, 0.0) * answer / _GB
        return paid / max(self._demand.span_s / 3600.0, 1e-9)


_Run = tuple[Floats, Sequence[SimRecord]]


def _key(job: SimJob) -> tuple[str, int, float]:
    names = " ".join(replica.name for replica in job.fleet.replicas)
    return names, job.seed, job.time_scale


def _met(records: Sequence[SimRecord], demand: Demand) -> Floats:
    """Return 1.0 for each request that met its client's objective, 0.0 for the others."""
    return np.array(
        [float(meets(record, demand.groups[origin])) for record, origin in zip(records, demand.origins, strict=True)]
    )


def meets(record: ClientRecord, clients: ClientGroup) -> bool:
    """Return whether a request met the objective of its client, to which the answer takes a round trip more."""
    objective, rtt_s = clients.objective, clients.rtt_ms / 1e3
    assert objective is not None, "the settings have given each group one"
    if record.error is not None or record.ttft_ms is None or record.e2e_s is None:
        return False
    if objective.ttft_ms is not None and record.ttft_ms + clients.rtt_ms > objective.ttft_ms:
        return False
    if objective.e2e_s is not None and record.e2e_s + rtt_s > objective.e2e_s:
        return False
    tpot_ms = _tpot_ms(record)
    return objective.tpot_ms is None or tpot_ms is None or tpot_ms <= objective.tpot_ms


def _tpot_ms(record: ClientRecord) -> float | None:
    if record.ttft_ms is None or record.e2e_s is None or (record.output_tokens or 0) < 2:
        return None
    return (1e3 * record.e2e_s - record.ttft_ms) / ((record.output_tokens or 0) - 1)


def _quantiles(
    records: Sequence[SimRecord], is_of_group: np.ndarray[Any, np.dtype[np.bool_]], clients: ClientGroup
) -> tuple[float | None, float | None, float | None]:
    """Return the quantiles of a region's clients at the wanted share; a failed request takes for ever."""
    assert clients.objective is not None, "the settings have given each group one"
    share = clients.objective.share
    chosen = [record for record, is_own in zip(records, is_of_group.tolist(), strict=True) if is_own]
    ttft = _quantile([None if one.ttft_ms is None else one.ttft_ms + clients.rtt_ms for one in chosen], share)
    e2e = _quantile([None if one.e2e_s is None else one.e2e_s + clients.rtt_ms / 1e3 for one in chosen], share)
    return ttft, e2e, _quantile([_tpot_ms(one) for one in chosen if (one.output_tokens or 0) > 1], share)


def _quantile(values: Sequence[float | None], share: float) -> float | None:
    ascending = np.sort(np.array([np.inf if value is None else value for value in values]))
    if not len(ascending):
        return None
    value = float(ascending[min(int(np.ceil(share * len(ascending))) - 1, len(ascending) - 1)])
    return value if np.isfinite(value) else None


def _interval(met: Floats, window: np.ndarray[Any, np.dtype[np.int_]]) -> tuple[float, ...]:
    """Return the mean of the windows' shares with its interval, weighted as requests are by taking whole windows."""
    shares = [
        float(met[window == window_index].mean()) for window_index in range(WINDOWS) if (window == window_index).any()
    ]
    mean, *ends = mean_interval(shares)
    return (mean, *(min(max(end, 0.0), 1.0) for end in ends))


def _less(counts: Counts, kind_index: int) -> Counts:
    return (*counts[:kind_index], counts[kind_index] - 1, *counts[kind_index + 1 :])


def fleet_of(kinds: Sequence[Kind], counts: Counts) -> SimFleet:
    """Return the fleet with accurate priors."""
    return with_accurate_priors(SimFleet(tuple(_replicas(kinds, counts))))


def _replicas(kinds: Sequence[Kind], counts: Counts) -> Iterator[SimReplica]:
    for kind, count in zip(kinds, counts, strict=True):
        for number in range(count):
            spec = ReplicaSpec(
                f"{kind.region}-{kind.accelerator}-{number}", kind.region, accelerator=kind.profile.accelerator
            )
            yield SimReplica(spec, kind.profile, Link(rtt_s=kind.rtt_s))


def fleet_text(kinds: Sequence[Kind], counts: Counts) -> str:
    """Return a fleet in words.

    Example
    -------
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> h100 = Kind(region="us", accelerator="h100", profile=find_profile("1xH100-Llama-3.1-8B"),
    ...             profile_name="", price_per_hour=2.0, quota=2, rtt_s=0.0)
    >>> fleet_text([h100], (2,))
    '2 h100 in us'
    """
    return ", ".join(f"{count} {kind.name}" for kind, count in zip(kinds, counts, strict=True) if count)


def write_plan(folder: Path, plan: Plan, settings: PlanSettings) -> list[Path]:
    """Write plan.json and demand.jsonl, for the chosen fleet regions.yaml and terraform.tfvars.json; return the files.

    The demand is written where its blocks are those of a trace file, so that it can be replayed through a real fleet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {"plan.json": json.dumps(plan.as_json(), indent=2) + "\n"}
    if plan.demand.block_tokens == BLOCK_TOKENS:
        files["demand.jsonl"] = "".join(json.dumps(_row(request)) + "\n" for request in plan.demand.feed)
    if plan.chosen is not None:
        files["regions.yaml"] = regions_text(plan.kinds, plan.chosen.counts, settings)
        files["terraform.tfvars.json"] = json.dumps({"regions_file": "regions.yaml"}, indent=2) + "\n"
    for name, text in files.items():
        write_atomically(folder / name, text.encode(), mode=PUBLIC)
    return [folder / name for name in files]


def write_plan_plot(path: Path, plan: Plan) -> None:
    """Draw cost against attainment, a mark per simulated fleet. Raises `MissingExtra` without the extra `report`."""
    require_extra("a plot")
    import matplotlib as mpl

    from gorgo.lab.report.style import BROAD, GREY, RC, panels

    groups = plan.demand.groups
    image = BytesIO()
    with mpl.rc_context(RC):
        figure, axes = panels(len(groups), BROAD, sharey=True)
        for group_index, (panel, group) in enumerate(zip(axes, groups, strict=True)):
            wanted = plan.found.measured[0].objective[group_index] if plan.found.measured else 0.0
            for serves, colour, marker in ((False, GREY, "x"), (True, "#0072B2", "o")):
                chosen = [one for one in plan.found.measured if one.serves is serves]
                label = "serves all regions" if serves else "does not"
                shares = [one.attained[group_index] * 100 for one in chosen]
                panel.scatter([one.cost for one in chosen], shares, c=colour, marker=marker, s=26, label=label)
            panel.axhline(wanted * 100, color="#D55E00", linewidth=1, linestyle="--", label="wanted")
            panel.set_title(f"clients of {group.region}")
            panel.set_xlabel("cost of an hour")
            panel.set_ylabel("requests within the objective, %")
        axes[0].legend(loc="lower right")
        figure.savefig(image, format="svg", metadata={"Date": None})
    write_atomically(path, image.getvalue(), mode=PUBLIC)


def _row(request: SimRequest) -> Mapping[str, Any]:
    """Return a request as a row of a Mooncake trace; what is left of its last block is its own."""
    ids = np.frombuffer(request.blocks, dtype="<u8").tolist()
    if len(ids) * BLOCK_TOKENS < request.prompt_tokens:
        ids.append(request.index)
    return {
        "timestamp": round(request.arrival_s * 1e3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": ids,
    }


def regions_text(kinds: Sequence[Kind], counts: Counts, settings: PlanSettings) -> str:
    """Return the fleet as a regions.yaml, in which `gorgo engine` imitates each replica.

    Its addresses are of this machine. For a real fleet terraform sets them.
    """
    replicas = list(_replicas(kinds, counts))
    profiles = dict(zip((one.name for one in replicas), _profile_names(kinds, counts), strict=True))
    regions = dict.fromkeys((settings.router, *(one.region for one in replicas)))
    document: Mapping[str, Any] = {
        "proxy": {"region": settings.router, "policy": settings.policy},
        "regions": [{"name": region} for region in regions],
        "replicas": [
            {
                "name": one.name,
                "region": one.region,
                "url": f"http://127.0.0.1:{30_000 + index}",
                "accelerator": one.profile.accelerator,
                "capacity": {
                    "kv_tokens": one.profile.kv_tokens,
                    "max_running_requests": one.profile.max_running_requests,
                },
            }
            for index, one in enumerate(replicas)
        ],
        "simulation": {
            "profile": next(iter(profiles.values())),
            "profiles": profiles,
            "rtt_ms": {region: settings.rtt_ms[region] for region in regions if region in settings.rtt_ms},
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def _profile_names(kinds: Sequence[Kind], counts: Counts) -> Iterator[str]:
    for kind, count in zip(kinds, counts, strict=True):
        yield from [kind.profile_name] * count
