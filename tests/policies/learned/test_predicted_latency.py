"""`predicted-latency`: llm-d's filters, scorer and picker in their order, with linear models in place of trees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.training.learner import Learner
from gorgo.core.training.outcomes import TrainingRows
from gorgo.learning.trainer import Trainer
from gorgo.policies.learned.predicted_latency import FEATURES, PredictedLatency
from gorgo.policies.load_prefix import LoadPrefix
from tests.policies.learned.models import BrokenFake, LinearFake
from tests.policies.table import choose, request, table

#: A first token after 1 ms per uncached token in flight, and 1 ms per output token and request.
TTFT, TPOT = {"uncached_prefill_tokens": 0.001}, {"in_flight_requests": 0.001}


def policy_of(model: LinearFake | None = None) -> PredictedLatency:
    policy = PredictedLatency()
    policy.adopt(model or LinearFake(FEATURES, TTFT, tpot=TPOT))
    return policy


def asked(*, ttft_s: float | None = None, tpot_s: float | None = None) -> RouteRequest:
    """A prompt of ten full blocks."""
    return replace(request(prompt_tokens=640), blocks=bytes(80), slo_ttft_s=ttft_s, slo_tpot_s=tpot_s)


def busy(*tokens: float, in_flight: float = 10.0, **given: Any) -> Candidates:
    """Replicas with so many uncached tokens before a first token."""
    columns: dict[str, Any] = {"in_flight_requests": [in_flight] * len(tokens), **given}
    return table(len(tokens), uncached_prefill_tokens=list(tokens), prompt_tokens=640, **columns)


def guards(
    policy: PredictedLatency, candidates: Candidates, *, draws: int = 100, **weights: Any
) -> Counter[str | None]:
    return Counter(choose(policy, candidates, seed=seed, asked=asked(), **weights).fallback for seed in range(draws))


def test_it_is_a_learner() -> None:
    assert isinstance(PredictedLatency(), Learner)


def test_rounds_are_as_frequent_as_llm_d_s_and_not_lodestar_s() -> None:
    """llm-d trains each ten seconds; a model of a hundred samples must not serve the next thousand requests."""
    trainer = Trainer(replace(PredictedLatency().training, kind="linear"), seed=0)
    rng, rounds = np.random.default_rng(0), []
    for number in range(0, 3000, 20):
        rows = replace(TrainingRows.empty(FEATURES, 20), first_seq=number)
        rows.features[:] = rng.random(rows.features.shape)
        trainer.add(rows)
        if trainer.due():
            rounds.append(number)
            trainer.train()
    waits = np.diff([0, *rounds])
    assert max(waits[:8]) <= 120
    assert 200 < waits[-1] < 400, "a tenth of what is stored, so that the cost of a request is bounded"


def test_a_cold_start_is_load_prefix_draw_for_draw() -> None:
    rng = np.random.default_rng(5)
    for seed in range(200):
        rows = int(rng.integers(1, 9))
        candidates = busy(
            *rng.integers(0, 5, rows),
            cached=rng.integers(0, 3, rows) * 300,
            queued_requests=rng.integers(0, 4, rows),
            used_tokens=rng.integers(0, 900, rows),
            kv_capacity_tokens=[1000.0] * rows,
        )
        found, plain = (choose(policy, candidates, seed=seed) for policy in (PredictedLatency(), LoadPrefix()))
        assert (found.row, found.fallback, found.cost) == (plain.row, "cold_start", None)


def test_without_objectives_the_least_prediction_wins() -> None:
    choice = choose(policy_of(), busy(3000, 1000, 2000), asked=asked(), epsilon=0.0)
    assert choice.cost is not None
    assert (choice.row, choice.fallback) == (1, None)
    assert list(choice.cost) == [100.0, 0.0, 50.0]
    assert choice.predicted_ttft_s == pytest.approx(1.0)


def test_of_replicas_that_meet_both_objectives_the_least_headroom_wins() -> None:
    candidates = busy(3000, 1000, 2000, 4000)
    choice = choose(policy_of(), candidates, asked=asked(ttft_s=3.5, tpot_s=0.02), epsilon=0.0)
    assert choice.cost is not None
    assert (choice.row, list(choice.cost)) == (0, [0.0, 100.0, 50.0, 101.0])


def test_running_requests_with_a_stricter_objective_are_spared() -> None:
    """A token takes 10 ms everywhere; requests on the first replica want one every 5 ms."""
    candidates = busy(3000, 1000, slo_tpot_s=[0.005, np.nan])
    choice = choose(policy_of(), candidates, asked=asked(ttft_s=3.5, tpot_s=0.02), epsilon=0.0)
    assert choice.row == 1


def test_idle_replicas_go_first_where_none_meets_an_objective() -> None:
    candidates = busy(3000, 1000, 2000, in_flight_requests=[0, 5, 0])
    assert choose(policy_of(), candidates, asked=asked(), epsilon=0.0).row == 2


def test_replicas_without_a_score_are_ranked_by_their_predicted_first_token() -> None:
    candidates = busy(3000, 1000, 2000, 4000, in_flight_requests=[5, 0, 5, 5])
    choice = choose(policy_of(), candidates, asked=asked(), epsilon=0.0)
    assert choice.cost is not None
    assert (choice.row, list(choice.cost)) == (1, [151.0, 50.0, 101.0, 201.0])


def test_the_cached_replica_is_preferred_and_left_when_it_is_too_late() -> None:
    near, far = busy(4000, 100, cached=[640, 0]), busy(6000, 100, cached=[640, 0])
    assert guards(policy_of(), near, epsilon=0.0) == {"affinity_kept": 100}
    assert guards(policy_of(), far, epsilon=0.0) == {"affinity_left": 100}
    kept, left = (choose(policy_of(), rows, asked=asked(), epsilon=0.0) for rows in (near, far))
    assert (kept.row, kept.cost, left.row, left.cost) == (0, None, 1, None)
    assert choose(policy_of(), far, asked=asked(), epsilon=0.0, max_penalty_s=0.0).row == 0


def test_the_strict_gate_comes_first_and_the_loose_one_after_the_tiers() -> None:
    """Whole prompt, most of it, a quarter; the first misses its objective."""
    candidates = busy(4000, 1000, 100, cached=[640, 560, 160])
    late = asked(ttft_s=2.0, tpot_s=0.02)
    assert choose(policy_of(), candidates, asked=late, epsilon=0.0).row == 0
    assert choose(policy_of(), candidates, asked=late, epsilon=0.0, affinity_first=0.0).row == 1
    assert choose(policy_of(), candidates, asked=late, epsilon=0.0, affinity_first=0.0, affinity=0.0).row == 1
    spare = asked(ttft_s=2.0, tpot_s=0.02)
    open_ = choose(policy_of(), busy(4000, 1000, 1900, cached=[0, 0, 0]), asked=spare, epsilon=0.0)
    assert (open_.row, open_.fallback) == (2, None)


def test_gates_that_change_nothing_are_no_guard() -> None:
    assert guards(policy_of(), busy(4000, 100, cached=[640, 640]), epsilon=0.0) == {None: 100}
    assert guards(policy_of(), busy(4000, 100, cached=[300, 300]), epsilon=0.0) == {None: 100}


def test_exploration_opens_gates_and_takes_the_worse_tier() -> None:
    cached = busy(4000, 100, cached=[640, 0])
    found = guards(policy_of(), cached, epsilon=1.0)
    assert found == {"explore": 100}
    assert choose(policy_of(), cached, asked=asked(), epsilon=1.0).row == 1
    tiers = choose(policy_of(), busy(3000, 1000), asked=asked(ttft_s=2.0, tpot_s=0.02), epsilon=1.0)
    assert (tiers.row, tiers.fallback, tiers.cost) == (0, "explore", None)
    some = guards(policy_of(), cached, draws=1000, epsilon=0.05)
    assert 40 < some["explore"] < 150  # either gate


@pytest.mark.parametrize("answer", [None, float("nan")], ids=["raises", "NaN"])
def test_a_model_that_fails_leaves_the_decision_to_load_prefix(answer: float | None) -> None:
    candidates = busy(4000, 100, cached=[640, 0])
    assert guards(policy_of(BrokenFake(FEATURES, answer)), candidates) == {"no_model": 100}
    assert choose(policy_of(BrokenFake(FEATURES, answer)), candidates, asked=asked()).row == 0


def test_without_a_model_per_token_the_first_token_decides() -> None:
    choice = choose(
        policy_of(LinearFake(FEATURES, TTFT)), busy(3000, 1000), asked=asked(ttft_s=2.0, tpot_s=0.001), epsilon=0.0
    )
    assert choice.row == 1


def test_a_weighted_pick_follows_the_scores_and_has_no_cost() -> None:
    candidates = busy(3000, 1000, 2000)
    choices = [
        choose(policy_of(), candidates, seed=seed, asked=asked(), epsilon=0.0, weighted_pick=1.0) for seed in range(600)
    ]
    rows = Counter(choice.row for choice in choices)
    assert rows[1] / rows[2] == pytest.approx(101 / 51, rel=0.3)
    assert rows[0] < 30
    assert {choice.cost is None for choice in choices} == {True}


def test_the_candidates_of_a_request_are_predicted_in_one_call_per_time() -> None:
    calls: list[int] = []

    class Counting(LinearFake):
        def ttft_s(self, table: Any) -> Any:
            calls.append(len(table))
            return super().ttft_s(table)

    choose(policy_of(Counting(FEATURES, TTFT)), busy(1, 2, 3), asked=asked())
    assert calls == [3]
