"""The learned policies in virtual time, from a cold start: each learns within a short run on two kinds of GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.decision import Decision
from gorgo.core.policy.interface import Policy
from gorgo.core.training.learning import Learner
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.faults.scenarios import with_accurate_priors
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.records import SimResult
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.training import TrainingController
from gorgo.learning.trainer import Trainer
from gorgo.policies.learned.gorgo_residual import GorgoResidual
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from gorgo.policies.registry import make_policy
from tests.lab.sim.feeds import conversations

REQUESTS, ROUND = 1000, 200
FEED = conversations(REQUESTS, every_s=0.2, users=24)
LEARNED: dict[str, type[Lodestar | PredictedLatency | GorgoResidual]] = {
    "lodestar": Lodestar,
    "predicted-latency": PredictedLatency,
    "gorgo-residual": GorgoResidual,
}


def two_speeds() -> SimFleet:
    """Two L40S and two H100, which is three times as fast, side by side."""
    replicas = [
        SimReplica(
            ReplicaSpec(f"{gpu}-{number}", "local", accelerator=gpu),
            find_profile(f"1x{gpu}-Llama-3.1-8B"),
            Link(rtt_s=0.002),
        )
        for gpu in ("L40S", "H100")
        for number in range(2)
    ]
    return with_accurate_priors(SimFleet(tuple(replicas)))


def learner(name: str) -> Learner:
    """The policy, with rounds short enough for the feed."""
    kind = LEARNED[name]
    return kind(replace(kind().training, round_samples=ROUND, first_samples=ROUND))


def run(policy: Policy, *controllers: TrainingController) -> tuple[SimResult, list[Decision]]:
    """The records, and the decisions in their order."""
    simulation = Simulation(two_speeds(), policy, seed=3, controllers=controllers, scrape_interval_s=1.0)
    result = simulation.run(FEED)
    simulation.router.check()
    return result, simulation.router.view.newest_decisions(REQUESTS)[::-1]


def trained(policy: Learner) -> tuple[SimResult, list[Decision], TrainingController]:
    controller = TrainingController(Trainer, seed=3)
    return *run(policy, controller), controller


def mean_ttft_ms(result: SimResult) -> float:
    """Of the second half of the feed."""
    return float(np.mean([record.ttft_ms for record in result.records[REQUESTS // 2 :]]))


@pytest.mark.parametrize("name", LEARNED)
def test_it_learns_within_a_short_run_and_is_far_ahead_of_chance(name: str) -> None:
    result, decisions, controller = trained(learner(name))
    assert len(controller.rounds) >= 2
    assert mean_ttft_ms(result) < 0.5 * mean_ttft_ms(run(make_policy("random"))[0])
    late = decisions[REQUESTS // 2 :]
    assert all(decision.model_version for decision in late)
    by_model = sum(decision.fallback not in ("cold_start", "out_of_range", "no_model") for decision in late)
    assert by_model > 0.6 * len(late)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.system
def test_predictions_of_the_model_follow_measured_times(name: str) -> None:
    """Rank correlation over the late requests: predicted and measured time to first token."""
    result, decisions, _ = trained(learner(name))
    pairs = [
        [decision.predicted_ttft_s, record.ttft_ms]
        for decision, record in zip(decisions[REQUESTS // 2 :], result.records[REQUESTS // 2 :], strict=True)
        if decision.predicted_ttft_s is not None and record.ttft_ms is not None
    ]
    predicted, measured = (np.argsort(np.argsort(column)) for column in np.array(pairs).T)
    assert np.corrcoef(predicted, measured)[0, 1] > 0.6


@pytest.mark.parametrize(
    ("name", "rule"),
    [("lodestar", "prefix-cache-and-load"), ("predicted-latency", "load-prefix"), ("gorgo-residual", "gorgo-ms")],
)
def test_a_cold_start_is_its_rule_request_by_request(name: str, rule: str) -> None:
    cold, decisions = run(make_policy(name))
    plain, _ = run(make_policy(rule))
    assert [(record.replica, record.ttft_ms) for record in cold.records] == [
        (record.replica, record.ttft_ms) for record in plain.records
    ]
    assert {decision.fallback for decision in decisions} == ({None} if rule == "gorgo-ms" else {"cold_start"})


def test_guards_of_lodestar_act_in_a_run_and_are_counted() -> None:
    _, decisions, _ = trained(learner("lodestar"))
    words = Counter(decision.fallback for decision in decisions)
    assert words["cold_start"] >= ROUND
    assert words["explore"] > 0
    assert words["out_of_range"] > 0
    assert words[None] > len(decisions) / 3
