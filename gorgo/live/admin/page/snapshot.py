"""The data of the status page and of `/admin/status`: one snapshot of a proxy, read from its parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.samples import Sample
from gorgo.live.admin.differences import Difference, differences
from gorgo.live.admin.page.alerts import Alert, Condition, alerts, condition_of
from gorgo.live.admin.page.recent_stats import (
    RECENT_S,
    RECENT_SAMPLES,
    RecentStats,
    TimeBin,
    recent_stats,
    ttft_series,
)
from gorgo.live.cache_states import CacheState
from gorgo.live.control.state_file import Frozen
from gorgo.live.control.transactions import WeightsChange
from gorgo.live.state import LiveState
from gorgo.live.telemetry.client_usage import ClientRow
from gorgo.live.telemetry.probe_history import ProbeTime

#: Enough to see a pattern; the rest is at `/admin/decisions/{request_id}`.
DECISIONS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica: the Router's snapshot, health, recent requests and probes."""

    view: ReplicaSnapshot
    condition: Condition
    stats: RecentStats
    probes: tuple[ProbeTime, ...]
    #: Name, version, and whether they were found by asking.
    engine: Mapping[str, object] = field(default_factory=dict)
    #: By the admin API, not in regions.yaml.
    registered: bool = False
    #: What is known of its cache (`cache_states`).
    cache: CacheState | None = None

    def as_dict(self) -> dict[str, Any]:
        trips = [[at_s, None if rtt_s is None else rtt_s * 1e3] for at_s, rtt_s in self.probes]
        result = {"health_state": self.condition.word, "reason": self.condition.why, "recent_stats": asdict(self.stats)}
        more = {"registered": self.registered, "probes": trips, "engine": self.engine}
        more["cache"] = None if self.cache is None else self.cache.as_dict()
        return self.view.as_dict() | result | more


@dataclass(frozen=True, slots=True)
class DecisionStatus:
    """A decision and its outcome: a sample once the request has ended, unless it was retried."""

    decision: Decision
    region: str | None
    sample: Sample | None
    followed: bool

    @property
    def error_ms(self) -> float | None:
        """Return observed minus predicted TTFT."""
        predicted_s, sample = self.decision.predicted_ttft_s, self.sample
        if predicted_s is None or sample is None or sample.ttft_ms is None:
            return None
        return sample.ttft_ms - predicted_s * 1e3

    def as_dict(self) -> dict[str, Any]:
        outcome = {"followed": self.followed, "error_ms": self.error_ms}
        sample = None if self.sample is None else asdict(self.sample)
        return self.decision.as_dict() | {"region": self.region, "sample": sample} | outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One proxy at one moment."""

    boot_id: str
    region: str
    now: float
    up_s: float
    stopping: bool
    in_flight: int
    queued: int
    alerts: Sequence[Alert]
    stats: RecentStats
    #: Window of `stats`, s.
    span_s: float
    ttft_series: Sequence[TimeBin]
    #: Regions with replicas, in the configuration's order.
    regions: Mapping[str, Sequence[ReplicaStatus]]
    unreachable_regions: frozenset[str]
    policy: str
    unit: str
    version: int
    weights: Mapping[str, float]
    bounds: Mapping[str, tuple[float, float]]
    frozen: Frozen | None
    durable: bool
    #: Where what runs differs from regions.yaml.
    differences: Sequence[Difference]
    #: Oldest first.
    history: Sequence[WeightsChange]
    #: Newest first.
    decisions: Sequence[DecisionStatus]
    #: The last minute of each client, most tokens first; empty while clients need no key.
    clients: Sequence[ClientRow] = ()
    #: The link to the store of several routers, and the others (`peer_store`); `None` without one.
    store: Mapping[str, Any] | None = None
    #: As in `GET /admin/fleet`.
    fleet_sources: Sequence[Mapping[str, Any]] = ()

    @property
    def per_s(self) -> float | None:
        """Return recently finished requests per second."""
        return self.stats.n / self.span_s if self.span_s > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `/admin/status`; `replicas` and `routing` extend those of `/admin/fleet`."""
        rows = [row for replicas in self.regions.values() for row in replicas]
        return {
            "boot_id": self.boot_id,
            "region": self.region,
            "now_s": self.now,
            "up_s": self.up_s,
            "stopping": self.stopping,
            "in_flight": self.in_flight,
            "queued": self.queued,
            "alerts": [asdict(alert) for alert in self.alerts],
            "recent_stats": asdict(self.stats) | {"span_s": self.span_s, "per_s": self.per_s},
            "ttft_series": [asdict(one) for one in self.ttft_series],
            "routing": {
                "policy": self.policy,
                "unit": self.unit,
                "version": self.version,
                "weights": dict(self.weights),
                "bounds": {name: list(box) for name, box in self.bounds.items()},
                "frozen": None if self.frozen is None else self.frozen.as_dict(),
                "durable": self.durable,
            },
            "differences": [asdict(one) | {"text": str(one)} for one in self.differences],
            "history": [change.as_dict() for change in self.history],
            "unreachable_regions": sorted(self.unreachable_regions),
            "replicas": [row.as_dict() for row in rows],
            "fleet_sources": list(self.fleet_sources),
            "clients": [asdict(row) for row in self.clients],
            "peer_store": self.store,
            "decisions": [row.as_dict() for row in self.decisions],
        }


def take_snapshot(state: LiveState) -> Snapshot:
    """Return the status now. Bounded: it takes milliseconds of the event loop at most."""
    router, control, now = state.routing.router, state.routing.control, state.routing.clock()
    views = router.view.snapshots(now=now)
    samples = recent_stats(router.samples.newest(RECENT_SAMPLES), now=now)
    stats = RecentStats.of(samples)
    specs = router.settings.policy.weight_specs
    differing, missing = differences(state), state.why_not_ready()
    store = None if state.routing.peer_store is None else state.routing.peer_store.as_dict()
    sources = state.replicas.found.as_rows(now)
    return Snapshot(
        boot_id=router.boot_id,
        region=state.config.proxy.region,
        now=now,
        up_s=now - state.started_s,
        stopping=state.stopping,
        in_flight=router.in_flight,
        queued=router.queued,
        alerts=alerts(
            views,
            stats,
            unreachable_regions=router.view.unreachable_regions,
            queued=router.queued,
            stopping=state.stopping,
            config_refused=state.telemetry.metrics.config.refused,
            out_of_range=router.settings.weights.out_of_range(specs),
            replicas={replica.name: replica for replica in state.config.replicas},
            not_ready=None if missing is None else missing.message,
            waiting=[str(difference) for difference in differing if difference.waits],
            failures={name: target.last_failure for name, target in state.replicas.targets.items()},
            store=store,
            sources=sources,
        ),
        stats=stats,
        span_s=_span_s(samples, now=now, up_s=now - state.started_s),
        ttft_series=ttft_series(samples, now=now, up_s=now - state.started_s),
        regions=_regions(state, views, samples),
        unreachable_regions=router.view.unreachable_regions,
        policy=router.settings.policy.name,
        unit=router.settings.policy.unit,
        version=router.settings.weights.version,
        weights=dict(router.settings.weights),
        bounds={spec.name: (spec.low, spec.high) for spec in specs},
        frozen=control.frozen,
        durable=control.durable,
        differences=differing,
        history=control.history,
        decisions=decision_rows(router.view.newest_decisions(DECISIONS_SHOWN), samples, views),
        fleet_sources=sources,
        store=store,
        clients=() if state.routing.client_keys is None else state.telemetry.metrics.clients.last_minute(),
    )


def _span_s(samples: Sequence[Sample], *, now: float, up_s: float) -> float:
    """Return the window's length, shorter after a start or with many requests."""
    if len(samples) == RECENT_SAMPLES:
        return now - samples[-1].finished_s
    return min(RECENT_S, up_s)


def _regions(
    state: LiveState, views: Sequence[ReplicaSnapshot], samples: Sequence[Sample]
) -> dict[str, list[ReplicaStatus]]:
    by_replica: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_replica[sample.replica].append(sample)
    caches = state.cache_states()
    rows: dict[str, list[ReplicaStatus]] = {region.name: [] for region in state.config.regions}
    for view in views:
        stats = RecentStats.of(by_replica.get(view.name, ()))
        row = ReplicaStatus(
            view,
            condition_of(view, state.replicas.targets[view.name].last_failure),
            stats,
            state.telemetry.probe_history.for_replica(view.name),
            state.replicas.targets[view.name].engine,
            view.name in state.routing.control.registered,
            caches.get(view.name),
        )
        rows.setdefault(view.region, []).append(row)
    return {region: replicas for region, replicas in rows.items() if replicas}


def decision_rows(
    decisions: Sequence[Decision], samples: Sequence[Sample], views: Sequence[ReplicaSnapshot]
) -> list[DecisionStatus]:
    """Return the rows of `decisions`, newest first, each with its sample among `samples`, newest first.

    Ids can repeat, so a sample of a decision ended after it.
    """
    regions = {view.name: view.region for view in views}
    wanted = {decision.request_id for decision in decisions}
    finished: dict[str, Sample] = {}
    for sample in samples:
        if sample.request_id in wanted:
            finished.setdefault(sample.request_id, sample)
    last: dict[str, int] = {}
    rows: list[DecisionStatus] = []
    for decision in decisions:
        key = decision.request_id
        followed = last.get(key, 0) > decision.attempt
        last[key] = decision.attempt
        found = finished.get(key)
        mine = found is not None and found.finished_s >= decision.decided_s and found.replica == decision.replica
        rows.append(DecisionStatus(decision, regions.get(decision.replica), found if mine else None, followed))
    return rows
