"""The data of the status page and of `/admin/status`: one snapshot of a proxy, read from its parts.

Owns the snapshot (`gather_snapshot`), the differences from regions.yaml (`differences`), and what is worth an alert
(`alerts`). Leaves the markup to `document` and `sections`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from operator import attrgetter
from typing import Any

from gorgo import formatting
from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import SharedConfig
from gorgo.config.replica_advice import remedy, scrape_warnings, without_api_path
from gorgo.core.dispatch.in_flight import PoisonPrompt
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.latency.decode import SLOW_DECODE
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import Sample
from gorgo.core.policy.interface import RouteStats
from gorgo.core.prompt.fingerprint import PartedHeads
from gorgo.core.scaling import WantedReplicas
from gorgo.formatting import counted, first_names
from gorgo.live.control.state_file import Frozen
from gorgo.live.control.transactions import WeightsChange
from gorgo.live.state import CacheState, LiveState
from gorgo.live.telemetry.counters import ClientRow
from gorgo.live.telemetry.health import (
    RECENT_S,
    RECENT_SAMPLES,
    ProbeTime,
    RecentStats,
    TimeBin,
    recent_stats,
    ttft_series,
)
from gorgo.live.workers.link import WorkerRow

# Differences of a running proxy from regions.yaml: policy, weights, drain marks, and keys that need a restart.


_LIVE = "set at run time; an edit of the file replaces it"
_RESTART = "needs a restart"
#: Keys that are read once, below `proxy`.
_BOUND = ("bind", "admin_bind", "tracing.endpoint", "tracing.sample_ratio")
#: And below `picker`, for `gorgo picker`.
_PICKER = ("bind", "tls.cert", "tls.key", "hold_s")

Value = str | float | bool | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose value in force is not that of the file."""

    key: str
    in_file: Value
    in_force: Value
    why: str
    #: An edit of the file is not in force, as opposed to a change at run time.
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.key} is {_shown(self.in_force)}, in regions.yaml {_shown(self.in_file)}: {self.why}"


def differences(state: LiveState) -> list[Difference]:
    """Return all differences, those that wait first."""
    waiting_first = [*_routing(state), *_drain_marks(state), *_restart(state)]
    return sorted(waiting_first, key=lambda difference: not difference.waits)


def _routing(state: LiveState) -> Iterator[Difference]:
    router, control, file = state.routing.router, state.routing.control, state.file_config.proxy
    waits = control.file.pending is not None
    why = "frozen; `gorgo unfreeze` applies the file" if waits else _LIVE if control.frozen is None else "frozen"
    if router.settings.policy.name != file.policy:
        yield Difference("proxy.policy", file.policy, router.settings.policy.name, why, waits)
    else:
        for spec in router.settings.policy.weight_specs:
            configured, running = file.weights.get(spec.name, spec.default), router.settings.weights[spec.name]
            if configured != running:
                yield Difference(f"proxy.weights.{spec.name}", configured, running, why, waits)
    shadow = None if router.settings.shadow is None else router.settings.shadow.name
    if shadow != file.shadow_policy:
        yield Difference("proxy.shadow_policy", file.shadow_policy, shadow, "does not fit the policy in force", True)


def _drain_marks(state: LiveState) -> Iterator[Difference]:
    marked = state.routing.router.view.draining()
    for replica in state.file_config.replicas:
        draining = replica.name in marked
        if draining != replica.draining and replica.name in state.replicas.targets:
            yield Difference(f"replicas.{replica.name}.draining", replica.draining, draining, _LIVE)


def _restart(state: LiveState) -> Iterator[Difference]:
    file, running = state.file_config.proxy, state.config.proxy
    for key in _BOUND:
        in_file, in_force = attrgetter(key)(file), attrgetter(key)(running)
        if in_file != in_force:
            yield Difference(f"proxy.{key}", in_file, in_force, _RESTART, True)
    if (file.tls.cert is None) != (running.tls.cert is None):
        yield Difference("proxy.tls.cert", file.tls.cert, running.tls.cert, _RESTART, True)
    for key in _PICKER:
        in_file, in_force = (attrgetter(key)(each.picker) for each in (state.file_config, state.config))
        if in_file != in_force:
            yield Difference(f"picker.{key}", in_file, in_force, _RESTART, True)
    for shared in fields(SharedConfig):
        in_file, in_force = (getattr(each.shared, shared.name, None) for each in (state.file_config, state.config))
        if in_file != in_force:
            yield Difference(f"shared.{shared.name}", in_file, in_force, _RESTART, True)


def _shown(value: Value) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "not set"}[value]
    return f"{value:g}" if isinstance(value, float) else value


# The health of each replica in a word, and the alerts of the page.


#: Ratio of failed requests above which they are an alert.
FAILED_SHARE = 0.01

_EJECTED = {
    "attempts": "requests to it failed",
    "refusals": "it refuses what other replicas answer",
    "answers": "its answers broke off or were too short",
    "busy": "its engine was busy for too long",
    "probes": "it does not answer probes",
    "region": "its whole region stopped answering",
}


#: Replicas named in an alert.
NAMES_SHOWN = 4
#: Poison prompts with a line of their own; a client can make many of them.
MOST_POISON = 3

#: States that are a warning, as they follow the replica's name.
_WARNINGS = {
    "draining": " is draining",
    "failing": "",
    "overdue": " is late",
    "slow": " is slow",
    "slow start": " is warming up",
}


@dataclass(frozen=True, slots=True)
class Condition:
    """The health of a replica in a word, and the reason unless it is ready."""

    word: str
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Alert:
    """One line; `level` is `bad` where requests suffer, `warn` where they might."""

    level: str
    text: str


def condition_of(view: ReplicaSnapshot, failure: str | None = None) -> Condition:
    """Return ready, slow start, slow, overdue, failing, draining, ejected or on trial.

    `failure` is the cause of its last failure.
    """
    if view.state == "draining":
        left = f"{view.in_flight_requests} in flight" if view.in_flight_requests else "none in flight"
        return Condition("draining", f"no new requests, {left}")
    cause = view.ejected_why or failure
    cause = "" if cause is None else f" ({cause})"
    because = _EJECTED.get(view.ejected_by or "", "it failed") + cause
    if view.state == "ejected":
        return Condition("ejected", f"{because}; retried in {view.ejected_for_s or 0:.0f} s")
    if view.state == "half_open":
        return Condition("on trial", f"{because}; the next response decides")
    if view.failures_in_a_row:
        return Condition("failing", f"{counted(view.failures_in_a_row, 'failure')} in a row{cause}")
    if view.overdue_requests:
        named = ", ".join(view.overdue) + (", ..." if view.overdue_requests > len(view.overdue) else "")
        late = f"no answer to {counted(view.overdue_requests, 'request')} for up to {view.overdue_for_s or 0:.0f} s"
        return Condition("overdue", f"{late} longer than expected: {named}")
    if (slower := view.decode_slowdown) is not None and slower >= SLOW_DECODE:
        return Condition(
            "slow", f"decodes {slower:.1f} times slower than the others: {view.tpot_ms or 0:.0f} ms a token"
        )
    if view.slow_start_for_s is not None:
        most = f"at most {counted(view.slow_start_in_flight or 0, 'request')}"
        return Condition("slow start", f"{most} for another {ceil(view.slow_start_for_s)} s")
    return Condition("ready")


def alerts(
    views: Sequence[ReplicaSnapshot],
    stats: RecentStats,
    *,
    unreachable_regions: frozenset[str],
    queued: int,
    stopping: bool,
    config_refused: bool,
    out_of_range: Sequence[str],
    replicas: Mapping[str, ReplicaConfig],
    not_ready: str | None = None,
    waiting: Sequence[str] = (),
    failures: Mapping[str, str | None] | None = None,
    sources: Iterable[Mapping[str, Any]] = (),
    store: Mapping[str, Any] | None = None,
    poison: Sequence[PoisonPrompt] = (),
    now: float = 0.0,
    signals: Sequence[str] = (),
    unused: Mapping[str, Sequence[str]] | None = None,
    workers: Iterable[WorkerRow] = (),
) -> list[Alert]:
    """Return all alerts, worst first.

    `failures` has the cause of a replica's last failure, `not_ready` why no request could be served, `sources` the rows
    of fleet sources, `store` the link to the store of several routers, `poison` the prompts that replicas went down
    under, as of `now`, `signals` what is older than the policy needs, `unused` the replicas
    whose reports of caches no decision uses, by the reason, `workers` the processes of the router.
    """
    failures = failures or {}
    active = [
        *_of_refusals(views, replicas),
        *_of_proxy(stopping=stopping, config_refused=config_refused),
        *_of_fleet(views, unreachable_regions, not_ready),
        *_of_poison(poison, now),
        *_of_traffic(stats, queued),
        *(alert for view in views for alert in _of_replica(view, unreachable_regions, failures.get(view.name))),
    ]
    active += [alert for source in sources for alert in _of_source(source)]
    active += [] if store is None else _of_store(store)
    active += [
        Alert(
            "warn",
            f"Process {worker.number} is {worker.state}, after {counted(worker.restarts, 'end')} that nobody asked for",
        )
        for worker in workers
        if worker.restarts and worker.state != "ready"
    ]
    active += [Alert("warn", f"Edit not in force: {text}") for text in waiting]
    active += [Alert("warn", text) for text in signals]
    active += [
        Alert("warn", f"Reports of caches are not used ({first_names(names, NAMES_SHOWN)}): history: {reason}")
        for reason, names in (unused or {}).items()
    ]
    if out_of_range:
        active.append(Alert("warn", f"Weights outside the policy's box: {', '.join(out_of_range)}"))
    return sorted(active, key=lambda alert: alert.level != "bad")


def _of_refusals(views: Sequence[ReplicaSnapshot], replicas: Mapping[str, ReplicaConfig]) -> Iterator[Alert]:
    """First of all: such a replica never gets well by itself, because its configuration is at fault."""
    for view in views:
        if view.refusal is not None:
            advice = _remedy(view, view.refusal, replicas.get(view.name))
            yield Alert("bad", f"{view.name} answers {view.refusal}{'' if advice is None else f': {advice}'}")


def _remedy(view: ReplicaSnapshot, status: int, replica: ReplicaConfig | None) -> str | None:
    if replica is None:
        return None
    if status == 404 and view.answers and replica.url.rstrip("/") == without_api_path(replica.url):
        return f"compare the model's name in requests and its models with {replica.url}/v1/models"
    return remedy(status, url=replica.url, api_key_env=replica.api_key_env)


def _of_proxy(*, stopping: bool, config_refused: bool) -> Iterator[Alert]:
    if stopping:
        yield Alert("bad", "This proxy is stopping: open requests may finish, new ones are rejected")
    if config_refused:
        yield Alert("warn", "The newest regions.yaml was refused; the log has the reason")


def _of_fleet(
    views: Sequence[ReplicaSnapshot], unreachable_regions: Iterable[str], not_ready: str | None
) -> Iterator[Alert]:
    if not_ready is not None:
        yield Alert("bad", f"{not_ready[0].upper()}{not_ready[1:]}")
    elif any(view.panic for view in views):
        yield Alert(
            "bad", "Too few replicas are healthy: ejected ones are retried soon, and used if no other is eligible"
        )
    for region in sorted(unreachable_regions):
        yield Alert("bad", f"Region {region} is unreachable: no replica there answers a probe")


def _of_poison(poison: Sequence[PoisonPrompt], now: float) -> Iterator[Alert]:
    for one in poison[:MOST_POISON]:
        sender = "" if one.client is None else f" of client {one.client}"
        yield Alert(
            "bad",
            f"{' and '.join(one.replicas)} went down under the prompt of request {one.request_id}{sender}: "
            f"it is answered 502 for another {ceil(one.until_s - now)} s",
        )
    if len(poison) > MOST_POISON:
        yield Alert("bad", f"{counted(len(poison) - MOST_POISON, 'more prompt')} under which replicas went down")


def _of_traffic(stats: RecentStats, queued: int) -> Iterator[Alert]:
    if stats.n and stats.failed / stats.n >= FAILED_SHARE:
        yield Alert("bad", f"{stats.failed} of the last {stats.n} requests failed")
    if queued:
        yield Alert("warn", f"{queued} {_requests(queued)} for a replica")


def _of_replica(view: ReplicaSnapshot, unreachable_regions: frozenset[str], failure: str | None) -> Iterator[Alert]:
    how = condition_of(view, failure)
    if how.word in ("ejected", "on trial") and view.region not in unreachable_regions:
        yield Alert("bad" if how.word == "ejected" else "warn", f"{view.name} is {how.word}: {how.why}")
    elif how.word in _WARNINGS:
        yield Alert("warn", f"{view.name}{_WARNINGS[how.word]}: {how.why}")
    if view.rtt_ms is None and how.word != "ejected":
        yield Alert("warn", f"{view.name}: unknown RTT: no recent probe was answered")


def _of_source(source: Mapping[str, Any]) -> Iterator[Alert]:
    name, n = source["name"], source["problem_count"]
    if source["error"] is not None:
        stay = f"; its {counted(source['replicas'], 'replica')} stay{'s' if source['replicas'] == 1 else ''}"
        yield Alert("warn", f"Fleet source {name} is down: {source['error']}{stay if source['replicas'] else ''}")
    if n:
        more = f" (and {n - 1} more)" if n > 1 else ""
        yield Alert("warn", f"Fleet source {name}: no replica of {source['problems'][0]}{more}")


def _of_store(store: Mapping[str, Any]) -> Iterator[Alert]:
    if store["fault"] is not None:
        line = formatting.store_line(store)
        yield Alert("warn", f"{line[0].upper()}{line[1:]} ({store['error']})")
    for peer in store["peers"]:
        if peer["differences"]:
            yield Alert("warn", f"Router {peer['router']}: {'; '.join(peer['differences'].values())}")


def _requests(n: int) -> str:
    return "request is queued" if n == 1 else "requests are queued"


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
    #: Answers that broke off since the start, by whether they went on elsewhere, each by reason.
    streams: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    #: Where the newest prompts part although they go on alike.
    prompt_heads: Sequence[PartedHeads] = ()
    #: Routes of the policy; `None` for one without routes of its own.
    routes: RouteStats | None = None
    #: As in `GET /admin/fleet`.
    fleet_sources: Sequence[Mapping[str, Any]] = ()
    #: Wanted replicas by region and model; none without an objective.
    scaling: Sequence[WantedReplicas] = ()
    #: Of the router; none for one of one process.
    workers: Sequence[WorkerRow] = ()

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
            "scaling": [row.as_dict() for row in self.scaling],
            "clients": [asdict(row) for row in self.clients],
            "peer_store": self.store,
            "workers": [row.as_dict() for row in self.workers],
            "streams": self.streams,
            "prompt_heads": [asdict(row) for row in self.prompt_heads],
            "routes": None if self.routes is None else asdict(self.routes),
            "decisions": [row.as_dict() for row in self.decisions],
        }


# What of the status each worker of a router has a part of.


#: By replica: requests and prompt tokens in flight, tokens before their first content, and their prefill, s. Under no
#: name: requests in flight and queued.
Loads = Mapping[str, tuple[float, ...]]


def own_loads(state: LiveState) -> Loads:
    """Return the part of this worker."""
    router = state.routing.router
    loads: dict[str, tuple[float, ...]] = {"": (router.in_flight, router.queued)}
    for view in router.view.snapshots(now=state.routing.clock()):
        load = (view.in_flight_requests, view.in_flight_tokens, view.queued_prefill_tokens, view.backlog_s)
        if any(load):
            loads[view.name] = load
    return loads


async def loads_of_others(state: LiveState) -> Sequence[Loads]:
    """Return the parts of the other workers; none for a router of one process."""
    return () if state.link is None else tuple((await state.link.question_all("loads")).values())


def with_others(view: ReplicaSnapshot, others: Iterable[Loads]) -> ReplicaSnapshot:
    """Return a replica with the load of all workers."""
    rows = [loads[view.name] for loads in others if view.name in loads]
    if not rows:
        return view
    requests, tokens, waiting, backlog_s = (sum(column) for column in zip(*rows, strict=True))
    return replace(
        view,
        in_flight_requests=view.in_flight_requests + int(requests),
        in_flight_tokens=view.in_flight_tokens + int(tokens),
        queued_prefill_tokens=view.queued_prefill_tokens + int(waiting),
        backlog_s=view.backlog_s + backlog_s,
    )


async def gather_snapshot(state: LiveState) -> Snapshot:
    """Return the status now, of all workers of the router."""
    return take_snapshot(state, await loads_of_others(state))


def take_snapshot(state: LiveState, others: Sequence[Loads] = ()) -> Snapshot:
    """Return the status now. Bounded: it takes milliseconds of the event loop at most.

    `others` are the loads of the other workers of the router.
    """
    router, control, now = state.routing.router, state.routing.control, state.routing.clock()
    views = [with_others(view, others) for view in router.view.snapshots(now=now)]
    queued = router.queued + sum(int(loads[""][1]) for loads in others)
    samples = recent_stats(router.samples.newest(RECENT_SAMPLES), now=now)
    stats = RecentStats.of(samples)
    settings = router.settings
    specs = settings.policy.weight_specs
    differing, missing = differences(state), state.why_not_ready()
    store = None if state.routing.peer_store is None else state.routing.peer_store.as_dict()
    sources = state.replicas.found.as_rows(now)
    caches, unused = state.cache_states(), defaultdict[str, list[str]](list)
    for name, cache in caches.items():
        if cache.unused is not None:
            unused[cache.unused].append(name)
    return Snapshot(
        boot_id=router.boot_id,
        region=state.config.proxy.region,
        now=now,
        up_s=now - state.started_s,
        stopping=state.stopping,
        in_flight=router.in_flight + sum(int(loads[""][0]) for loads in others),
        queued=queued,
        workers=() if state.link is None else state.link.rows,
        alerts=alerts(
            views,
            stats,
            unreachable_regions=router.view.unreachable_regions,
            queued=queued,
            stopping=state.stopping,
            config_refused=state.telemetry.metrics.config.refused,
            out_of_range=router.settings.weights.out_of_range(specs),
            replicas={replica.name: replica for replica in state.config.replicas},
            not_ready=None if missing is None else missing.message,
            waiting=[str(difference) for difference in differing if difference.waits],
            failures={name: target.last_failure for name, target in state.replicas.targets.items()},
            store=store,
            sources=sources,
            poison=router.view.poison_prompts(now=now),
            now=now,
            signals=scrape_warnings(
                state.config.proxy.scrape_interval_s, [each for each in (settings.policy, settings.shadow) if each]
            ),
            unused=unused,
            workers=() if state.link is None else state.link.rows,
        ),
        stats=stats,
        span_s=_span_s(samples, now=now, up_s=now - state.started_s),
        ttft_series=ttft_series(samples, now=now, up_s=now - state.started_s),
        regions=_regions(state, views, samples, caches),
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
        scaling=state.routing.scaling.wanted(),
        store=store,
        streams=state.telemetry.metrics.stream_breaks(),
        prompt_heads=state.routing.prompt_heads.parted(),
        routes=settings.route_stats(now=now),
        clients=() if state.routing.client_keys is None else state.telemetry.metrics.clients.last_minute(),
    )


def _span_s(samples: Sequence[Sample], *, now: float, up_s: float) -> float:
    """Return the window's length, shorter after a start or with many requests."""
    if len(samples) == RECENT_SAMPLES:
        return now - samples[-1].finished_s
    return min(RECENT_S, up_s)


def _regions(
    state: LiveState,
    views: Sequence[ReplicaSnapshot],
    samples: Sequence[Sample],
    caches: Mapping[str, CacheState],
) -> dict[str, list[ReplicaStatus]]:
    by_replica: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_replica[sample.replica].append(sample)
    rows: dict[str, list[ReplicaStatus]] = {region.name: [] for region in state.config.regions}
    for view in views:
        stats = RecentStats.of(by_replica.get(view.name, ()))
        replica = ReplicaStatus(
            view,
            condition_of(view, state.replicas.targets[view.name].last_failure),
            stats,
            state.telemetry.probe_history.for_replica(view.name),
            state.replicas.targets[view.name].engine,
            view.name in state.routing.control.registered,
            caches.get(view.name),
        )
        rows.setdefault(view.region, []).append(replica)
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
        newest = finished.get(key)
        mine = newest is not None and newest.finished_s >= decision.decided_s and newest.replica == decision.replica
        rows.append(DecisionStatus(decision, regions.get(decision.replica), newest if mine else None, followed))
    return rows
