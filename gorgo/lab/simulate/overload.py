"""Capacity of a fleet by bisection, and goodput at multiples of it.

Owns the search and the list of runs behind `gorgo overload`. Capacity is the highest load at which the policy serves
95 % of requests well (`goodput`) when each is dispatched at once. At each multiple of it two rows follow: dispatched at
once, and queued at the proxy with a deadline for the first token and a goal for the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from gorgo.core.limits import HedgeLimits, RouterLimits
from gorgo.errors import TraceError
from gorgo.lab.results import E2E_S, TTFT_MS, ResultRow, load_text
from gorgo.lab.simulate.job import Goodput, SimJob, SimulatedRun
from gorgo.lab.simulate.run import run_many

#: Share of requests that are served well at capacity.
AT_CAPACITY = 0.95
#: The search ends when the load is known to this.
EXACT = 1.05
#: Bounds of the search, as time scales.
LEAST, MOST = 1 / 64, 64.0
#: A normal load, capacity, and loads beyond.
LOADS = (0.7, 1.0, 1.3, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadRow:
    """One run at `load`, a multiple of capacity; `queueing` is whether the proxy queued requests."""

    load: float
    time_scale: float
    queueing: bool
    row: ResultRow
    goodput: Goodput

    def as_json(self) -> dict[str, Any]:
        return {
            "load": self.load,
            "time_scale": self.time_scale,
            "queueing": self.queueing,
            **self.row.as_json(),
            "goodput": self.goodput.as_json(),
        }


def at_once(limits: RouterLimits) -> RouterLimits:
    """Return the limits with every request dispatched at once, and once."""
    return replace(
        limits, overload=replace(limits.overload, queue_enabled=False), hedging=HedgeLimits(budget_ratio=0.0)
    )


def with_queue(limits: RouterLimits) -> RouterLimits:
    """Return the limits with queueing on, and with the goal of goodput where none is configured."""
    goal_s = E2E_S if limits.overload.slo_e2e_s is None else limits.overload.slo_e2e_s
    return replace(limits, overload=replace(limits.overload, queue_enabled=True, slo_e2e_s=goal_s))


def capacity_scale(job: SimJob) -> float:
    """Return the least time scale, so the highest load, that `job` serves well; exact to 5 %.

    Raises `TraceError` if the prompts take too long at any load, or if the requests are too few to overload the fleet.
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
    job: SimJob, *, capacity: float, loads: Sequence[float] = LOADS, n_jobs: int = -1
) -> list[OverloadRow]:
    """Return two rows per load, in order. `capacity` is the time scale of `job` there; see `with_queue`.

    Queued requests have the configured deadline for the first token, else that of goodput.
    """
    limits = job.limits or RouterLimits()
    deadline_ms = TTFT_MS if limits.overload.slo_ttft_s is None else limits.overload.slo_ttft_s * 1e3
    variants = {
        False: replace(job, limits=at_once(limits), slo_ttft_ms=None),
        True: replace(job, limits=with_queue(limits), slo_ttft_ms=deadline_ms),
    }
    jobs = {
        (load, queueing): replace(variant, time_scale=capacity / load)
        for load in loads
        for queueing, variant in variants.items()
    }
    runs = {_place(run.job): run for run in run_many(list(jobs.values()), n_jobs=n_jobs)}
    return list(_rows(jobs, runs))


def _rows(
    jobs: dict[tuple[float, bool], SimJob], runs: dict[tuple[float, bool], SimulatedRun]
) -> Iterator[OverloadRow]:
    for (load, queueing), job in jobs.items():
        run = runs[_place(job)]
        assert run.goodput is not None, "the feed that gave a capacity has requests"
        yield OverloadRow(load=load, time_scale=job.time_scale, queueing=queueing, row=run.row, goodput=run.goodput)


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
                raise TraceError(f"{job.trace}: {share} even at {load_text(scale)}: take more requests")
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
