"""Metrics of the store and of peers: their part of the table of metrics, and what their labels can be."""

from __future__ import annotations

from typing import Literal, get_args

from gorgo.core.metric_spec import LabelSpec, MetricSpec
from gorgo.core.prefix.origin import Origin

#: Why the store does not serve.
StoreFault = Literal["unreachable", "slow", "full", "refused", "not_ready", "error"]
#: What became of reports: of own ones, then of those of others.
ReportResult = Literal["written", "read", "missed", "malformed", "foreign", "other_format"]
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
