"""Policies that learn, in virtual time: rounds at stated times, the same model for the same seed, learning from a
cold start.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.decision import Decision
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.core.training.learning import Learner, ModelKind, TrainingSpec
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.records import SimResult
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.training import INTERVAL_S, TrainingController
from gorgo.learning.trainer import Trainer
from gorgo.policies.learned.gorgo_residual import GorgoResidual
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from gorgo.policies.registry import make_policy
from tests.core.learners import NAMES, LeastPredicted, LeastSquaresTrainer, LinearModel
from tests.lab.sim.fleets import conversations, three_regions

# --- A policy that learns in virtual time: rounds at stated times, and the same model for the same seed.


SPEC = TrainingSpec("linear", NAMES, round_samples=50, fit_s=2.5)
FEED = conversations(400, every_s=0.2)


class Freezes:
    """A controller: the operator freezes the weights."""

    def __init__(self, at_s: float) -> None:
        self.next_s: float | None = at_s

    def act(self, router: Router, now: float) -> None:
        router.settings.frozen, self.next_s = True, None


class Switches:
    """A controller: the operator sets another policy that learns."""

    def __init__(self, at_s: float) -> None:
        self.next_s: float | None = at_s

    def act(self, router: Router, now: float) -> None:
        router.settings.set_policy(
            LeastPredicted(replace(SPEC, names=("rtt_s", "in_flight_requests"))), Weights(), now=now
        )
        self.next_s = None


def run(controller: TrainingController, *others: Freezes | Switches, seed: int = 0) -> Simulation:
    simulation = Simulation(three_regions(), LeastPredicted(SPEC), seed=seed, controllers=[controller, *others])
    simulation.run(FEED)
    simulation.router.check()
    return simulation


def test_a_model_is_adopted_after_the_stated_time_of_its_training() -> None:
    controller = TrainingController(LeastSquaresTrainer, seed=1)
    router = run(controller).router
    assert len(controller.rounds) >= 5
    assert [each.model.version for each in controller.rounds] == list(range(1, len(controller.rounds) + 1))
    for each in controller.rounds:
        assert each.started_s % INTERVAL_S == 0.0
        assert each.adopted_s == each.started_s + SPEC.fit_s
    for first, second in pairwise(controller.rounds):
        assert first.adopted_s is not None
        assert second.started_s >= first.adopted_s, "one round at a time"
    first_s = controller.rounds[0].adopted_s
    assert first_s is not None
    for decision in router.view.newest_decisions(1000):
        cold = decision.decided_s < first_s
        assert (decision.fallback == "cold_start") == cold == (decision.model_version is None)


def test_outcomes_are_those_of_the_engines_and_a_model_of_them_predicts() -> None:
    controller = TrainingController(LeastSquaresTrainer, seed=0)
    simulation = run(controller)
    outcomes = simulation.router.learning.outcomes
    assert outcomes is not None
    outcomes.check()
    rows = outcomes.since(0)
    assert len(rows) == len(FEED)
    predicted = controller.rounds[-1].model.ttft_s(rows.features)
    assert np.corrcoef(predicted, rows.ttft_s)[0, 1] > 0.6
    assert (rows.ttft_s >= rows.features[:, NAMES.index("rtt_s")] * 0.5).all(), "a first token takes the network's time"


def test_the_same_seed_makes_the_same_models_and_another_one_others() -> None:
    factors = []
    for seed in (1, 1, 2):
        controller = TrainingController(LeastSquaresTrainer, seed=seed)
        run(controller)
        factors.append([each.model.arrays()[0]["factors"].tolist() for each in controller.rounds])
    assert factors[0] == factors[1] != factors[2]


def test_frozen_weights_stop_rounds_and_a_model_in_training_is_not_adopted() -> None:
    free = TrainingController(LeastSquaresTrainer, seed=0)
    run(free)
    second = free.rounds[1]
    frozen = TrainingController(LeastSquaresTrainer, seed=0)
    router = run(frozen, Freezes(second.started_s + 1.0)).router
    assert [each.adopted_s is None for each in frozen.rounds] == [False, True]
    assert router.learning.model_version == 1


def test_a_policy_frozen_at_a_time_retains_its_model() -> None:
    controller = TrainingController(LeastSquaresTrainer, seed=0, until_s=30.0)
    router = run(controller).router
    assert controller.rounds[-1].started_s <= 30.0
    assert router.learning.model_version == controller.rounds[-1].model.version < 5


def test_a_model_of_another_fleet_is_in_use_from_the_start() -> None:
    model = LinearModel(version=7)
    controller = TrainingController(LeastSquaresTrainer, seed=0, model=model, until_s=-1.0)
    router = run(controller).router
    assert controller.rounds == []
    assert {decision.model_version for decision in router.view.newest_decisions(1000)} == {7}


def test_another_policy_begins_without_a_model_and_with_outcomes_of_its_own() -> None:
    controller = TrainingController(LeastSquaresTrainer, seed=0)
    router = run(controller, Switches(40.0)).router
    versions = [each.model.version for each in controller.rounds]
    again = versions.index(1, 1)
    assert controller.rounds[again].model.names == ("rtt_s", "in_flight_requests")
    assert versions == [*range(1, again + 1), *range(1, len(versions) - again + 1)]
    assert router.learning.model_version == versions[-1]


def test_a_policy_that_does_not_learn_is_not_trained() -> None:
    controller = TrainingController(LeastSquaresTrainer, seed=0)
    Simulation(three_regions(), make_policy("random"), seed=0, controllers=[controller]).run(FEED[:20])
    assert controller.rounds == []


def test_a_shadow_learns_while_another_policy_routes() -> None:
    controller = TrainingController(LeastSquaresTrainer, seed=0)
    simulation = Simulation(
        three_regions(), make_policy("random"), shadow=LeastPredicted(SPEC), seed=0, controllers=[controller]
    )
    simulation.run(FEED)
    scores = [decision.shadow for decision in reversed(simulation.router.view.newest_decisions(1000))]
    assert scores[0] is not None
    assert scores[0].rank is None, "cold"
    assert scores[-1] is not None
    assert scores[-1].rank in (1, 2, 3)


@pytest.mark.parametrize("kind", ["mlp", "linear", "rls"])
def test_models_of_every_kind_are_the_same_for_the_same_seed(kind: ModelKind) -> None:
    spec = replace(SPEC, kind=kind, epochs=2, first_samples=50, round_samples=100)
    found = []
    for _ in range(2):
        controller = TrainingController(Trainer, seed=5, until_s=60.0)
        simulation = Simulation(three_regions(), LeastPredicted(spec), seed=5, controllers=[controller])
        simulation.run(FEED)
        assert simulation.router.learning.model_version == len(controller.rounds) >= 2
        found.append([each.model.arrays()[0] for each in controller.rounds])
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name])


# --- The learned policies in virtual time, from a cold start: each learns within a short run on two kinds of GPU.


REQUESTS, ROUND = 1000, 200
FEED_LEARNED_POLICIES = conversations(REQUESTS, every_s=0.2, users=24)
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


def run_learned_policies(policy: Policy, *controllers: TrainingController) -> tuple[SimResult, list[Decision]]:
    """The records, and the decisions in their order."""
    simulation = Simulation(two_speeds(), policy, seed=3, controllers=controllers, scrape_interval_s=1.0)
    result = simulation.run(FEED_LEARNED_POLICIES)
    simulation.router.check()
    return result, simulation.router.view.newest_decisions(REQUESTS)[::-1]


def trained(policy: Learner) -> tuple[SimResult, list[Decision], TrainingController]:
    controller = TrainingController(Trainer, seed=3)
    return *run_learned_policies(policy, controller), controller


def mean_ttft_ms(result: SimResult) -> float:
    """Of the second half of the feed."""
    return float(np.mean([record.ttft_ms for record in result.records[REQUESTS // 2 :]]))


@pytest.mark.parametrize("name", LEARNED)
def test_it_learns_within_a_short_run_and_is_far_ahead_of_chance(name: str) -> None:
    result, decisions, controller = trained(learner(name))
    assert len(controller.rounds) >= 2
    assert mean_ttft_ms(result) < 0.5 * mean_ttft_ms(run_learned_policies(make_policy("random"))[0])
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
    cold, decisions = run_learned_policies(make_policy(name))
    plain, _ = run_learned_policies(make_policy(rule))
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
