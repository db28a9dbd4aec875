"""Runs: one in this process, or many on all cores or a cluster; and from a run's records to its result row.

Owns how a job becomes a run, where runs happen, and the arithmetic of a row, whose shape is `gorgo.lab.results`. The
row of the floor has latencies and nothing else. Each process keeps the feed that it used last, because runs that differ
only in policy share it; jobs are handed out in such an order.
"""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import current_thread, main_thread
from time import thread_time
from typing import Any, TypeVar

import numpy as np
from joblib import Parallel, delayed, parallel_config

from gorgo.core.limits import RouterLimits
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.training.learning import find_learner
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.datasets import load_requests, own_block_tokens, unit_warning
from gorgo.lab.failures import count_cause
from gorgo.lab.prompt_text import is_keyed, largest_share
from gorgo.lab.results import ResultRow, ServedTally, Spread, load_text
from gorgo.lab.sim.engine.itl import ItlHistogram
from gorgo.lab.sim.lower_bound import LowerBound, lower_bound
from gorgo.lab.sim.oracle import make_oracle
from gorgo.lab.sim.pinned import Pinned
from gorgo.lab.sim.records import SimRecord, SimResult
from gorgo.lab.sim.scenarios import find_scenario
from gorgo.lab.sim.simulation import Controller, Simulation
from gorgo.lab.sim.training import TrainingController
from gorgo.lab.sim.workload import BLOCK_TOKENS, SimRequest, scaled
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.simulate.job import (
    FLOOR,
    ORACLE,
    PINNED,
    STEADY,
    SimJob,
    SimulatedRun,
    goodput_of,
    run_digest,
    setting_of,
)
from gorgo.lab.traces import SPAN_S_MAX, TraceFilters
from gorgo.learning.trainer import Trainer
from gorgo.policies.registry import make_policy, make_shadow


def simulated_run(job: SimJob, weights: Mapping[str, float], result: SimResult) -> SimulatedRun:
    """Return the run with the row of its result."""
    return _with_rows(job, weights, result.records, _spread_of(result.gaps), preemptions=result.preemptions)


def _with_rows(
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
        window = int((record.scheduled_s - begin_s) / length_s) if length_s > 0.0 else 0
        windows[min(window, job.windows - 1)].append(record)
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
    return _with_rows(job, None, records, Spread())


def trace_name(job: SimJob) -> str:
    """The trace's, with a named fleet and a scenario other than the steady one: rows of different ones are apart."""
    name = Path(job.trace).name
    scenario_object = None if isinstance(job.scenario, str) else job.scenario
    scenario = job.scenario if isinstance(job.scenario, str) else job.scenario.name
    unlike = [*filter(None, [job.fleet.name]), *([] if scenario == STEADY else [scenario])]
    unlike += ["no TCP windows"] if scenario_object is not None and not scenario_object.network.tcp_windows else []
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
    parts = [(tokens, record.input_tokens) for record in records if (tokens := part(record)) is not None]
    whole = sum([tokens for _, tokens in parts])
    return sum([tokens for tokens, _ in parts]) / whole if whole else None


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


Item = TypeVar("Item")
Result = TypeVar("Result")


def run_once(job: SimJob, *, controllers: Sequence[Controller] = (), policy: Policy | None = None) -> SimulatedRun:
    """One run, here and now. `controllers` act on its Router, as in `Simulation`; `policy` is run in place of the
    job's own.

    Raises `TraceError`, `UnknownPolicy`, `UnknownScenario` and the like for a wrong job.
    """
    begun_s = thread_time()
    with rare_collections():
        run = _run(job, controllers, policy)
    return replace(run, cpu_s=thread_time() - begun_s)


def run_many(jobs: Sequence[SimJob], *, n_jobs: int = -1) -> Iterator[SimulatedRun]:
    """Yield the run of each job as soon as it ends, in no order; as `parallel` does."""
    ordered = sorted(jobs, key=lambda job: (job.trace, job.seed, job.time_scale))
    yield from parallel(run_once, ordered, n_jobs=n_jobs)


def parallel(
    function: Callable[[Item], Result], items: Iterable[Item], *, n_jobs: int = -1, backend: str = "loky"
) -> Iterator[Result]:
    """Yield `function` of each item as soon as it ends, in no order. -1 is all cores; `backend` is joblib's."""
    with parallel_config(backend=backend, n_jobs=n_jobs):
        run = Parallel(return_as="generator_unordered")
        with _out_of_reach():
            results = run(delayed(function)(item) for item in items)
        yield from results


@contextmanager
def _out_of_reach() -> Iterator[None]:
    """Processes that are started meanwhile are spared Ctrl-C: this one ends them, without a traceback of each.

    They inherit that the signal is blocked. One that comes meanwhile is raised at the end: a pool that is half started
    could not be ended.
    """
    if current_thread() is not main_thread():  # only the main thread may set signal handlers
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))  # taken by another thread
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def policy_of(name: str) -> Policy:
    """A policy of the registry, or a baseline that runs as a policy."""
    if name == PINNED:
        return Pinned()
    return make_oracle() if name == ORACLE else make_policy(name)


def _run(job: SimJob, controllers: Sequence[Controller], given: Policy | None) -> SimulatedRun:
    scenario = find_scenario(job.scenario)
    fleet, routers = scenario.applied_to(job.fleet), job.routers.placed(scenario.topology)
    block_tokens = _block_tokens(job)
    feed = _reshaped(_feed(job), scenario.moved)
    if job.policy == FLOOR:
        return floor_run(
            job, feed, lower_bound(feed, fleet, block_tokens=block_tokens, topology=routers.topology, seed=job.seed)
        )
    policy = policy_of(job.policy) if given is None else given
    shadow = make_shadow(job.shadow, policy)
    weights = (
        None
        if job.weights is None
        else Weights.of(policy.weight_specs, job.weights, version=1, allow_out_of_range=True)
    )
    if routers.shells > 1 and find_learner(policy, shadow) is not None:
        raise ConfigError(f"{routers.shells} routers with a policy that learns; expected one router, or all in one")
    simulation = Simulation(
        fleet,
        policy,
        seed=job.seed,
        weights=weights,
        faults=scenario.planned(fleet, feed[-1].arrival_s if feed else 0.0),
        limits=_limits(job, block_tokens, samples=bool(controllers)),
        block_tokens=block_tokens,
        probe_interval_s=job.probe_interval_s,
        scrape_interval_s=job.scrape_interval_s,
        client_concurrency=job.client_concurrency,
        slo_ttft_s=None if job.slo_ttft_ms is None else job.slo_ttft_ms / 1e3,
        shadow=shadow,
        routers=routers,
        controllers=[*controllers, *_training(policy, shadow, job.seed)],
    )
    result = simulation.run(feed)
    span_s = feed[-1].arrival_s / job.time_scale if feed else 0.0
    warning = unit_warning(job.trace, len(feed), span_s)
    share = largest_share(one.session_id or one.prefix_hash for one in feed) if is_keyed(policy) else None
    return replace(
        simulated_run(job, dict(simulation.router.settings.weights), result), key_share=share, warning=warning
    )


def _training(policy: Policy, shadow: Policy | None, seed: int) -> Iterator[Controller]:
    """Yield what trains the policy or the shadow policy, if one of them learns."""
    if find_learner(policy, shadow) is not None:
        yield TrainingController(Trainer, seed=seed)


def _limits(job: SimJob, block_tokens: int, *, samples: bool) -> RouterLimits | None:
    """Return the Router's bounds. Samples and decisions are for controllers: the run has records of its own.

    A decision has a cell per candidate and term: a thousand of 512 replicas are 30 MB, which no cache holds.
    """
    if job.limits is None:
        return None
    limits = replace(job.limits, block_tokens=float(block_tokens))
    return limits if samples else replace(limits, max_samples=0, max_decisions=0)


def _feed(job: SimJob) -> Sequence[SimRequest]:
    if job.feed is not None:
        return _scaled(job.feed, job.trace, job.time_scale)
    filters = replace(job.filters, seed=job.seed)
    return _scaled_trace(job.trace, filters, job.seed, _block_tokens(job), job.time_scale, job.closed_loop)


def _block_tokens(job: SimJob) -> int:
    if job.block_tokens is not None:
        return job.block_tokens
    return BLOCK_TOKENS if job.feed is not None else own_block_tokens(job.trace)


def _scaled(feed: Sequence[SimRequest], trace: str, time_scale: float) -> Sequence[SimRequest]:
    span_s = (feed[-1].arrival_s if feed else 0.0) * time_scale
    if span_s > SPAN_S_MAX:  # probes and scrapes alone would keep the run busy for ever
        raise TraceError(f"{trace} takes {span_s:.3g} s at {load_text(time_scale)}; expected a year at most")
    return scaled(feed, time_scale)


@lru_cache(maxsize=2)
def _scaled_trace(
    trace: str, filters: TraceFilters, seed: int, block_tokens: int, time_scale: float, closed_loop: bool
) -> Sequence[SimRequest]:
    return _scaled(_loaded(trace, filters, seed, block_tokens, closed_loop), trace, time_scale)


@lru_cache(maxsize=2)
def _loaded(trace: str, filters: TraceFilters, seed: int, block_tokens: int, closed_loop: bool) -> Sequence[SimRequest]:
    requests = load_requests(trace, filters, seed=seed, block_tokens=block_tokens)
    if closed_loop and all(request.session is None for request in requests):
        raise TraceError(f"{trace}: no request has a session; expected session_id in rows, or --user-sessions")
    return tuple(feed_of(requests, block_tokens=block_tokens, closed_loop=closed_loop))


def _reshaped(feed: Sequence[SimRequest], reshape: Callable[[Any], Any]) -> Sequence[SimRequest]:
    before = np.array([request.arrival_s for request in feed])
    after = reshape(before)
    if after is before:
        return feed
    moved = zip(feed, after.tolist(), strict=True)
    return tuple(replace(request, arrival_s=arrival_s) for request, arrival_s in moved)
