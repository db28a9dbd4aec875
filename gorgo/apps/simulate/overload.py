"""What a fleet can take, and what happens beyond it: capacity by bisection, then goodput at multiples of it.

Owns the search and the list of runs behind `gorgo overload`. Capacity is the highest load at which the policy, sending
everything at once, serves 95 % of requests well (`goodput`). At each multiple of it two rows follow: sent at once, and
held at the proxy with a deadline for the first token and a goal for the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from gorgo.apps.results import ResultRow
from gorgo.apps.simulate.goodput import Goodput
from gorgo.apps.simulate.job import SimJob, SimulatedRun
from gorgo.apps.simulate.run import Backend, run_many
from gorgo.core.dispatch.hedging import HedgeLimits
from gorgo.core.limits import RouterLimits
from gorgo.errors import TraceError

#: Share of requests that are served well at capacity.
AT_CAPACITY = 0.95
#: The search ends when the load is known to this.
EXACT = 1.05
#: Time scales within which capacity is looked for.
LEAST, MOST = 1 / 64, 64.0
#: A normal load, capacity, and loads beyond.
LOADS = (0.7, 1.0, 1.3, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadRow:
    """One run. `load` is a multiple of capacity; `held` says which of the two ways it was."""

    load: float
    time_scale: float
    held: bool
    row: ResultRow
    goodput: Goodput

    def as_json(self) -> dict[str, Any]:
        return {
            "load": self.load,
            "time_scale": self.time_scale,
            "held": self.held,
            **self.row.as_json(),
            "goodput": self.goodput.as_json(),
        }


def at_once(limits: RouterLimits) -> RouterLimits:
    """The same, with everything sent when it comes, and once."""
    return replace(
        limits, overload=replace(limits.overload, queue_enabled=False), hedging=HedgeLimits(budget_ratio=0.0)
    )


def held(
    limits: RouterLimits, *, max_concurrency_per_replica: int | None = None, slo_e2e_ms: float | None = None
) -> RouterLimits:
    """Return the limits with queueing on; values that are None keep the defaults of `OverloadLimits`."""
    overload = replace(limits.overload, queue_enabled=True)
    if slo_e2e_ms is not None:
        overload = replace(overload, slo_e2e_s=slo_e2e_ms / 1e3)
    if max_concurrency_per_replica is not None:
        overload = replace(overload, max_concurrency_per_replica=max_concurrency_per_replica)
    return replace(limits, overload=overload)


def capacity_scale(job: SimJob) -> float:
    """The least time scale, so the highest load, that `job` serves well; exact to 5 %.

    Raises `TraceError` where no load is low enough: then it is the prompts that take too long, not the fleet. The same
    where none is high enough: then there are too few requests to overload the fleet.
    """
    job = replace(job, limits=at_once(job.limits or RouterLimits()))
    low, high = _bracket(job)
    while high / low > EXACT:
        middle = sqrt(low * high)
        if _serves_well(job, middle):
            high = middle
        else:
            low = middle
    return high


def overload_rows(
    job: SimJob,
    *,
    capacity: float,
    loads: Sequence[float] = LOADS,
    max_concurrency_per_replica: int | None = None,
    slo_e2e_ms: float | None = None,
    n_jobs: int = -1,
    backend: Backend = "loky",
) -> list[OverloadRow]:
    """Two rows per load, in order. `job` has the deadline; `capacity` is its time scale there."""
    limits = job.limits or RouterLimits()
    ways = {
        False: at_once(limits),
        True: held(limits, max_concurrency_per_replica=max_concurrency_per_replica, slo_e2e_ms=slo_e2e_ms),
    }
    jobs = {(load, way): _job(job, capacity / load, way, ways[way]) for load in loads for way in ways}
    runs = {_place(run.job): run for run in run_many(list(jobs.values()), n_jobs=n_jobs, backend=backend)}
    return list(_rows(jobs, runs))


def _rows(
    jobs: dict[tuple[float, bool], SimJob], runs: dict[tuple[float, bool], SimulatedRun]
) -> Iterator[OverloadRow]:
    for (load, way), job in jobs.items():
        run = runs[_place(job)]
        assert run.goodput is not None, "the feed that gave a capacity has requests"
        yield OverloadRow(load=load, time_scale=job.time_scale, held=way, row=run.row, goodput=run.goodput)


def _job(job: SimJob, time_scale: float, way: bool, limits: RouterLimits) -> SimJob:
    return replace(job, time_scale=time_scale, limits=limits, slo_ttft_ms=job.slo_ttft_ms if way else None)


def _place(job: SimJob) -> tuple[float, bool]:
    return job.time_scale, job.limits is not None and job.limits.overload.queue_enabled


def _bracket(job: SimJob) -> tuple[float, float]:
    """Two time scales, a factor of two apart: overloaded and not."""
    scale = 1.0
    share = f"{AT_CAPACITY:.0%} of requests in time"
    if _serves_well(job, scale):
        while _serves_well(job, scale / 2):
            scale /= 2
            if scale <= LEAST:
                raise TraceError(f"{job.trace}: {share} even at time scale {scale:.3g}: take more requests")
        return scale / 2, scale
    while not _serves_well(job, scale * 2):
        scale *= 2
        if scale >= MOST:
            raise TraceError(f"{job.trace}: at no load are {share}: leave out the longest with --max-input")
    return scale, scale * 2


def _serves_well(job: SimJob, time_scale: float) -> bool:
    (run,) = run_many([replace(job, time_scale=time_scale)], n_jobs=1)
    if run.goodput is None:
        raise TraceError(f"{job.trace}: no requests")
    return run.goodput.good >= AT_CAPACITY
