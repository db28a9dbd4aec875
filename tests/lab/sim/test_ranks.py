"""Replicas with data-parallel ranks behind one URL, simulated under the default policy with its queue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.registry import make_policy

PROFILE = replace(find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate"), name="eight-ranks", ranks=8)


def fleet() -> SimFleet:
    return SimFleet(
        tuple(SimReplica(ReplicaSpec(name, "us-ashburn"), PROFILE, Link(rtt_s=0.002)) for name in ("a", "b"))
    )


def sim_request(index: int, at_s: float, tokens: int, blocks: bytes) -> SimRequest:
    return SimRequest(
        index=index, arrival_s=at_s, prompt_tokens=tokens, output_tokens=20, blocks=blocks, prefix_hash=index
    )


def p95_ms(policy: str, *, since_s: float = 10.0, lasts_s: float = 25.0) -> float:
    """Return the p95 of the requests that arrive after the first seconds: prompts of 0.3 to 0.8 s, 12 a second."""
    feed: list[SimRequest] = []
    rng, at_s = np.random.default_rng(0), 0.0
    while (at_s := at_s + rng.exponential(1 / 12)) < lasts_s:
        tokens = int(rng.integers(4_000, 8_000))
        blocks = rng.bytes(8 * (tokens // 64))
        feed.append(sim_request(len(feed), at_s, tokens, blocks))
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True))
    simulation = Simulation(fleet(), make_policy(policy), seed=0, limits=limits, block_tokens=64)
    records = simulation.run(feed).records
    assert len(records) == len(feed)
    late = [r.ttft_ms for r, request in zip(records, feed, strict=True) if request.arrival_s >= since_s]
    return float(np.quantile([ttft_ms for ttft_ms in late if ttft_ms is not None], 0.95))


@pytest.mark.parametrize("policy", ["gorgo-ms", "gorgo-residual"])
def test_ranks_are_used_as_by_least_load(policy: str) -> None:
    assert p95_ms(policy) <= 1.1 * p95_ms("least-load")


def test_a_scrape_of_ranks_is_their_sum() -> None:
    simulation = Simulation(fleet(), make_policy("least-load"), seed=0, block_tokens=64)
    simulation.run([sim_request(0, 0.0, 64, b"k" * 8)])
    (first, *_) = simulation.router.view.snapshots(now=1.0)
    assert first.max_running_requests == 8 * PROFILE.max_running_requests
