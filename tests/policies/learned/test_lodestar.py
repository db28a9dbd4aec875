"""`lodestar`: each step of algorithm 4, forced and counted, with a linear model in place of the network."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice
from gorgo.core.training.learning import Learner
from gorgo.errors import ConfigError
from gorgo.policies.learned.lodestar import FEATURES, Lodestar, is_saturated, replicas_of_group
from gorgo.policies.prefix_cache import PrefixCacheAndLoad
from tests.policies.learned.models import BrokenFake, LinearFake
from tests.policies.table import choose, request, rows_chosen, table

#: Predicts the prompt tokens before a first token at 1,000 a second.
BY_LOAD = {"prefill_tokens": 0.001}


def lodestar(model: LinearFake | None) -> Lodestar:
    policy = Lodestar()
    policy.adopt(model)
    return policy


def trained(factors: dict[str, float] | None = None, **given: Any) -> Lodestar:
    return lodestar(LinearFake(FEATURES, BY_LOAD if factors is None else factors, **given))


def waiting(*tokens: float, **given: Any) -> Candidates:
    return table(len(tokens), queued_prefill_tokens=list(tokens), **given)


def full(**given: Any) -> Candidates:
    """Full pools, and a prompt with 400 cached tokens on the replica of the least load."""
    return waiting(
        *(100.0 * rank for rank in range(8)),
        used_tokens=[900.0] * 8,
        kv_capacity_tokens=[1000.0] * 8,
        cached=[400.0] + [0.0] * 7,
        salt=np.random.default_rng(1).integers(0, 2**62, 8),
        **given,
    )


def grouped(group: int) -> RouteRequest:
    return replace(request(), blocks=group.to_bytes(8, "little") * 12)


def guards(policy: Lodestar, candidates: Candidates, *, draws: int = 100, **weights: Any) -> Counter[str | None]:
    """Fallback words by count."""
    return Counter(choose(policy, candidates, seed=seed, **weights).fallback for seed in range(draws))


def test_it_is_a_learner() -> None:
    assert isinstance(Lodestar(), Learner)


def test_a_cold_start_is_the_heuristic_draw_for_draw() -> None:
    rng = np.random.default_rng(5)
    for seed in range(300):
        rows = int(rng.integers(1, 9))
        candidates = waiting(
            *rng.integers(0, 5, rows),
            cached=rng.integers(0, 3, rows) * 300,
            in_flight_requests=rng.integers(0, 12, rows),
        )
        found, plain = (choose(policy, candidates, seed=seed) for policy in (Lodestar(), PrefixCacheAndLoad()))
        assert (found.row, found.fallback, found.cost) == (plain.row, "cold_start", None)
        assert {name: list(column) for name, column in found.terms.items()} == {
            name: list(column) for name, column in plain.terms.items()
        }


def test_the_least_predicted_ttft_wins_and_its_cost_is_in_milliseconds() -> None:
    choice = choose(trained(), waiting(2000, 500, 1000), epsilon=0.0)
    assert choice.cost is not None
    assert (choice.row, choice.fallback, list(choice.cost)) == (1, None, [2000, 500, 1000])
    assert choice.predicted_ttft_s == pytest.approx(0.5)


def test_equal_predictions_go_to_the_fewest_in_flight() -> None:
    assert rows_chosen(trained(), waiting(500, 500, 900, in_flight_requests=[3, 1, 0])) <= {1, 0, 2}
    draws = [choose(trained(), waiting(500, 500, 900, in_flight_requests=[3, 1, 0]), epsilon=0.0).row for _ in range(9)]
    assert set(draws) == {1}


def test_any_row_out_of_range_leaves_the_decision_to_the_heuristic() -> None:
    policy = trained(low={"prefill_tokens": 0.0}, high={"prefill_tokens": 1000.0})
    assert guards(policy, waiting(500, 100, 1100), epsilon=0.0) == {None: 100}  # within the margin of 0.1
    beyond = waiting(500, 100, 1101, cached=[900, 0, 0])
    assert guards(policy, beyond, epsilon=0.0) == {"out_of_range": 100}
    assert choose(policy, beyond).row == choose(PrefixCacheAndLoad(), beyond).row == 0
    assert guards(policy, beyond, epsilon=0.0, range_check=0.0) == {None: 100}
    assert guards(policy, beyond, epsilon=0.0, range_margin=0.2) == {None: 100}


def test_exploration_is_uniform_and_as_frequent_as_set() -> None:
    candidates = waiting(0, 5000, 5000, 5000)
    choices = [choose(trained(), candidates, seed=seed, epsilon=0.2) for seed in range(1000)]
    explored = Counter(choice.row for choice in choices if choice.fallback == "explore")
    assert 150 < sum(explored.values()) < 250
    assert min(explored[row] for row in range(4)) > 25
    assert all(choice.cost is None for choice in choices if choice.fallback == "explore")


def test_while_pools_are_full_a_group_has_k_replicas() -> None:
    for group in range(1, 20):
        choices = {
            k: choose(trained(), full(), asked=grouped(group), seed=group, epsilon=0.0, k=float(k))
            for k in (0, 1, 2, 8)
        }
        assert choices[0].fallback is choices[8].fallback is None  # no filter, and one that all pass
        assert choices[0].row == choices[8].row == 0
        assert choices[1].fallback == choices[2].fallback == "k_filter"
        assert choices[2].cost is None
        assert choices[2].row <= choices[1].row  # of the two the one with the least prediction


def test_the_filter_needs_full_pools_and_a_long_match() -> None:
    assert guards(trained(), full(), epsilon=0.0) == {"k_filter": 100}
    assert guards(trained(), full(), epsilon=0.0, kv_saturation=0.9) == {None: 100}
    assert guards(trained(), full(), epsilon=0.0, k_min_hit=400.0) == {None: 100}


def test_near_best_replicas_are_equal_and_stay_within_the_filter() -> None:
    candidates = waiting(1000, 1090, 1110)
    assert {choose(trained(), candidates, seed=seed, epsilon=0.0, delta=0.1).row for seed in range(50)} == {0, 1}
    assert guards(trained(), candidates, epsilon=0.0, delta=0.1) == {"near_best": 100}
    assert guards(trained(), candidates, epsilon=0.0, delta=0.01) == {None: 100}
    rows = {
        choose(trained(), full(), asked=grouped(3), seed=seed, epsilon=0.0, delta=1.0, k=1.0).row for seed in range(50)
    }
    assert len(rows) == 1


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf")], ids=["raises", "NaN", "infinite"])
def test_a_model_that_fails_leaves_the_decision_to_the_heuristic(answer: float | None) -> None:
    candidates = waiting(500, 0, cached=[900, 0])
    policy = lodestar(BrokenFake(FEATURES, answer))
    assert guards(policy, candidates, epsilon=0.0) == {"no_model": 100}
    assert choose(policy, candidates, epsilon=0.0).row == choose(PrefixCacheAndLoad(), candidates).row == 0


def test_one_replica_needs_no_guard() -> None:
    policy = trained(low={"prefill_tokens": 0.0}, high={"prefill_tokens": 1.0})
    assert guards(policy, waiting(9000), epsilon=1.0) == {None: 100}


def test_a_large_fleet_is_sampled_with_the_row_of_the_heuristic() -> None:
    evaluated: list[int] = []

    class Counting(LinearFake):
        def ttft_s(self, table: Any) -> Any:
            evaluated.append(len(table))
            return super().ttft_s(table)

    policy = lodestar(Counting(FEATURES, {"hit_share": -1.0}, constant=1.0))
    candidates = waiting(*[0.0] * 300, cached=[0.0] * 299 + [1000.0])
    choices = [choose(policy, candidates, seed=seed, epsilon=0.0, d=16.0) for seed in range(20)]
    assert max(evaluated) <= 17
    assert {choice.row for choice in choices} == {299}  # the heuristic's, which has the prompt cached
    assert {(choice.cost, choice.fallback) for choice in choices} == {(None, None)}
    assert choose(policy, waiting(*[0.0] * 256), epsilon=0.0).cost is not None


def test_the_features_of_every_row_go_with_the_choice() -> None:
    for policy in (Lodestar(), trained()):
        choice = choose(policy, waiting(2000, 500))
        assert choice.features is not None
        assert choice.features[:, FEATURES.index("prefill_tokens")].tolist() == [2000, 500]


def test_a_model_of_other_features_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model 1 has the features rtt_s; expected prompt_tokens, "):
        Lodestar().adopt(LinearFake(("rtt_s",), {}))


def test_without_its_model_it_is_cold_again() -> None:
    policy = trained()
    policy.adopt(None)
    assert guards(policy, waiting(1, 2)) == {"cold_start": 100}


def parts(choice: Choice) -> list[list[float]]:
    """Idle time, backlog and prefill of each candidate."""
    assert choice.prediction is not None
    found = choice.prediction()
    return [list(found.idle_s), list(found.backlog_s), list(found.prefill_s)]


def test_a_prediction_is_divided_by_the_priors_into_idle_time_and_backlog() -> None:
    """Network 0.1 s and prefill 1 s by the priors: a TTFT of 3 s has 1.9 s of backlog, one of 0.5 s has none."""
    known: dict[str, Any] = {"prefill_token_s": [0.001] * 2, "slowdown": [1.0] * 2, "rtt_s": [0.1] * 2}
    known |= {"drained_at_s": [-np.inf] * 2, "head_due_s": [np.inf] * 2}
    choice = choose(trained(), waiting(3000, 500, **known), epsilon=0.0)
    np.testing.assert_allclose(parts(choice), [[1.1, 0.5], [1.9, 0.0], [1.0, 0.5]])
    cold = choose(Lodestar(), waiting(3000, 500, **known))
    np.testing.assert_allclose(parts(cold), [[1.1, 1.1], [0.0, 0.0], [1.0, 1.0]])


SALTS = np.random.default_rng(0).integers(0, 2**63, 8).astype(np.uint64)


def saturated(usage: list[float], cached: list[float]) -> bool:
    return is_saturated(np.array(usage), np.array(cached), saturation=0.8, min_hit_tokens=100)


def test_pools_are_full_by_their_mean_and_a_short_match_is_not_worth_the_filter() -> None:
    assert saturated([0.9, 0.8], [0, 101])
    assert not saturated([0.9, 0.7], [0, 101])
    assert not saturated([0.9, 0.8], [0, 100])


def test_an_unknown_usage_counts_as_the_worst_known_and_as_none_if_none_is_known() -> None:
    assert saturated([0.9, np.nan], [0, 200])
    assert not saturated([np.nan, np.nan], [0, 200])


def test_a_group_has_k_replicas_and_always_the_same() -> None:
    rows = replicas_of_group(SALTS, 77, 2)
    assert len(set(rows.tolist())) == 2
    assert rows.tolist() == replicas_of_group(SALTS, 77, 2).tolist()
    assert replicas_of_group(SALTS, 77, 8).tolist() == list(range(8))


def test_groups_spread_over_the_fleet() -> None:
    counts = np.bincount(np.concatenate([replicas_of_group(SALTS, group, 2) for group in range(-400, 400)]))
    assert counts.min() > 150


def test_when_a_replica_leaves_only_its_groups_change_and_keep_their_other_replica() -> None:
    remaining = np.delete(np.arange(8), 3)
    for group in range(200):
        before = set(replicas_of_group(SALTS, group, 2).tolist())
        after = {int(remaining[row]) for row in replicas_of_group(SALTS[remaining], group, 2)}
        assert before - {3} <= after
