"""What `/metrics` shows: a table of every metric, the collectors behind it, and cheap hooks for the hot path.

Owns names, types, labels and help; the README's table is tested against `METRICS`. Counters are moved as things
happen, through children that are bound once per label set. Gauges cost the hot path nothing: they are read from the
Router when someone scrapes.

Labels are bounded: replica and region by the configuration (a replica that leaves takes its series along), policy by
the registry, route by the routes, status and reason by short lists in the code. No label ever carries anything that a
client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gorgo import __version__
from gorgo.core.fleet_view import ReplicaView
from gorgo.core.router import Router

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    description: str


_REPLICA = ("replica", "region")

#: Every metric of the proxy's own; the process metrics of prometheus_client come on top under `gorgo_process_`.
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("gorgo_requests_total", "counter", ("route", "policy", "status"), "Requests answered, by status class."),
    MetricSpec("gorgo_attempts_total", "counter", (*_REPLICA, "ending"), "Attempts ended, by how they ended."),
    MetricSpec("gorgo_retries_total", "counter", ("reason",), "Attempts after the first, by why the one before ended."),
    MetricSpec("gorgo_rejects_total", "counter", ("reason",), "Requests that the proxy itself answered with an error."),
    MetricSpec("gorgo_hedges_total", "counter", _REPLICA, "Requests sent to this replica as a second one, being late."),
    MetricSpec("gorgo_held_seconds", "histogram", (), "Wait at the proxy of requests that had to wait for a replica."),
    MetricSpec("gorgo_client_aborts_total", "counter", (), "Requests whose client went away before their end."),
    MetricSpec("gorgo_ttft_seconds", "histogram", _REPLICA, "Request received to first content, retries included."),
    MetricSpec("gorgo_prediction_error_seconds", "histogram", _REPLICA, "Predicted against measured TTFT, absolute."),
    MetricSpec(
        "gorgo_prediction_off_seconds_total",
        "counter",
        (*_REPLICA, "direction"),
        "Seconds by which predictions were over or under; their difference over the count is the signed mean.",
    ),
    MetricSpec("gorgo_e2e_seconds", "histogram", _REPLICA, "Request received to last byte, of completed requests."),
    MetricSpec("gorgo_decision_seconds", "histogram", (), "Parse, fingerprint, match, choice and reservation."),
    MetricSpec("gorgo_prompt_tokens_total", "counter", _REPLICA, "Prompt tokens dispatched, estimated unless told."),
    MetricSpec(
        "gorgo_believed_cached_tokens_total", "counter", _REPLICA, "Prompt tokens that the prefix index held cached."
    ),
    MetricSpec(
        "gorgo_reported_cached_tokens_total", "counter", _REPLICA, "Prompt tokens that the engine reported cached."
    ),
    MetricSpec("gorgo_output_tokens_total", "counter", _REPLICA, "Output tokens, where the engine reported usage."),
    MetricSpec("gorgo_probe_failures_total", "counter", _REPLICA, "Pings without an answer."),
    MetricSpec("gorgo_scrape_failures_total", "counter", _REPLICA, "Scrapes of an engine's load without an answer."),
    MetricSpec("gorgo_rtt_seconds", "gauge", _REPLICA, "Smoothed round trip; absent while unknown or stale."),
    MetricSpec("gorgo_in_flight_requests", "gauge", _REPLICA, "Attempts open on the replica."),
    MetricSpec("gorgo_in_flight_tokens", "gauge", _REPLICA, "Prompt tokens of attempts open on the replica."),
    MetricSpec("gorgo_queued_prefill_tokens", "gauge", _REPLICA, "The part of them still before its first content."),
    MetricSpec("gorgo_replica_eligible", "gauge", _REPLICA, "1 if the next request may go there."),
    MetricSpec("gorgo_region_cut_off", "gauge", ("region",), "1 while no replica of the region answers a probe."),
    MetricSpec("gorgo_held_requests", "gauge", (), "Requests that wait at the proxy for a replica."),
    MetricSpec("gorgo_index_blocks", "gauge", _REPLICA, "Blocks that the prefix index believes cached there."),
    MetricSpec("gorgo_weight", "gauge", ("policy", "weight"), "The weights in force."),
    MetricSpec("gorgo_weights_version", "gauge", (), "The version of the weights in force."),
    MetricSpec("gorgo_weights_frozen", "gauge", (), "1 while the weights are pinned."),
    MetricSpec("gorgo_state_writes_total", "counter", ("result",), "Writes of the state file: written or failed."),
    MetricSpec(
        "gorgo_request_log_lines_total",
        "counter",
        ("result",),
        "Finished requests: written, dropped (too many), failed.",
    ),
    MetricSpec("gorgo_config_reloads_total", "counter", ("result",), "Looks at a changed file: applied or refused."),
    MetricSpec("gorgo_config_reload_failed", "gauge", (), "1 while the file is refused and an older one is in force."),
    MetricSpec(
        "gorgo_config_last_reload_timestamp_seconds", "gauge", (), "Unix time at which the file in force was taken."
    ),
    MetricSpec("gorgo_build_info", "gauge", ("version",), "Always 1; the version is in the label."),
)

_SPECS = {spec.name: spec for spec in METRICS}

#: Seconds; from a cached short prompt near by to a full queue far away.
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
_DECISION_BUCKETS = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
#: Seconds; a step of the engine to a queue that was not seen.
_ERROR_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
_BUCKETS = {"gorgo_decision_seconds": _DECISION_BUCKETS, "gorgo_prediction_error_seconds": _ERROR_BUCKETS}


@dataclass(slots=True)
class ConfigInForce:
    """When the configuration was taken, whether a newer file was refused since, and whether weights are frozen."""

    taken_s: float
    refused: bool = False
    frozen: bool = False


class Metrics:
    """The registry of one proxy. Each method is one thing that happened."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        # A `_created` series beside each counter doubles the exposition and tells nobody anything.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types there
        self.registry = CollectorRegistry()
        self._made = {spec.name: _make(spec, self.registry) for spec in METRICS if spec.kind != "gauge"}
        self._bound: dict[tuple[str, ...], Any] = {}
        self._aborts = self._child("gorgo_client_aborts_total")
        self._decision = self._child("gorgo_decision_seconds")
        self.config = ConfigInForce(taken_s=clock())
        self.registry.register(_RouterGauges(router, clock, self.config))
        ProcessCollector(namespace="gorgo", registry=self.registry)

    def request(self, route: str, policy: str, status: int) -> None:
        self._child("gorgo_requests_total", route, policy, _status_class(status)).inc()

    def decided(self, seconds: float) -> None:
        self._decision.observe(seconds)

    def dispatched(self, replica: str, region: str, *, prompt_tokens: int, believed_cached_tokens: int) -> None:
        self._child("gorgo_prompt_tokens_total", replica, region).inc(prompt_tokens)
        self._child("gorgo_believed_cached_tokens_total", replica, region).inc(believed_cached_tokens)

    def first_content(self, replica: str, region: str, ttft_s: float, *, predicted_s: float | None) -> None:
        self._child("gorgo_ttft_seconds", replica, region).observe(ttft_s)
        if predicted_s is not None:
            error_s = abs(predicted_s - ttft_s)
            self._child("gorgo_prediction_error_seconds", replica, region).observe(error_s)
            direction = "over" if predicted_s > ttft_s else "under"
            self._child("gorgo_prediction_off_seconds_total", replica, region, direction).inc(error_s)

    def ended(self, replica: str, region: str, ending: str) -> None:
        self._child("gorgo_attempts_total", replica, region, ending).inc()

    def completed(
        self, replica: str, region: str, e2e_s: float, *, cached_tokens: int | None, output_tokens: int | None
    ) -> None:
        self._child("gorgo_e2e_seconds", replica, region).observe(e2e_s)
        if cached_tokens is not None:
            self._child("gorgo_reported_cached_tokens_total", replica, region).inc(cached_tokens)
        if output_tokens is not None:
            self._child("gorgo_output_tokens_total", replica, region).inc(output_tokens)

    def retried(self, reason: str) -> None:
        self._child("gorgo_retries_total", reason).inc()

    def rejected(self, reason: str) -> None:
        self._child("gorgo_rejects_total", reason).inc()

    def held(self, seconds: float) -> None:
        self._child("gorgo_held_seconds").observe(seconds)

    def hedged(self, replica: str, region: str) -> None:
        self._child("gorgo_hedges_total", replica, region).inc()

    def client_gone(self) -> None:
        self._aborts.inc()

    def probe_failed(self, replica: str, region: str) -> None:
        self._child("gorgo_probe_failures_total", replica, region).inc()

    def scrape_failed(self, replica: str, region: str) -> None:
        self._child("gorgo_scrape_failures_total", replica, region).inc()

    def reload_applied(self, now: float) -> None:
        self._child("gorgo_config_reloads_total", "applied").inc()
        self.config.refused, self.config.taken_s = False, now

    def reload_refused(self) -> None:
        self._child("gorgo_config_reloads_total", "refused").inc()
        self.config.refused = True

    def state_written(self, well: bool) -> None:
        self._child("gorgo_state_writes_total", "written" if well else "failed").inc()

    def request_log(self, result: str, lines: int) -> None:
        self._child("gorgo_request_log_lines_total", result).inc(lines)

    def keep_replicas(self, replicas: Collection[tuple[str, str]]) -> None:
        """Drop the series of every other (replica, region), so that a changing fleet does not grow the exposition."""
        for name, *labels in list(self._bound):
            if _SPECS[name].labels[:2] == _REPLICA and (labels[0], labels[1]) not in replicas:
                self._made[name].remove(*labels)
                del self._bound[name, *labels]

    def exposition(self) -> bytes:
        """The text that `/metrics` answers."""
        return generate_latest(self.registry)

    def _child(self, name: str, *labels: str) -> Any:
        """`labels()` takes a lock and builds strings each time; a dict lookup does not."""
        key = (name, *labels)
        child = self._bound.get(key)
        if child is None:
            metric = self._made[name]
            child = self._bound[key] = metric.labels(*labels) if labels else metric
        return child


class _RouterGauges(Collector):
    """Gauges as they are at the moment of the scrape."""

    def __init__(self, router: Router, clock: Callable[[], float], config: ConfigInForce) -> None:
        self._router = router
        self._clock = clock
        self._config = config

    def describe(self) -> Iterable[Metric]:
        return [_gauge(spec) for spec in METRICS if spec.kind == "gauge"]

    def collect(self) -> Iterable[Metric]:
        families = {spec.name: _gauge(spec) for spec in METRICS if spec.kind == "gauge"}
        views = self._router.fleet_view(now=self._clock())
        for view in views:
            for name, value in _replica_gauges(view):
                families[name].add_metric((view.name, view.region), value)
        for weight, value in self._router.weights.items():
            families["gorgo_weight"].add_metric((self._router.policy.name, weight), value)
        cut_off = self._router.regions_cut_off
        for region in sorted({view.region for view in views}):
            families["gorgo_region_cut_off"].add_metric((region,), float(region in cut_off))
        families["gorgo_held_requests"].add_metric((), self._router.held)
        families["gorgo_weights_version"].add_metric((), self._router.weights.version)
        families["gorgo_weights_frozen"].add_metric((), float(self._config.frozen))
        families["gorgo_config_reload_failed"].add_metric((), float(self._config.refused))
        families["gorgo_config_last_reload_timestamp_seconds"].add_metric((), self._config.taken_s)
        families["gorgo_build_info"].add_metric((__version__,), 1)
        return families.values()


def _replica_gauges(view: ReplicaView) -> Iterable[tuple[str, float]]:
    if view.rtt_ms is not None:
        yield "gorgo_rtt_seconds", view.rtt_ms / 1e3
    yield "gorgo_in_flight_requests", view.in_flight_requests
    yield "gorgo_in_flight_tokens", view.in_flight_tokens
    yield "gorgo_queued_prefill_tokens", view.queued_prefill_tokens
    yield "gorgo_replica_eligible", float(view.eligible)
    yield "gorgo_index_blocks", view.index_blocks


def _make(spec: MetricSpec, registry: CollectorRegistry) -> Counter | Histogram:
    if spec.kind == "counter":
        return Counter(spec.name, spec.description, spec.labels, registry=registry)
    buckets: Sequence[float] = _BUCKETS.get(spec.name, _LATENCY_BUCKETS)
    return Histogram(spec.name, spec.description, spec.labels, registry=registry, buckets=buckets)


def _gauge(spec: MetricSpec) -> GaugeMetricFamily:
    return GaugeMetricFamily(spec.name, spec.description, labels=spec.labels)


def _status_class(status: int) -> str:
    """`499` stands alone: the client went away, nobody answered."""
    return "499" if status == 499 else f"{status // 100}xx"
