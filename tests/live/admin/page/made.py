"""Views, samples and statuses as tests of the page want them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.latency.ttft import TtftEstimate
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import Sample
from gorgo.core.peers.records import PeerStatus
from gorgo.core.router import Router
from gorgo.live.admin.page.snapshot import DecisionStatus, ReplicaStatus, Snapshot, condition_of
from gorgo.live.control.transactions import WeightsChange
from gorgo.live.peer_store.service import PeerRow
from gorgo.live.telemetry.health import ProbeTime, RecentStats, ttft_series
from gorgo.policies.registry import make_policy

NOW = 1_000_000.0


def view(name: str = "us-0", **changes: Any) -> ReplicaSnapshot:
    """A replica as the Router shows one that is well and has just joined."""
    router = Router([ReplicaSpec(name, "near")], make_policy("random"), rng=np.random.default_rng(0), boot_id="b")
    router.replicas.on_probe(name, 0.01, now=0.0)
    (made,) = router.view.snapshots(now=0.0)
    fields = {field: getattr(made, field) for field in ReplicaSnapshot.__slots__}
    return ReplicaSnapshot(**{**fields, **changes})


def sample(seq: int = 1, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "seq": seq,
        "request_id": f"r{seq}",
        "finished_s": NOW,
        "replica": "us-0",
        "region": "near",
        "policy": "gorgo-ms",
        "weights_version": 1,
        "input_tokens": 100,
        "cached_tokens": 40,
        "estimated_cached_tokens": 50,
        "output_tokens": 7,
        "rtt_ms": 2.0,
        "predicted_ttft_ms": 100.0,
        "ttft_ms": 120.0,
        "e2e_s": 1.5,
        "itl_ms_p95": 20.0,
        "status": 200,
        "retries": 0,
        "hedged": False,
    }
    return Sample(**{**fields, **changes})


def decision(request_id: str = "r1", **changes: Any) -> Decision:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "decided_s": NOW - 2.0,
        "policy": "gorgo-ms",
        "unit": "ms",
        "weights_version": 1,
        "weights": {"m_rtt": 1.0},
        "candidates": ("us-0", "eu-0"),
        "row": 0,
        "terms": {"rtt": np.array([2.0, 95.0]), "prefill": np.array([30.0, 20.0])},
        "cost": np.array([32.0, 115.0]),
        "prompt_tokens": 100,
        "estimated_cached_tokens": 50,
        "best_cached_tokens": 60,
        "predicted_ttft_s": 0.1,
        "estimate": TtftEstimate(0.0, 0.0, 0.002, 0.0, 0.03),
        "fallback": None,
        "excluded": {},
    }
    return Decision(**{**fields, **changes})


def row(made: ReplicaSnapshot, samples: tuple[Sample, ...] = (), trips: tuple[ProbeTime, ...] = ()) -> ReplicaStatus:
    return ReplicaStatus(made, condition_of(made), RecentStats.of(samples), trips)


def change(version: int = 1, **changes: Any) -> WeightsChange:
    fields: dict[str, Any] = {
        "version": version,
        "policy": "gorgo-ms",
        "weights": {"m_rtt": 1.0},
        "at": "2026-05-01T12:03:04.567+00:00",
        "source": "admin",
    }
    return WeightsChange(**{**fields, **changes})


def store(*peers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The link of a router to its store as `PeerStoreService.as_dict` shows one that is up."""
    shown: dict[str, Any] = {"joined": True, "fault": None, "error": None, "for_s": 60.0, "peers": list(peers)}
    return {"router": "eu-1/4f", "group": "qwen", "url": "redis://store:6379"} | shown | changes


def peer(router: str = "eu-2/1a", **changes: Any) -> dict[str, Any]:
    """Another router as `PeerRow.as_dict` shows one that agrees."""
    row = PeerRow(router, 0.2, True, PeerStatus("gorgo-ms", 4, draining=("us-0",)))
    return row.as_dict() | changes


def source(name: str = "qwen", **changes: Any) -> dict[str, Any]:
    """A fleet source as `FoundFleet.as_rows` shows one that is up."""
    shown: dict[str, Any] = {
        "up": True,
        "synced": True,
        "error": None,
        "age_s": 2.0,
        "replicas": 3,
        "problem_count": 0,
        "problems": [],
    }
    return {"name": name, "kind": "pods"} | shown | changes


def status(**changes: Any) -> Snapshot:
    samples = (sample(),)
    made = decision()
    fields: dict[str, Any] = {
        "boot_id": "b",
        "region": "near",
        "now": NOW,
        "up_s": 3000.0,
        "stopping": False,
        "in_flight": 3,
        "queued": 0,
        "alerts": (),
        "stats": RecentStats.of(samples),
        "span_s": 300.0,
        "ttft_series": ttft_series(samples, now=NOW, up_s=3000.0),
        "regions": {"near": [row(view())]},
        "unreachable_regions": frozenset(),
        "policy": "gorgo-ms",
        "unit": "ms",
        "version": 1,
        "weights": {"m_rtt": 1.0},
        "bounds": {"m_rtt": (0.25, 4.0)},
        "frozen": None,
        "durable": False,
        "differences": (),
        "history": (change(),),
        "decisions": (DecisionStatus(made, "near", samples[0], followed=False),),
    }
    return Snapshot(**{**fields, **changes})
