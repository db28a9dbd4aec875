"""Metrics of replicas' caches, read at a scrape: source, age, errors, and reports by what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gorgo.core.messages.cache_source import CacheSourceStats
from gorgo.core.metric_spec import MetricSpec
from gorgo.live.telemetry.metric_table import CACHE_METRICS, METRICS


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
            families["gorgo_cache_source"].add_metric((*labels, stats.source), 1.0)
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
