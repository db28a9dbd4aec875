"""The estimate of `decode_tokens` against the tokens that simulated engines have made, every half second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.policy.interface import Candidates
from gorgo.core.router import Router
from gorgo.lab.sim.engine.profiles import EngineProfile, as_vllm
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.registry import make_policy
from tests.core.training.learners import LeastPredicted
from tests.lab.sim.fleets import three_regions


def answers(requests: int, *, every_s: float, bursts: bool = False) -> list[SimRequest]:
    """Prompts of 200 to 6,000 tokens and answers of 20 to 600; in bursts each second minute has 3.3 times as many."""
    rng = np.random.default_rng(0)
    feed: list[SimRequest] = []
    arrival_s = 0.0
    for index in range(requests):
        prompt_tokens = int(rng.integers(200, 6000))
        feed.append(
            SimRequest(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=prompt_tokens,
                output_tokens=int(rng.integers(20, 600)),
                blocks=rng.bytes(8 * (prompt_tokens // 512)),
                prefix_hash=index % 50,
                body_bytes=4 * prompt_tokens,
            )
        )
        arrival_s += float(rng.exponential(0.3 * every_s if bursts and int(arrival_s / 60) % 2 else every_s))
    return feed


class Samples:
    """A controller that reads estimates and engines."""

    def __init__(self) -> None:
        self.next_s: float | None = 5.0
        self.simulation: Simulation | None = None
        self.estimated: list[float] = []
        self.true: list[float] = []

    def act(self, router: Router, now: float) -> None:
        assert self.simulation is not None
        self.next_s = now + 0.5
        columns, names = router._fleet.columns, tuple(router._fleet.replicas)
        slots = np.array([router._fleet.replicas[name].slot for name in names])
        rows = Candidates(slots, names, columns, np.zeros(len(columns.salt)), 0, is_all=False, now=now)
        self.estimated += rows.decode_tokens.tolist()
        for name in names:
            self.true.append(sum(request.emitted for request in self.simulation.engines[name].model.batch.decoding))


def error_of(fleet: SimFleet, feed: list[SimRequest]) -> float:
    """Sum of absolute errors per token that the engines had made."""
    samples = Samples()
    # Engines advance step by step: one that is ahead of time has tokens that none has received.
    simulation = Simulation(
        fleet,
        make_policy("least-request"),
        shadow=LeastPredicted(),
        seed=0,
        controllers=[samples],
        ahead=False,
        block_tokens=512,
    )
    samples.simulation = simulation
    simulation.run(feed)
    estimated, true = np.array(samples.estimated), np.array(samples.true)
    known = ~np.isnan(estimated)
    assert known.mean() > 0.99
    assert true[known].sum() > 50_000
    return float(np.abs(estimated - true)[known].sum() / true[known].sum())


def of_sglang(profile: EngineProfile) -> EngineProfile:
    return profile


@pytest.mark.parametrize("engine", [of_sglang, as_vllm])
@pytest.mark.parametrize(
    ("every_s", "bursts"),
    [
        pytest.param(0.4, False, marks=pytest.mark.system),
        pytest.param(0.2, False, marks=pytest.mark.system),
        (0.5, True),
    ],
)
def test_decode_tokens_are_within_a_sixth_of_the_truth_at_any_load(
    engine: Callable[[EngineProfile], EngineProfile], every_s: float, bursts: bool
) -> None:
    """Simulated; 0.09 to 0.13 with 600 requests. With the mean gap of ended answers alone it was 0.38 in bursts."""
    fleet = three_regions()
    replicas = tuple(replace(each, profile=engine(each.profile)) for each in fleet.replicas)
    assert error_of(SimFleet(replicas), answers(400, every_s=every_s, bursts=bursts)) < 1 / 6
