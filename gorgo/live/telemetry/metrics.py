"""The registry of one proxy: hooks for the hot path, and gauges that are read at a scrape.

Owns the hooks (`Metrics`), the metrics of caches (`CacheMetrics`), the use of what one process can do (`Saturation`),
and the metrics of all workers of a router as those of one (`merged`). Labels are bounded as `metric_table` says. The
series of a replica end when it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, process_time
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gorgo import build_version
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.latency.ttft import PARTS, TtftParts
from gorgo.core.limits import BufferBudget
from gorgo.core.messages.decision import CacheSourceStats, Decision
from gorgo.core.messages.request import Outcome
from gorgo.core.metric_spec import MetricSpec
from gorgo.core.router import Router
from gorgo.core.scaling import WantedReplicas
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.http.tls import ServedTls
from gorgo.live.telemetry.counters import (
    ClientUsage,
    Counter,
    Histogram,
    Key,
    LearningMetrics,
    MetricStore,
    PeerMetrics,
    status_class,
)
from gorgo.live.telemetry.metric_table import CACHE_METRICS, METRICS, PEER_METRICS

# Metrics of replicas' caches, read at a scrape: source, age, errors, and reports by what became of them.


class MeasuredCache(Protocol):
    """The cache of one replica (`cache_states`)."""

    @property
    def region(self) -> str: ...

    @property
    def stats(self) -> CacheSourceStats: ...

    def reports(self) -> Iterator[tuple[str, int]]:
        """Yield the number of reports by what became of them."""


class CacheMetrics(Collector):
    """Metrics of all replicas' caches, read at a scrape. `read` is set once the proxy is built."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, MeasuredCache]] = dict

    def describe(self) -> Iterable[Metric]:
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        families = _families()
        for replica, state in self.read().items():
            labels, stats = (replica, state.region), state.stats
            families["gorgo_cache_reported_blocks"].add_metric(labels, stats.blocks)
            if stats.age_s is not None:
                families["gorgo_cache_report_age_seconds"].add_metric(labels, stats.age_s)
            families["gorgo_cache_phantom_tokens_total"].add_metric(labels, stats.phantom_tokens)
            families["gorgo_cache_missed_tokens_total"].add_metric(labels, stats.missed_tokens)
            for result, count in state.reports():
                families["gorgo_cache_reports_total"].add_metric((*labels, result), count)
        return families.values()


def _families() -> dict[str, Any]:
    return {spec.name: _family(spec) for spec in METRICS if spec.name in CACHE_METRICS}


def _family(spec: MetricSpec) -> GaugeMetricFamily | CounterMetricFamily:
    kind = GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily
    return kind(spec.name, spec.description, labels=spec.labels)


# How much of what one process can do is in use, by resource: what an autoscaler of proxies reads.
#
# The fleet behind the proxy is no part of it: more proxies do not make engines faster.


#: Shortest window of the processor's share: two servers may scrape a moment apart.
MIN_WINDOW_S = 5.0


class Saturation:
    """The shares of one process, from 0 to 1.

    Parameters
    ----------
    wall, processor:
        Clocks; the second one counts the time of this process on a processor. It has one event loop, so 1 is the most
        that it gets done.
    """

    def __init__(
        self,
        router: Router,
        buffers: BufferBudget,
        *,
        wall: Callable[[], float] = monotonic,
        processor: Callable[[], float] = process_time,
    ) -> None:
        self._router = router
        self._buffers = buffers
        self._wall = wall
        self._processor = processor
        self._from = wall(), processor()
        self._share = 0.0

    def shares(self) -> Iterator[tuple[str, float]]:
        """Yield resource and share."""
        yield "requests", min(1.0, self._router.in_flight / self._router.settings.limits.max_in_flight)
        yield "buffers", min(1.0, self._buffers.used_bytes / self._buffers.limit_bytes)
        yield "processor", self._processor_share()

    def _processor_share(self) -> float:
        """Return the share since the last window's end, or that of the window before while a new one is short."""
        wall_s, processor_s = self._wall(), self._processor()
        before_wall_s, before_processor_s = self._from
        if wall_s - before_wall_s >= MIN_WINDOW_S:
            self._share = min(1.0, max(0.0, (processor_s - before_processor_s) / (wall_s - before_wall_s)))
            self._from = wall_s, processor_s
        return self._share


#: Read at a scrape by collectors of their own.
_ROUTE_EVICTIONS = "gorgo_route_evictions_total"
_READ_ELSEWHERE = CACHE_METRICS | {_ROUTE_EVICTIONS} | {spec.name for spec in PEER_METRICS}


@dataclass(slots=True)
class ActiveConfig:
    """Time of the configuration in force, whether a newer file was refused, and whether weights are frozen."""

    taken_s: float
    refused: bool = False
    frozen: bool = False


@dataclass(slots=True)
class Listeners:
    """What a scrape reads of the listeners; both are set once they are built."""

    is_ready: Callable[[], bool] = lambda: False
    tls: list[ServedTls] = field(default_factory=list)


@dataclass(slots=True)
class WantedMetrics:
    """What a scrape reads of the wanted replicas; set once the service is built."""

    read: Callable[[], Sequence[WantedReplicas]] = tuple


#: Requests after which the observations that wait are sorted into their buckets: 2,000 values, a millisecond at most.
FOLD_REQUESTS = 128


class Metrics:
    """The registry of one proxy. Each method records one event."""

    def __init__(
        self, router: Router, clock: Callable[[], float], buffers: BufferBudget, fleet: FoundFleet | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self._cells = MetricStore([spec for spec in METRICS if spec.name not in _READ_ELSEWHERE])
        self._count, self._histogram = self._cells.count, self._cells.histogram
        self.learning = LearningMetrics(self._cells)
        self.clients = ClientUsage(self._cells, router.view.lists, clock)
        #: Series of the prompts' tokens, and of TTFTs and their parts, by replica and region.
        self._dispatched: dict[tuple[str, str, str], tuple[Counter, Counter, Counter, Counter]] = {}
        self._first_tokens: dict[tuple[str, str], tuple[Histogram, list[tuple[Counter, Histogram]]]] = {}
        #: Series of the errors of predictions, by replica, region and side.
        self._errors: dict[tuple[str, str, str], tuple[Histogram, Counter]] = {}
        #: Series of completed responses with a full report, by replica and region; of requests; of attempts.
        self._completed: dict[tuple[str, str], tuple[Histogram, Counter, Counter, Counter]] = {}
        self._requests: dict[tuple[str, str, int], Counter] = {}
        self._attempts: dict[tuple[str, str, str], Counter] = {}
        #: Requests whose observations wait.
        self._unfolded = 0
        #: Answers that broke off, by whether they went on and the reason.
        self._breaks: dict[tuple[str, str], Counter] = {}
        self._decision = self._histogram("gorgo_decision_seconds")
        self._body_read = self._histogram("gorgo_body_read_seconds")
        self.config = ActiveConfig(taken_s=clock())
        self.listeners = Listeners()
        self.wanted = WantedMetrics()
        self.registry.register(self._cells)
        self.caches = CacheMetrics()
        self.registry.register(self.caches)
        self.peers = PeerMetrics()
        self.registry.register(self.peers)
        self.registry.register(
            _RouterGauges(
                router, clock, self.config, self.listeners, buffers, self.learning, fleet or FoundFleet(), self.wanted
            )
        )
        ProcessCollector(namespace="gorgo", registry=self.registry)

    def request(self, route: str, policy: str, status: int) -> None:
        key = (route, policy, status)
        cell = self._requests.get(key)
        if cell is None:
            cell = self._requests[key] = self._count("gorgo_requests_total", route, policy, status_class(status))
        cell.value += 1.0
        self._unfolded += 1
        if self._unfolded == FOLD_REQUESTS:
            self._unfolded = 0
            self._cells.fold()

    def body_read(self, seconds: float) -> None:
        self._body_read.observe(seconds)

    def decided(self, seconds: float) -> None:
        self._decision.observe(seconds)

    def dispatched(self, replica: str, region: str, decision: Decision) -> None:
        if decision.fallback is not None:
            self.learning.decided(decision.fallback)
        key = (replica, region, decision.cache_source)
        cells = self._dispatched.get(key)
        if cells is None:
            cells = self._dispatched[key] = (
                self._count("gorgo_prompt_tokens_total", replica, region),
                self._count("gorgo_estimated_cached_tokens_total", replica, region),
                self._count("gorgo_best_cached_tokens_total", replica, region),
                self._count("gorgo_cache_source_total", *key),
            )
        prompt, estimated, best, source = cells
        source.value += 1.0
        prompt.value += decision.prompt_tokens
        estimated.value += decision.estimated_cached_tokens
        best.value += decision.best_cached_tokens

    def first_content(
        self, replica: str, region: str, ttft_s: float, *, predicted_s: float | None, parts: TtftParts
    ) -> None:
        ttft, cells = self._first_cells(replica, region)
        ttft.observe(ttft_s)
        for (spent, histogram), seconds in zip(cells, parts, strict=True):
            spent.value += seconds
            histogram.observe(seconds)
        if predicted_s is not None:
            error_s = abs(predicted_s - ttft_s)
            errors, signed = self._error_cells(replica, region, _side(predicted_s, ttft_s))
            errors.observe(error_s)
            signed.value += error_s

    def attempt_ended(self, replica: str, region: str, result: str) -> None:
        key = (replica, region, result)
        cell = self._attempts.get(key)
        if cell is None:
            cell = self._attempts[key] = self._count("gorgo_attempts_total", replica, region, result)
        cell.value += 1.0

    def completed(
        self, replica: str, region: str, e2e_s: float, outcome: Outcome, *, estimated_cached_tokens: int
    ) -> None:
        """Record a completed response; `outcome` has its engine's report."""
        cached, output = outcome.cached_tokens, outcome.output_tokens
        if cached is None or outcome.prompt_tokens is None or output is None:
            self._histogram("gorgo_e2e_seconds", replica, region).observe(e2e_s)
            if output is not None:
                self._count("gorgo_output_tokens_total", replica, region).inc(output)
            if cached is None or outcome.prompt_tokens is None:
                return
            self._count("gorgo_reported_cached_tokens_total", replica, region).inc(cached)
            self._count("gorgo_reported_prompt_tokens_total", replica, region).inc(outcome.prompt_tokens)
        else:
            e2e, tokens, cached_cell, prompt = self._completed_cells(replica, region)
            e2e.observe(e2e_s)
            tokens.value += output
            cached_cell.value += cached
            prompt.value += outcome.prompt_tokens
        side = _side(estimated_cached_tokens, cached)
        off = abs(estimated_cached_tokens - cached)
        self._count("gorgo_cached_tokens_signed_error_total", replica, region, side).inc(off)

    def continued(self, reason: str, gap_s: float) -> None:
        """Count an answer that broke off for `reason` and goes on after `gap_s`."""
        self._break("continued", reason)
        self._histogram("gorgo_stream_seam_seconds").observe(gap_s)

    def not_continued(self, reason: str) -> None:
        """Count an answer that broke off and could not go on for `reason`."""
        self._break("not_continued", reason)

    def _break(self, end: str, reason: str) -> None:
        cell = self._breaks.get((end, reason))
        if cell is None:
            cell = self._breaks[end, reason] = self._count(f"gorgo_streams_{end}_total", reason)
        cell.inc()

    def stream_breaks(self) -> dict[str, dict[str, int]]:
        """Return the answers that broke off since the start: `continued` and `not_continued`, each by reason."""
        breaks: dict[str, dict[str, int]] = {"continued": {}, "not_continued": {}}
        for (end, reason), cell in self._breaks.items():
            breaks[end][reason] = int(cell.value)
        return breaks

    def retried(self, reason: str) -> None:
        self._count("gorgo_retries_total", reason).inc()

    def rejected(self, reason: str) -> None:
        self._count("gorgo_rejects_total", reason).inc()

    def queued(self, seconds: float) -> None:
        self._histogram("gorgo_queue_seconds").observe(seconds)

    def hedged(self, replica: str, region: str) -> None:
        self._count("gorgo_hedges_total", replica, region).inc()

    def exact_prompt(self, result: str) -> None:
        self._count("gorgo_exact_prompts_total", result).inc()

    def log_entry(self, result: str) -> None:
        self._count("gorgo_picker_log_entries_total", result).inc()

    def client_disconnected(self) -> None:
        self._count("gorgo_client_aborts_total").inc()

    def admin_refused(self) -> None:
        self._count("gorgo_admin_refused_total").inc()

    def probe_failed(self, replica: str, region: str) -> None:
        self._count("gorgo_probe_failures_total", replica, region).inc()

    def scrape_failed(self, replica: str, region: str) -> None:
        self._count("gorgo_scrape_failures_total", replica, region).inc()

    def replica_restarted(self, replica: str, region: str) -> None:
        self._count("gorgo_replica_restarts_total", replica, region).inc()

    def reload_applied(self, now: float) -> None:
        self._count("gorgo_config_reloads_total", "applied").inc()
        self.config.refused, self.config.taken_s = False, now

    def reload_refused(self) -> None:
        self._count("gorgo_config_reloads_total", "refused").inc()
        self.config.refused = True

    def state_written(self, well: bool) -> None:
        self._count("gorgo_state_writes_total", "written" if well else "failed").inc()

    def request_log(self, result: str, lines: int) -> None:
        self._count("gorgo_request_log_lines_total", result).inc(lines)

    def outcome_log(self, result: str, lines: int) -> None:
        self._count("gorgo_outcome_log_lines_total", result).inc(lines)

    def trace_spans(self, result: str, spans: int) -> None:
        self._count("gorgo_trace_spans_total", result).inc(spans)

    def retain_replicas(self, replicas: Collection[tuple[str, str]]) -> None:
        """Drop the series of every other (replica, region), so that a changing fleet does not grow the exposition."""
        regions = {region for _, region in replicas}

        def wanted(spec: MetricSpec, values: Key) -> bool:
            labels = dict(zip(spec.labels, values, strict=True))
            if "replica" in labels:
                return (labels["replica"], labels["region"]) in replicas
            return labels.get("region") in {None, *regions}

        for cells in (self._first_tokens, self._errors, self._dispatched, self._completed, self._attempts):
            cells.clear()
        self._cells.retain(wanted)

    def exposition(self) -> bytes:
        """Return the text of `/metrics`."""
        return generate_latest(self.registry)

    def _completed_cells(self, replica: str, region: str) -> tuple[Histogram, Counter, Counter, Counter]:
        cells = self._completed.get((replica, region))
        if cells is None:
            cells = self._completed[replica, region] = (
                self._histogram("gorgo_e2e_seconds", replica, region),
                self._count("gorgo_output_tokens_total", replica, region),
                self._count("gorgo_reported_cached_tokens_total", replica, region),
                self._count("gorgo_reported_prompt_tokens_total", replica, region),
            )
        return cells

    def _first_cells(self, replica: str, region: str) -> tuple[Histogram, list[tuple[Counter, Histogram]]]:
        cells = self._first_tokens.get((replica, region))
        if cells is None:
            parts = [
                (
                    self._count("gorgo_ttft_component_seconds_total", replica, region, part),
                    self._histogram("gorgo_ttft_part_seconds", region, part),
                )
                for part in PARTS
            ]
            cells = self._first_tokens[replica, region] = self._histogram("gorgo_ttft_seconds", replica, region), parts
        return cells

    def _error_cells(self, replica: str, region: str, side: str) -> tuple[Histogram, Counter]:
        cells = self._errors.get((replica, region, side))
        if cells is None:
            cells = self._errors[replica, region, side] = (
                self._histogram("gorgo_prediction_error_seconds", replica, region),
                self._count("gorgo_prediction_signed_error_seconds_total", replica, region, side),
            )
        return cells


_GAUGES = [spec for spec in METRICS if spec.kind == "gauge" and spec.name not in _READ_ELSEWHERE]


class _RouterGauges(Collector):
    """Gauges, read from the Router at a scrape."""

    def __init__(
        self,
        router: Router,
        clock: Callable[[], float],
        config: ActiveConfig,
        listeners: Listeners,
        buffers: BufferBudget,
        learning: LearningMetrics,
        fleet: FoundFleet,
        wanted: WantedMetrics,
    ) -> None:
        self._found = fleet
        self._wanted = wanted
        self._saturation = Saturation(router, buffers)
        self._learning = learning
        self._buffers = buffers
        self._router = router
        self._clock = clock
        self._config = config
        self._listeners = listeners

    def describe(self) -> Iterable[Metric]:
        return [*(_gauge(spec) for spec in _GAUGES), _route_evictions()]

    def collect(self) -> Iterable[Metric]:
        families = {spec.name: _gauge(spec) for spec in _GAUGES}
        views = self._router.view.snapshots(now=self._clock())
        for view in views:
            for name, value in _replica_gauges(view):
                families[name].add_metric((view.name, view.region), value)
        for weight, value in self._router.settings.weights.items():
            families["gorgo_weight"].add_metric((self._router.settings.policy.name, weight), value)
        unreachable = self._router.view.unreachable_regions
        for region in sorted({view.region for view in views}):
            families["gorgo_region_unreachable"].add_metric((region,), float(region in unreachable))
        families["gorgo_ready"].add_metric((), float(self._listeners.is_ready()))
        for served in self._listeners.tls:
            if served.expires_s is not None:
                families["gorgo_certificate_expiry_timestamp_seconds"].add_metric((served.place,), served.expires_s)
        families["gorgo_queue_requests"].add_metric((), self._router.queued)
        families["gorgo_buffered_bytes"].add_metric((), self._buffers.used_bytes)
        families["gorgo_weights_version"].add_metric((), self._router.settings.weights.version)
        families["gorgo_weights_frozen"].add_metric((), float(self._config.frozen))
        families["gorgo_config_reload_failed"].add_metric((), float(self._config.refused))
        families["gorgo_config_last_reload_timestamp_seconds"].add_metric((), self._config.taken_s)
        for group in self._wanted.read():
            families["gorgo_replicas_wanted"].add_metric((group.region, group.model or "none"), group.wanted)
        for resource, share in self._saturation.shares():
            families["gorgo_saturation_ratio"].add_metric((resource,), share)
        for source in self._found.as_rows(self._clock()):
            for name, value in _source_gauges(source):
                families[name].add_metric((source["name"],), value)
        model = self._learning.model
        if model is not None:
            families["gorgo_model_version"].add_metric((), model.version)
            families["gorgo_model_samples"].add_metric((), model.samples)
            families["gorgo_model_age_seconds"].add_metric((), max(0.0, self._clock() - model.trained_s))
        families["gorgo_build_info"].add_metric((build_version(),), 1)
        return [*families.values(), self._routes(families)]

    def _routes(self, families: Mapping[str, GaugeMetricFamily]) -> CounterMetricFamily:
        """Add the routes of the policy, and return the family of those that had no place."""
        evictions, stats = _route_evictions(), self._router.settings.route_stats(now=self._clock())
        if stats is not None:
            for origin, count in stats.routes.items():
                families["gorgo_routes"].add_metric((origin,), count)
                evictions.add_metric((origin,), stats.evicted[origin])
            for origin, unused_s in stats.unused_s.items():
                families["gorgo_route_unused_seconds"].add_metric((origin,), unused_s)
        return evictions


def _replica_gauges(view: ReplicaSnapshot) -> Iterable[tuple[str, float]]:
    if view.rtt_ms is not None:
        yield "gorgo_rtt_seconds", view.rtt_ms / 1e3
    if view.probe_age_s is not None:
        yield "gorgo_probe_age_seconds", view.probe_age_s
    if view.scrape_age_s is not None:
        yield "gorgo_scrape_age_seconds", view.scrape_age_s
    yield "gorgo_in_flight_requests", view.in_flight_requests
    yield "gorgo_in_flight_tokens", view.in_flight_tokens
    yield "gorgo_queued_prefill_tokens", view.queued_prefill_tokens
    yield "gorgo_queued_prefill_seconds", view.backlog_s
    yield "gorgo_prefill_slowdown", view.prefill_slowdown
    yield "gorgo_parallel_prefills", view.parallel_prefills
    if view.tpot_ms is not None:
        yield "gorgo_tpot_seconds", view.tpot_ms / 1e3
    if view.itl_ms_p95 is not None:
        yield "gorgo_itl_p95_seconds", view.itl_ms_p95 / 1e3
    if view.decode_slowdown is not None:
        yield "gorgo_decode_slowdown", view.decode_slowdown
    yield "gorgo_replica_eligible", float(view.eligible)
    yield "gorgo_index_blocks", view.index_blocks


def _source_gauges(source: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    yield "gorgo_fleet_source_up", float(source["up"])
    yield "gorgo_fleet_source_replicas", source["replicas"]
    yield "gorgo_fleet_source_problems", source["problem_count"]
    if source["age_s"] is not None:
        yield "gorgo_fleet_source_age_seconds", source["age_s"]


def _route_evictions() -> CounterMetricFamily:
    (spec,) = (spec for spec in METRICS if spec.name == _ROUTE_EVICTIONS)
    return CounterMetricFamily(spec.name, spec.description, labels=spec.labels)


def _gauge(spec: MetricSpec) -> GaugeMetricFamily:
    return GaugeMetricFamily(spec.name, spec.description, labels=spec.labels)


def _side(guess: float, truth: float) -> str:
    return "over" if guess > truth else "under"


# The metrics of all workers as those of one. Counters and histograms are added up. Of gauges some are added up, of some
# the worst counts, and the others, which are the same everywhere or learned by each worker, are the leader's. What is
# true of a process alone has its number as the label `worker`.


#: Gauges of what each worker has its own part of.
ADDED = frozenset(
    (
        *("gorgo_in_flight_requests", "gorgo_in_flight_tokens", "gorgo_queued_prefill_tokens"),
        *("gorgo_queued_prefill_seconds", "gorgo_queue_requests", "gorgo_buffered_bytes"),
    )
)
#: Gauges of which the greatest counts, and the least.
GREATEST = frozenset(("gorgo_saturation_ratio", "gorgo_config_reload_failed", "gorgo_replicas_wanted"))
LEAST = frozenset(("gorgo_ready", "gorgo_replica_eligible"))
#: Counters of events that reach every worker: each has counted them all.
OF_ALL = frozenset(("gorgo_replica_restarts", "gorgo_config_reloads"))
#: Of prometheus_client's process metrics.
PROCESS = "gorgo_process_"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of one worker: its samples by name and labels."""

    name: str
    kind: str
    description: str
    samples: Mapping[tuple[str, Labels], float]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return the metrics of this process."""
    families = []
    for metric in registry.collect():
        samples = {(each.name, tuple(each.labels.items())): float(each.value) for each in metric.samples}
        families.append(Family(metric.name, metric.type, metric.documentation, samples))
    return families


def merged(leader: int, by_worker: Mapping[int, Sequence[Family]]) -> list[Family]:
    """Return the metrics of all workers as those of one.

    >>> one = Family("gorgo_requests", "counter", "", {("gorgo_requests_total", ()): 2.0})
    >>> two = Family("gorgo_requests", "counter", "", {("gorgo_requests_total", ()): 3.0})
    >>> merged(0, {0: [one], 1: [two]})[0].samples
    {('gorgo_requests_total', ()): 5.0}
    """
    first = leader if leader in by_worker else min(by_worker)
    order = [first, *sorted(by_worker.keys() - {first})]
    by_name: dict[str, tuple[Family, dict[tuple[str, Labels], float]]] = {}
    for worker in order:
        for family in by_worker[worker]:
            _, samples = by_name.setdefault(family.name, (family, {}))
            _add(samples, family, worker, is_first=worker == first)
    return [Family(family.name, family.kind, family.description, samples) for family, samples in by_name.values()]


def _add(samples: dict[tuple[str, Labels], float], family: Family, worker: int, *, is_first: bool) -> None:
    name = family.name
    if name.startswith(PROCESS):
        for (sample, labels), value in family.samples.items():
            samples[sample, (*labels, ("worker", str(worker)))] = value
        return
    sums = name in ADDED or (family.kind != "gauge" and name not in OF_ALL)
    for key, value in family.samples.items():
        before = samples.get(key)
        if before is None and (is_first or sums or name in GREATEST):
            samples[key] = value
        elif before is not None and sums:
            samples[key] = before + value
        elif before is not None and name in GREATEST:
            samples[key] = max(before, value)
        elif before is not None and name in LEAST:
            samples[key] = min(before, value)


def exposition(families: Iterable[Family]) -> bytes:
    """Return the text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.description, family.kind)
            for (name, labels), value in family.samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric
