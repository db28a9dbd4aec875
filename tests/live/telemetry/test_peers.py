"""Metrics of the store and of peers, read at a scrape."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from gorgo.core.prefix.index import Origin
from gorgo.live.telemetry.peers import PeerCounts, PeerMeasures, PeerMetrics


def exposition(measures: PeerMeasures | None) -> list[str]:
    metrics, registry = PeerMetrics(), CollectorRegistry()
    metrics.read = lambda: measures
    registry.register(metrics)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_a_router_without_a_store_shows_none_of_them() -> None:
    assert exposition(None) == []


def test_counts_state_and_differences_are_shown() -> None:
    counts = PeerCounts(written_bytes=7, read_bytes=9, write_s=0.5, dropped=2)
    counts.reports["written"], counts.failures["full"] = 3, 4
    lines = exposition(
        PeerMeasures(counts, joined=False, peers=2, differing={"weights": 1}, evicted={Origin.REMOTE: 5})
    )
    assert {
        "gorgo_peer_store_up 0.0",
        "gorgo_peers 2.0",
        'gorgo_peers_differing{subject="weights"} 1.0',
        'gorgo_peers_differing{subject="policy"} 0.0',
        'gorgo_peer_reports_total{result="written"} 3.0',
        'gorgo_peer_reports_total{result="malformed"} 0.0',
        'gorgo_peer_store_failures_total{reason="full"} 4.0',
        'gorgo_peer_bytes_total{way="written"} 7.0',
        'gorgo_peer_bytes_total{way="read"} 9.0',
        "gorgo_peer_write_seconds_total 0.5",
        "gorgo_peer_dropped_entries_total 2.0",
        'gorgo_peer_evictions_total{origin="remote"} 5.0',
        'gorgo_peer_evictions_total{origin="local"} 0.0',
        'gorgo_peer_evictions_total{origin="push"} 0.0',
    } <= set(lines)
