"""One run of so many routers over one fleet, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from time import thread_time

import numpy as np

from gorgo.apps.cache_sources.traffic import ChatTraffic, feed_of_traffic
from gorgo.apps.claims.run_cache import run_key
from gorgo.apps.results import ResultRow
from gorgo.apps.served import TTFT_MS
from gorgo.apps.simulate import SimJob
from gorgo.apps.simulate.collector import rare_collections
from gorgo.apps.simulate.overload import with_queue
from gorgo.apps.simulate.rows import simulated_run
from gorgo.core.limits import RouterLimits
from gorgo.core.prefix.origin import Origin
from gorgo.policies.registry import make_policy
from gorgo.policies.sticky.multi_depth import MultiDepth
from gorgo.policies.sticky.routes import RouteTable
from gorgo.sim.fleet import SimFleet
from gorgo.sim.named_fleets import find_fleet
from gorgo.sim.records import SimRecord
from gorgo.sim.routers.group import RouterGroup
from gorgo.sim.simulation import Simulation

#: The fleet of all runs: the paper's, of three regions.
FLEET = "paper"
#: Slices around the time at which a router is replaced, s.
SLICES: Sequence[tuple[float, float]] = ((-60.0, 0.0), (0.0, 30.0), (30.0, 60.0), (60.0, 120.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutersTask:
    """A run.

    Parameters
    ----------
    replaced_after:
        Share of the requests after which the first router is killed and replaced; `None`: it is not.
    queueing:
        Whether routers queue and shed, with the deadlines of goodput.
    max_routes:
        Bound of the route table of `multi-depth`; `None`: its own.
    replicas:
        Replicas of the fleet, in the regions of its own; `None`: those that it has.
    """

    policy: str = "gorgo-ms"
    traffic: ChatTraffic
    routers: RouterGroup
    replaced_after: float | None = None
    sliced: bool = False
    queueing: bool = False
    max_routes: int | None = None
    replicas: int | None = None
    seed: int = 0

    def cache_key(self) -> str:
        """Return the key of the run."""
        code = [Path(__file__), Path(__file__).parents[1] / "cache_sources" / "traffic.py"]
        return run_key(self.policy, [self.traffic.trace], [self], code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutersRun:
    """Figures of a run.

    `good` is the goodput, `lasted_s` the virtual time, `slices` hit share and p95 TTFT in ms of `SLICES`,
    `report_bytes` those of a request, and `evicted` the evictions of a request by origin: of marks, and of routes of
    `multi-depth`.
    """

    row: ResultRow
    good: float
    lasted_s: float
    slices: Sequence[tuple[float, float]]
    report_bytes: float | None
    evicted: Mapping[str, float]
    cpu_s: float


def measure(task: RoutersTask) -> RoutersRun:
    """Run the task in this process."""
    begun_s = thread_time()
    feed, fleet = feed_of_traffic(task.traffic, task.seed), _fleet(task.replicas)
    block_tokens = task.traffic.block_tokens
    limits = RouterLimits(block_tokens=float(block_tokens), max_samples=0)
    policy = make_policy(task.policy)
    if task.max_routes is not None:
        assert isinstance(policy, MultiDepth), "the one policy with routes of its own"
        policy.routes = RouteTable(task.max_routes)
    with rare_collections():
        simulation = Simulation(
            fleet,
            policy,
            seed=task.seed,
            limits=with_queue(limits) if task.queueing else limits,
            block_tokens=block_tokens,
            routers=task.routers,
            slo_ttft_s=TTFT_MS / 1e3 if task.queueing else None,
        )
        replaced_s = None
        if task.replaced_after is not None or task.sliced:
            replaced_s = feed[int(len(feed) * (task.replaced_after or 0.5))].arrival_s
        if task.replaced_after is not None and replaced_s is not None:
            simulation.kernel.at(replaced_s, partial(simulation.replace_router, 0))
        result = simulation.run(feed)
    job = SimJob(trace=task.traffic.name, policy=task.policy, fleet=fleet, seed=task.seed)
    run = simulated_run(job, {}, result)
    assert run.goodput is not None, "a feed has requests"
    store = simulation.store
    return RoutersRun(
        row=run.row,
        good=run.goodput.good,
        lasted_s=simulation.kernel.now,
        slices=[] if replaced_s is None else list(_slices(result.records, replaced_s)),
        report_bytes=None if store is None else store.bytes / len(feed),
        evicted=_evicted(simulation, len(feed)),
        cpu_s=thread_time() - begun_s,
    )


def _fleet(replicas: int | None) -> SimFleet:
    fleet = find_fleet(FLEET)
    if replicas is None:
        return fleet
    numbered = enumerate(islice(cycle(fleet.replicas), replicas))
    return SimFleet(
        tuple(replace(one, spec=replace(one.spec, name=f"{one.region}-{number}")) for number, one in numbered),
        fleet.name,
    )


def _slices(records: Sequence[SimRecord], replaced_s: float) -> Iterator[tuple[float, float]]:
    for begin_s, end_s in SLICES:
        part = [
            record
            for record in records
            if begin_s <= record.scheduled_s - replaced_s < end_s and record.ttft_ms is not None
        ]
        hit = sum(record.cached_tokens or 0 for record in part) / (sum(record.input_tokens for record in part) or 1)
        yield hit, float(np.quantile([record.ttft_ms or 0.0 for record in part], 0.95)) if part else 0.0


def _evicted(simulation: Simulation, requests: int) -> dict[str, float]:
    found = dict.fromkeys(("remote marks", "local marks", "remote routes", "local routes"), 0.0)
    for shell in simulation.shells:
        peers, policy = shell.router.peers.exchange, shell.router.settings.policy
        for origin in (Origin.REMOTE, Origin.LOCAL):
            name = origin.name.lower()
            if peers is not None:
                evicted = peers.prefixes.evicted
                found[f"{name} marks"] += sum(count for (of, _), count in evicted.items() if of is origin) / requests
            if isinstance(policy, MultiDepth):
                found[f"{name} routes"] += policy.routes.evicted[origin] / requests
    return found
