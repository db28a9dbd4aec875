"""One run of a policy with one source of cached tokens, and its figures.

The first requests are not measured: caches are cold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import thread_time
from typing import Literal, cast

import numpy as np

from gorgo.apps.cache_sources.audit import AuditedDecision, AuditedPolicy
from gorgo.apps.cache_sources.fleets import CacheFleet
from gorgo.apps.cache_sources.indexed import IndexedPolicy
from gorgo.apps.cache_sources.traffic import ChatTraffic, Traffic, feed_of_traffic
from gorgo.apps.claims.run_cache import run_key
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate import SimJob
from gorgo.apps.simulate.collector import rare_collections
from gorgo.apps.simulate.rows import simulated_run
from gorgo.core.limits import RouterLimits
from gorgo.core.policy.interface import IndexKind, Policy
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import make_policy
from gorgo.sim.extensions import Startable
from gorgo.sim.kv_events.reports import CacheReports
from gorgo.sim.records import SimRecord, SimResult
from gorgo.sim.simulation import Simulation

#: Share of the requests that are not measured.
WARM_UP = 0.3
#: Length of a slice of a run, s.
SLICE_S = 5.0
#: Bytes of a message, a hash and a token. Of events in msgpack: a token takes 3 or 5 bytes by its id, 4 on average. Of
#: pushes in JSON.
_EVENT_BYTES, _PUSH_BYTES = (60, 9, 4), (120, 21, 0)
_MAX_IN_FLIGHT = 100_000

#: Where the cached tokens of a decision come from. `unbounded`: dispatched prompts, never evicted. `bounded`: those
#: within each KV pool. `cached_tokens`: corrected by the engines' usage. `push` and `events`: reports. `exact`: the
#: engines' caches without delay.
Source = Literal["unbounded", "bounded", "cached_tokens", "push", "events", "exact"]
SOURCES: Mapping[Source, tuple[IndexKind, CacheReports]] = {
    "unbounded": ("published", "none"),
    "bounded": ("bounded", "none"),
    "cached_tokens": ("bounded", "usage"),
    "push": ("events", "push"),
    "events": ("events", "events"),
    "exact": ("events", "exact"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTask:
    """One policy with one source on one fleet and traffic; `audited`: with the audit of every decision."""

    policy: str
    source: Source
    fleet: CacheFleet
    traffic: Traffic
    weights: tuple[tuple[str, float], ...] = ()
    faults: tuple[Startable, ...] = ()
    audited: bool = False
    seed: int = 0

    def cache_key(self) -> str:
        """Return the key of the run."""
        folder = Path(__file__).parent
        code = [folder / name for name in ("audit.py", "fleets.py", "measure.py", "prompts.py", "traffic.py")]
        traces = [self.traffic.trace] if isinstance(self.traffic, ChatTraffic) else []
        return run_key(self.policy, traces, [self], code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSlice:
    """Figures of the requests that arrived within a slice, and of their decisions.

    `phantom` is a share of the tokens estimated on all replicas, `missed` of those cached there; `hit` of the prompts.
    """

    begins_s: float
    n: int
    phantom: float
    missed: float
    hit: float
    ttft_ms_p95: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRun:
    """Figures of a run.

    `row` is of the measured requests. `phantom` and `missed` are the tokens estimated and not found, and found and not
    estimated, as shares of the prompt tokens. `bytes_per_request` are those of reports, `None` without any.
    `eviction_delays_ms` are p50, p95 and p99 by region.
    """

    row: ResultRow
    phantom: float
    missed: float
    slices: Sequence[CacheSlice]
    bytes_per_request: float | None
    eviction_delays_ms: Mapping[str, Sequence[float]]
    cpu_s: float


def measure(task: CacheTask) -> CacheRun:
    """Run the task in this process."""
    begun_s = thread_time()
    feed = feed_of_traffic(task.traffic, task.seed)
    index, reports = SOURCES[task.source]
    policy = _with_index(make_policy(task.policy), index)
    audited = AuditedPolicy(policy) if task.audited else None
    with rare_collections():
        simulation = Simulation(
            task.fleet.sim_fleet(),
            policy if audited is None else cast(Policy, audited),
            seed=task.seed,
            weights=Weights.of(policy.weight_specs, dict(task.weights), version=1, allow_out_of_range=True),
            limits=RouterLimits(
                block_tokens=float(task.traffic.block_tokens), max_in_flight=_MAX_IN_FLIGHT, max_samples=0
            ),
            block_tokens=task.traffic.block_tokens,
            faults=task.faults,
            cache_reports=reports,
        )
        result = simulation.run(feed)
    measured = result.records[int(len(result.records) * WARM_UP) :]
    phantom, missed, _ = _errors(measured)
    return CacheRun(
        row=_row(task, replace(result, records=measured)),
        phantom=phantom,
        missed=missed,
        slices=_slices(result.records, audited.decisions) if audited else (),
        bytes_per_request=_bytes_per_request(task, simulation, len(feed)),
        eviction_delays_ms=_delays(simulation),
        cpu_s=thread_time() - begun_s,
    )


def _with_index(policy: Policy, index: IndexKind) -> Policy:
    """Return the policy with another source of cached tokens, if it reads them at all."""
    return policy if policy.index in ("any", index) else cast(Policy, IndexedPolicy(policy, index))


def _row(task: CacheTask, result: SimResult) -> ResultRow:
    job = SimJob(trace=task.traffic.name, policy=task.policy, fleet=task.fleet.sim_fleet(), seed=task.seed)
    return simulated_run(job, {}, result).row


def _errors(records: Sequence[SimRecord]) -> tuple[float, float, float]:
    """Return phantom, missed and found tokens of the last attempts as shares of the prompt tokens."""
    pairs = [
        (record.estimated_cached_tokens or 0, record.cached_tokens)
        for record in records
        if record.cached_tokens is not None
    ]
    whole = sum(record.input_tokens for record in records if record.cached_tokens is not None) or 1
    phantom = sum(max(0, estimated - found) for estimated, found in pairs)
    missed = sum(max(0, found - estimated) for estimated, found in pairs)
    return phantom / whole, missed / whole, sum(found for _, found in pairs) / whole


def _slices(records: Sequence[SimRecord], decisions: Sequence[AuditedDecision]) -> list[CacheSlice]:
    by_slice: dict[int, list[SimRecord]] = {}
    for record in records:
        by_slice.setdefault(int(record.scheduled_s / SLICE_S), []).append(record)
    made: dict[int, list[AuditedDecision]] = {}
    for decision in decisions:
        made.setdefault(int(decision.at_s / SLICE_S), []).append(decision)
    found = []
    for number, part in sorted(by_slice.items()):
        audited = made.get(number, [])
        phantom = sum(one.phantom_tokens for one in audited) / (sum(one.estimated_tokens for one in audited) or 1.0)
        missed = sum(one.missed_tokens for one in audited) / (sum(one.cached_tokens for one in audited) or 1.0)
        _, _, hit = _errors(part)
        ttft_ms = [record.ttft_ms for record in part if record.ttft_ms is not None]
        p95 = float(np.quantile(ttft_ms, 0.95)) if ttft_ms else None
        found.append(
            CacheSlice(begins_s=number * SLICE_S, n=len(part), phantom=phantom, missed=missed, hit=hit, ttft_ms_p95=p95)
        )
    return found


def _bytes_per_request(task: CacheTask, simulation: Simulation, requests: int) -> float | None:
    totals = [feed.path.totals for feed in simulation.caches.feeds.values()]
    if not totals or task.source == "exact":
        return None
    message, per_hash, per_token = _PUSH_BYTES if task.source == "push" else _EVENT_BYTES
    sent = sum(one.messages * message + one.hashes * per_hash + one.tokens * per_token for one in totals)
    return sent / requests


def _delays(simulation: Simulation) -> dict[str, list[float]]:
    """Return p50, p95 and p99 of the time until an eviction is known, ms, by region."""
    by_region: dict[str, list[float]] = {}
    for name, feed in simulation.caches.feeds.items():
        region = simulation.engines[name].replica.region
        by_region.setdefault(region, []).extend(feed.path.totals.eviction_delays_s)
    return {
        region: [float(1e3 * one) for one in np.quantile(delays_s, (0.5, 0.95, 0.99))]
        for region, delays_s in by_region.items()
        if delays_s
    }
