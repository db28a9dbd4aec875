"""From a run's records to its result row.

Owns the arithmetic, and the setting of the garbage collector during a run; the row's shape is `gorgo.lab.results`. The
row of the floor has latencies and nothing else.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gorgo.core.limits import RouterLimits
from gorgo.errors import TraceError
from gorgo.lab.failures import count_cause
from gorgo.lab.results import ResultRow, Spread
from gorgo.lab.served import ServedTally
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.lower_bound import LowerBound
from gorgo.lab.sim.records import SimRecord, SimResult
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate.job import FLOOR, STEADY, SimJob, SimulatedRun, goodput_of, run_digest, setting_of


def simulated_run(job: SimJob, weights: Mapping[str, float], result: SimResult) -> SimulatedRun:
    """Return the run with the row of its result."""
    return _run(job, weights, result.records, _spread_of(result.gaps), preemptions=result.preemptions)


def _run(
    job: SimJob,
    weights: Mapping[str, float] | None,
    records: Sequence[SimRecord],
    itl: Spread,
    *,
    preemptions: int | None = None,
) -> SimulatedRun:
    """Return the run with its rows. Gaps between tokens are pooled over a run: of a part of it they are unknown."""
    counted, windows = _windows(job, records)
    whole = counted is records
    row = _row(job, weights, counted, itl if whole else Spread(), preemptions=preemptions if whole else None)
    parts = tuple(_row(job, weights, part, Spread(), window=number) for number, part in enumerate(windows))
    retained = counted if job.keep_requests else None
    return SimulatedRun(_without_feed(job), row, retained, goodput=goodput_of(counted), windows=parts)


def _windows(job: SimJob, records: Sequence[SimRecord]) -> tuple[Sequence[SimRecord], Sequence[Sequence[SimRecord]]]:
    """Return the records behind the warm-up, and of several windows those of each.

    Raises `TraceError` where nothing is left, or a window is empty.
    """
    if not records or (job.warm_s == 0.0 and job.windows == 1):
        return records, ()
    begin_s = min(record.scheduled_s for record in records) + job.warm_s
    counted = records if job.warm_s == 0.0 else [record for record in records if record.scheduled_s >= begin_s]
    if not counted:
        raise TraceError(f"{job.trace}: no request comes behind the first {job.warm_s:g} s; expected a shorter warm-up")
    if job.windows == 1:
        return counted, ()
    length_s = (max(record.scheduled_s for record in counted) - begin_s) / job.windows
    windows: list[list[SimRecord]] = [[] for _ in range(job.windows)]
    for record in counted:
        place = int((record.scheduled_s - begin_s) / length_s) if length_s > 0.0 else 0
        windows[min(place, job.windows - 1)].append(record)
    if not all(windows):
        raise TraceError(f"{job.trace}: no request in one of {job.windows} windows; expected fewer windows")
    return counted, windows


def floor_run(job: SimJob, feed: Sequence[SimRequest], floor: LowerBound) -> SimulatedRun:
    """The same shape for the floor: no replica, no cache, nothing that failed."""
    records = [
        SimRecord(
            id=str(request.index),
            scheduled_s=request.arrival_s,
            sent_s=request.arrival_s,
            input_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            ttft_ms=ttft_s * 1e3,
            e2e_s=e2e_s,
            status=200,
        )
        for request, ttft_s, e2e_s in zip(feed, floor.ttft_s.tolist(), floor.e2e_s.tolist(), strict=True)
    ]
    return _run(job, None, records, Spread())


def trace_name(job: SimJob) -> str:
    """The trace's, with a named fleet and a scenario other than the steady one: rows of different ones are apart."""
    name = Path(job.trace).name
    own = None if isinstance(job.scenario, str) else job.scenario
    scenario = job.scenario if isinstance(job.scenario, str) else job.scenario.name
    unlike = [*filter(None, [job.fleet.name]), *([] if scenario == STEADY else [scenario])]
    unlike += ["no TCP windows"] if own is not None and not own.network.tcp_windows else []
    unlike += ["closed loop"] if job.closed_loop else []
    return f"{name} ({', '.join(unlike)})" if unlike else name


def _row(
    job: SimJob,
    weights: Mapping[str, float] | None,
    records: Sequence[SimRecord],
    itl: Spread,
    *,
    preemptions: int | None = None,
    window: int | None = None,
) -> ResultRow:
    good = [record for record in records if record.error is None]
    tally = ServedTally()
    for record in records:
        tally.add(record)
    setting = setting_of(job)
    return ResultRow(
        trace=trace_name(job),
        time_scale=job.time_scale,
        policy=job.policy,
        weights=weights,
        seed=job.seed,
        source="simulated",
        n=len(records),
        errors=len(records) - len(good),
        ttft_ms=Spread.of([record.ttft_ms for record in good if record.ttft_ms is not None]),
        e2e_s=Spread.of([record.e2e_s for record in good if record.e2e_s is not None]),
        itl_ms=itl,
        cache_hit=_share(good, lambda record: record.cached_tokens),
        cache_hit_estimated=_share(good, lambda record: record.estimated_cached_tokens),
        share=_shares(good),
        prediction_error_ms=Spread.of(
            [
                abs(record.predicted_ttft_ms + record.client_network_ms - record.ttft_ms)
                for record in good
                if record.predicted_ttft_ms is not None and record.ttft_ms is not None
            ]
        ),
        slip_ms_p95=0.0 if records else None,
        planned=len(records),
        failures=_failures(records),
        preemptions=preemptions,
        queue=_queued(job, records),
        setting=setting,
        digest=run_digest(job, setting, weights, window),
        window=window,
        **tally.fields(),
    )


def _queued(job: SimJob, records: Sequence[SimRecord]) -> bool | None:
    """Return whether the proxy queued: by the limits, and where only policies that predict queue, by what happened."""
    if job.policy == FLOOR:
        return None
    overload = (job.limits or RouterLimits()).overload
    if overload.queue_enabled and not overload.queue_every_policy:
        return any(record.queued_s > 0.0 for record in records)
    return overload.queue_enabled


def _failures(records: Sequence[SimRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            count_cause(counts, record.error)
    return counts


def _shares(records: Sequence[SimRecord]) -> dict[str, float]:
    served = Counter(record.replica for record in records if record.replica is not None)
    return {name: count / served.total() for name, count in sorted(served.items())}


def _share(records: Sequence[SimRecord], part: Any) -> float | None:
    """Of prompt tokens, over the requests for which it is known."""
    known = [(tokens, record.input_tokens) for record in records if (tokens := part(record)) is not None]
    whole = sum([tokens for _, tokens in known])
    return sum([tokens for tokens, _ in known]) / whole if whole else None


def _spread_of(gaps: ItlHistogram) -> Spread:
    if not gaps.count:
        return Spread()
    return Spread(gaps.mean_s * 1e3, *(gaps.quantile_s(share) * 1e3 for share in (0.5, 0.95, 0.99)))


def _without_feed(job: SimJob) -> SimJob:
    return replace(job, feed=None)


# Python's garbage collector during a simulated run.
#
# A run frees what it drops by reference counts. It leaves a few hundred objects in cycles, and three per decision of
# the oracle. By default the collector visits all living objects again and again, for a sixth of the run's processor
# time.


#: New objects before a collection. A run of 7,000 requests makes fewer; a longer one has at most 200 MB in cycles.
NEW_OBJECTS = 1_000_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect after `NEW_OBJECTS` meanwhile; the setting is the process's, and is restored."""
    before = gc.get_threshold()
    if not 0 < before[0] < NEW_OBJECTS:  # switched off, or another thread's run has set it
        yield
        return
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
