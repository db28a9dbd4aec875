"""Metrics of the store and of the routers that report there, read at a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gorgo.core.prefix.origin import Origin
from gorgo.live.telemetry.peer_table import PEER_METRICS, ReportResult, StoreFault, Subject


@dataclass(slots=True)
class PeerCounts:
    """Counts since the start."""

    reports: dict[ReportResult, int] = field(default_factory=lambda: dict.fromkeys(get_args(ReportResult), 0))
    failures: dict[StoreFault, int] = field(default_factory=lambda: dict.fromkeys(get_args(StoreFault), 0))
    written_bytes: int = 0
    read_bytes: int = 0
    #: Sum of the times of writes, s.
    write_s: float = 0.0
    #: Prefixes and cache reports that no report could take.
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class PeerMeasures:
    """What a scrape shows."""

    counts: PeerCounts
    joined: bool
    #: Peers whose load counts.
    peers: int
    differing: dict[Subject, int]
    #: What was evicted of what is known of caches.
    evicted: Mapping[Origin, int]


class PeerMetrics(Collector):
    """Metrics of one router among its peers; none without a store. `read` is set once the process is built."""

    def __init__(self) -> None:
        self.read: Callable[[], PeerMeasures | None] = lambda: None

    def describe(self) -> Iterable[Metric]:
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        families, measures = _families(), self.read()
        if measures is None:
            return families.values()
        counts = measures.counts
        families["gorgo_peer_store_up"].add_metric((), float(measures.joined))
        families["gorgo_peers"].add_metric((), measures.peers)
        families["gorgo_peer_bytes_total"].add_metric(("written",), counts.written_bytes)
        families["gorgo_peer_bytes_total"].add_metric(("read",), counts.read_bytes)
        families["gorgo_peer_write_seconds_total"].add_metric((), counts.write_s)
        families["gorgo_peer_dropped_entries_total"].add_metric((), counts.dropped)
        for origin in Origin:
            families["gorgo_peer_evictions_total"].add_metric((origin.name.lower(),), measures.evicted.get(origin, 0))
        for subject in get_args(Subject):
            families["gorgo_peers_differing"].add_metric((subject,), measures.differing.get(subject, 0))
        for result, count in counts.reports.items():
            families["gorgo_peer_reports_total"].add_metric((result,), count)
        for fault, count in counts.failures.items():
            families["gorgo_peer_store_failures_total"].add_metric((fault,), count)
        return families.values()


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    return {spec.name: kinds[spec.kind](spec.name, spec.description, labels=spec.labels) for spec in PEER_METRICS}
