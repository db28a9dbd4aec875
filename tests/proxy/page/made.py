"""Views, samples and statuses as tests of the page want them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gorgo.core.decision import Decision
from gorgo.core.fleet_view import ReplicaView
from gorgo.core.replica import ReplicaSpec
from gorgo.core.router import Router
from gorgo.core.samples import Sample
from gorgo.core.ttft import TtftOutlook
from gorgo.policies.registry import make_policy
from gorgo.proxy.orders import WeightsChange
from gorgo.proxy.page.figures import Figures, course
from gorgo.proxy.page.standing import standing
from gorgo.proxy.page.status import DecisionStatus, ReplicaStatus, Status
from gorgo.proxy.page.trips import Trip

NOW = 1_000_000.0


def view(name: str = "us-0", **changes: Any) -> ReplicaView:
    """A replica as the Router shows one that is well and has just joined."""
    router = Router([ReplicaSpec(name, "near")], make_policy("random"), rng=np.random.default_rng(0), boot_id="b")
    router.on_probe(name, 0.01, now=0.0)
    (made,) = router.fleet_view(now=0.0)
    fields = {field: getattr(made, field) for field in ReplicaView.__slots__}
    return ReplicaView(**{**fields, **changes})


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
        "believed_cached_tokens": 50,
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
        "replica": "us-0",
        "terms": {"rtt": np.array([2.0, 95.0]), "prefill": np.array([30.0, 20.0])},
        "cost": np.array([32.0, 115.0]),
        "prompt_tokens": 100,
        "believed_cached_tokens": 50,
        "best_cached_tokens": 60,
        "predicted_ttft_s": 0.1,
        "outlook": TtftOutlook(0.0, 0.0, 0.002, 0.0, 0.03),
        "fallback": None,
        "excluded": {},
    }
    return Decision(**{**fields, **changes})


def row(made: ReplicaView, samples: tuple[Sample, ...] = (), trips: tuple[Trip, ...] = ()) -> ReplicaStatus:
    return ReplicaStatus(made, standing(made), Figures.of(samples), trips)


def change(version: int = 1, **changes: Any) -> WeightsChange:
    fields: dict[str, Any] = {
        "version": version,
        "policy": "gorgo-ms",
        "weights": {"m_rtt": 1.0},
        "at": "2026-05-01T12:03:04.567+00:00",
        "source": "admin",
    }
    return WeightsChange(**{**fields, **changes})


def status(**changes: Any) -> Status:
    samples = (sample(),)
    made = decision()
    fields: dict[str, Any] = {
        "boot_id": "b",
        "region": "near",
        "now": NOW,
        "up_s": 3000.0,
        "stopping": False,
        "in_flight": 3,
        "held": 0,
        "alerts": (),
        "figures": Figures.of(samples),
        "span_s": 300.0,
        "course": course(samples, now=NOW, up_s=3000.0),
        "regions": {"near": [row(view())]},
        "cut_off": frozenset(),
        "policy": "gorgo-ms",
        "unit": "ms",
        "version": 1,
        "weights": {"m_rtt": 1.0},
        "boxes": {"m_rtt": (0.25, 4.0)},
        "frozen": None,
        "durable": False,
        "history": (change(),),
        "decisions": (DecisionStatus(made, "near", samples[0], followed=False),),
    }
    return Status(**{**fields, **changes})
