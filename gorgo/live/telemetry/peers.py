"""Metrics of the store and of the routers that report there, read at a scrape.

Owns their part of the table of metrics, and the reading of it (`PeerMetrics`). Leaves what is measured to
`gorgo.live.peer_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gorgo.core.metric_spec import LabelSpec, MetricSpec
from gorgo.core.prefix.index import Origin

# Metrics of the store and of peers: their part of the table of metrics, and what their labels can be.


#: Why the store does not serve.
StoreFault = Literal["unreachable", "slow", "full", "refused", "not_ready", "error"]
#: What became of reports: of own ones, then of those of others.
ReportResult = Literal["written", "read", "missed", "malformed", "foreign", "other_format", "forged"]
#: Where a peer differs from this router.
Subject = Literal["policy", "weights", "freeze", "model", "key", "format"]

PEER_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("gorgo_peer_store_up", "gauge", (), "1 while the store takes and gives reports."),
    MetricSpec("gorgo_peers", "gauge", (), "Other routers whose load counts."),
    MetricSpec("gorgo_peers_differing", "gauge", ("subject",), "Other routers that differ."),
    MetricSpec("gorgo_peer_reports_total", "counter", ("result",), "Reports."),
    MetricSpec("gorgo_peer_bytes_total", "counter", ("way",), "Bytes of reports."),
    MetricSpec("gorgo_peer_write_seconds_total", "counter", (), "Time of writes."),
    MetricSpec("gorgo_peer_dropped_entries_total", "counter", (), "Entries beyond a report's bounds."),
    MetricSpec("gorgo_peer_evictions_total", "counter", ("origin",), "Evicted knowledge of caches, by origin."),
    MetricSpec("gorgo_peer_store_failures_total", "counter", ("reason",), "Failed commands to the store."),
)

PEER_LABELS: tuple[LabelSpec, ...] = (
    LabelSpec("reason", ("gorgo_peer_store_failures_total",), "of the failure", get_args(StoreFault)),
    LabelSpec("result", ("gorgo_peer_reports_total",), "of a report", get_args(ReportResult)),
    LabelSpec("way", (), "to or from the store", ("written", "read")),
    LabelSpec(
        "origin",
        (),
        "of marks and routes (this router's, others'), or of an engine's reported blocks",
        tuple(origin.name.lower() for origin in reversed(Origin)),
    ),
    LabelSpec("subject", (), "of the difference", get_args(Subject)),
)


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
