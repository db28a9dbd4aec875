"""A small window of the shipped trace under several policies, request by request, as it was when it was last approved.

A change here is a change of behaviour: of a policy, the Router, the engine model, or the simulation. If it is meant,
renew the files by `python -m tests.lab.sim.test_golden` and say in the commit why they changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gorgo.lab.datasets import load_requests
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters
from tests.lab.sim.fleets import three_regions

FOLDER = Path(__file__).parent / "golden"
POLICIES = (
    "gorgo-ms",
    "gorgo",
    "least-load",
    "least-load-first-token",
    "least-request",
    "prefix-cache",
    "prefix-cache-in-flight",
    "simple-session-affinity",
    "power-of-two",
    "oracle",
)
#: So that there are queues, and choices that depend on them.
TIME_SCALE = 0.5


def replayed(policy: str) -> list[list[Any]]:
    """Per request: replica, cached and believed tokens, TTFT in ms and E2E in s."""
    feed = feed_of(load_requests("chat-small", TraceFilters(limit=120)), time_scale=TIME_SCALE)
    records = Simulation(three_regions(), policy_of(policy), seed=0).run(feed).records
    return [
        [r.replica, r.cached_tokens, r.estimated_cached_tokens, round(r.ttft_ms or 0.0, 3), round(r.e2e_s or 0.0, 6)]
        for r in records
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_window_is_served_as_it_always_was(policy: str) -> None:
    golden = json.loads((FOLDER / f"{policy}.json").read_text())
    found = replayed(policy)
    assert [row[:3] for row in found] == [row[:3] for row in golden]
    for mine, theirs in zip(found, golden, strict=True):
        assert mine[3:] == pytest.approx(theirs[3:], abs=2e-3)  # the last digits are the machine's


def renew() -> None:
    for policy in POLICIES:
        lines = ",\n".join(json.dumps(row) for row in replayed(policy))
        (FOLDER / f"{policy}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    renew()
