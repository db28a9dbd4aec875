"""`predicted-latency`: llm-d's filters, scorer and picker in their order, with linear models in place of trees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates
from gorgo.core.training.learning import Learner
from gorgo.core.training.outcomes import TrainingRows
from gorgo.learning.trainer import Trainer
from gorgo.policies.learned.predicted_latency import (
    FEATURES,
    Headroom,
    PredictedLatency,
    cached_shares,
    gate,
    headroom_of,
    scores,
    tier,
)
from gorgo.policies.prefix_cache import LoadPrefix
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


@pytest.mark.parametrize(
    ("objectives", "row"),
    [({}, 1), ({"ttft_s": 0.2}, 1), ({"ttft_s": 0.2, "tpot_s": 0.001}, 1), ({"tpot_s": 0.02}, 1)],
    ids=["none", "first token", "both, one missed", "per token"],
)
def test_an_idle_replica_that_is_later_does_not_go_before_a_busy_one(objectives: dict[str, float], row: int) -> None:
    """An idle replica at 3.0 s, and a busy one at 0.1 s, which meets the objective of the first token."""
    candidates = busy(3000, 100, in_flight_requests=[0, 5])
    assert choose(policy_of(), candidates, asked=asked(**objectives), epsilon=0.0).row == row


def test_idle_replicas_go_first_where_none_meets_an_objective_by_llm_d_s_later_rule() -> None:
    candidates = busy(3000, 1000, 2000, in_flight_requests=[0, 5, 0])
    assert choose(policy_of(), candidates, asked=asked(), epsilon=0.0, idle_first=1.0).row == 2
    late = asked(ttft_s=0.2)
    assert (
        choose(policy_of(), busy(3000, 100, in_flight_requests=[0, 5]), asked=late, epsilon=0.0, idle_first=1.0).row
        == 0
    )


def test_replicas_without_a_score_are_ranked_by_their_predicted_first_token() -> None:
    candidates = busy(3000, 1000, 2000, 4000, in_flight_requests=[5, 0, 5, 5])
    choice = choose(policy_of(), candidates, asked=asked(), epsilon=0.0, idle_first=1.0)
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


def test_a_share_epsilon_of_decisions_explores_whatever_is_cached() -> None:
    """Both gates meet a prompt that is wholly cached: apart they would leave a share of epsilon squared."""
    for shared in (640, 560):
        candidates = busy(4000, 100, cached=[shared, 0])
        choices = [choose(policy_of(), candidates, seed=seed, asked=asked(), epsilon=0.05) for seed in range(2000)]
        explored = sum(choice.fallback == "explore" for choice in choices)
        assert 70 < explored < 130
        assert explored == sum(choice.row == 1 for choice in choices), "counted where a gate opened, and only there"


def test_a_draw_that_opens_nothing_is_not_counted_as_exploration() -> None:
    assert guards(policy_of(), busy(4000, 100), epsilon=1.0) == {None: 100}
    assert guards(policy_of(), busy(4000, 100, cached=[640, 640]), epsilon=1.0) == {None: 100}


@pytest.mark.parametrize("answer", [None, float("nan")], ids=["raises", "NaN"])
def test_a_model_that_fails_leaves_the_decision_to_load_prefix(answer: float | None) -> None:
    candidates = busy(4000, 100, cached=[640, 0])
    assert guards(policy_of(BrokenFake(FEATURES, answer)), candidates) == {"no_model": 100}
    assert choose(policy_of(BrokenFake(FEATURES, answer)), candidates, asked=asked()).row == 0


def test_a_decision_shows_what_was_predicted_and_what_is_left_of_the_objectives() -> None:
    candidates = busy(3000, 1000)
    choice = choose(policy_of(), candidates, asked=asked(ttft_s=2.0, tpot_s=0.02), epsilon=0.0)
    shown = {name: column.tolist() for name, column in choice.estimates.items()}
    assert shown == {
        "ttft": pytest.approx([3.0, 1.0]),
        "tpot": pytest.approx([0.01, 0.01]),
        "headroom_ttft": pytest.approx([-1.0, 1.0]),
        "headroom_tpot": pytest.approx([0.01, 0.01]),
    }
    whole = choose(policy_of(), candidates, asked=replace(asked(), streamed=False), epsilon=0.0)
    assert whole.estimates.keys() == {"e2e", "headroom_ttft", "headroom_tpot"}


def test_an_answer_in_one_piece_has_no_objective_per_token() -> None:
    """It would miss one of a millisecond everywhere: the least headroom to its end decides."""
    candidates = busy(3000, 1000, in_flight_requests=[1, 9])
    given = asked(ttft_s=3.5, tpot_s=0.001)
    assert choose(policy_of(), candidates, asked=replace(given, streamed=False), epsilon=0.0).row == 0
    assert choose(policy_of(), candidates, asked=replace(given, streamed=False), epsilon=0.0).predicted_ttft_s != 3.0


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


SHARES, TTFT_S = np.array([1.0, 0.85, 0.2]), np.array([4.0, 3.0, 1.0])


def gated(
    share: float, *, rows: tuple[int, ...] = (0, 1, 2), max_penalty_s: float = 5.0, explores: bool = False
) -> tuple[list[int], str | None]:
    found = gate(np.array(rows), SHARES, TTFT_S, share=share, max_penalty_s=max_penalty_s, explores=explores)
    return found.rows.tolist(), found.guard


def test_candidates_with_the_share_pass_alone() -> None:
    assert gated(0.99) == ([0], "affinity_kept")
    assert gated(0.8) == ([0, 1], "affinity_kept")


@pytest.mark.parametrize(
    ("share", "rows"),
    [(0.0, (0, 1, 2)), (0.99, (1, 2)), (0.1, (0, 1, 2)), (0.99, (0,))],
    ids=["no gate", "no candidate has it", "each has it", "one candidate"],
)
def test_all_pass_where_there_is_nothing_to_prefer(share: float, rows: tuple[int, ...]) -> None:
    assert gated(share, rows=rows) == (list(rows), None)


def test_the_gate_opens_where_the_cached_ones_are_later_by_more_than_the_penalty() -> None:
    assert gated(0.99, max_penalty_s=2.0) == ([0, 1, 2], "affinity_left")
    assert gated(0.99, max_penalty_s=3.0) == ([0], "affinity_kept")
    assert gated(0.99, max_penalty_s=0.0) == ([0], "affinity_kept")  # no limit


def test_the_penalty_is_between_the_best_of_both_sides() -> None:
    assert gated(0.8, max_penalty_s=1.9) == ([0, 1, 2], "affinity_left")
    assert gated(0.8, max_penalty_s=2.1) == ([0, 1], "affinity_kept")


def test_exploration_opens_the_gate() -> None:
    assert gated(0.8, explores=True) == ([0, 1, 2], "explore")
    assert gated(0.1, explores=True) == ([0, 1, 2], None)


def test_shares_are_of_full_blocks() -> None:
    asked = replace(request(prompt_tokens=1000), blocks=bytes(8 * 15))
    assert cached_shares(asked, table(3, cached=[960, 480, 1000])).tolist() == [1.0, 0.5, 1.0]
    assert cached_shares(request(prompt_tokens=10), table(2, cached=[10, 0], prompt_tokens=10)).tolist() == [0.0, 0.0]


ALL = np.arange(3)
BUSY = np.ones(3)


def headroom(ttft_s: list[float], tpot_s: list[float]) -> Headroom:
    return Headroom(np.array(ttft_s), np.array(tpot_s))


def scored(
    given: Headroom,
    *,
    in_flight: np.ndarray = BUSY,
    rows: np.ndarray = ALL,
    share: float = 0.8,
    idle_first: bool = False,
) -> list[int]:
    return [int(score) for score in scores(rows, given, in_flight, ttft_share=share, idle_first=idle_first)]


def test_headroom_is_the_objective_minus_the_prediction() -> None:
    found = headroom_of(
        np.array([0.2, 0.6]),
        np.array([0.02, 0.06]),
        slo_ttft_s=0.5,
        slo_tpot_s=0.05,
        strictest_s=np.array([np.nan, 0.03]),
    )
    np.testing.assert_allclose(found.ttft_s, [0.3, -0.1])
    np.testing.assert_allclose(found.tpot_s, [0.03, -0.03])
    assert found.is_met.tolist() == [True, False]


def test_without_an_objective_headroom_is_minus_the_prediction() -> None:
    found = headroom_of(
        np.array([0.2]), np.array([0.02]), slo_ttft_s=None, slo_tpot_s=None, strictest_s=np.array([0.01])
    )
    assert (found.ttft_s.tolist(), found.tpot_s.tolist()) == ([-0.2], [-0.02])


def test_without_a_prediction_per_token_that_objective_is_met() -> None:
    found = headroom_of(np.array([0.2]), None, slo_ttft_s=1.0, slo_tpot_s=0.01, strictest_s=np.array([np.nan]))
    assert found.is_met.tolist() == [True]


def test_rows_that_meet_both_objectives_are_a_tier_of_their_own() -> None:
    mixed = headroom([0.1, 0.1, -0.1], [0.1, -0.1, 0.1])
    kept, explored = tier(ALL, mixed, explores=False), tier(ALL, mixed, explores=True)
    assert (kept.rows.tolist(), kept.is_explored) == ([0], False)
    assert (explored.rows.tolist(), explored.is_explored) == ([1, 2], True)


def test_a_tier_alone_is_never_left() -> None:
    for given in (headroom([1, 1, 1], [1, 1, 1]), headroom([-1, -1, -1], [1, 1, 1])):
        assert [tier(ALL, given, explores=explores).rows.tolist() for explores in (False, True)] == [[0, 1, 2]] * 2


def test_of_those_that_meet_both_the_least_headroom_has_the_highest_score() -> None:
    assert scored(headroom([0.1, 0.2, 0.3], [0.1, 0.1, 0.1])) == [101, 51, 1]
    assert scored(headroom([0.1, 0.2, -0.3], [0.1, 0.1, 0.1])) == [101, 1, 0]


def test_the_first_token_weighs_80_and_the_others_20() -> None:
    assert scored(headroom([0.0, 1.0, 1.0], [1.0, 0.0, 1.0])) == [81, 21, 1]


def test_a_dimension_without_a_range_leaves_its_weight_to_the_other() -> None:
    assert scored(headroom([1.0, 1.0, 1.0], [0.0, 0.5, 1.0])) == [101, 51, 1]
    assert scored(headroom([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])) == [51, 51, 51]


def test_where_none_meets_both_the_one_that_misses_least_is_taken() -> None:
    given = headroom([-1.0, -3.0, -2.0], [-1.0, -1.0, -1.0])
    assert scored(given, in_flight=np.array([1.0, 0.0, 0.0])) == [101, 1, 51]
    assert scored(headroom([9.0, -1.0, -2.0], [-1.0, -1.0, -1.0])) == [101, 51, 1], "what is left over misses nothing"


def test_by_the_later_rule_an_idle_one_is_taken() -> None:
    given = headroom([-1.0, -3.0, -2.0], [-1.0, -1.0, -1.0])
    assert scored(given, in_flight=np.array([1.0, 0.0, 0.0]), idle_first=True) == [0, 1, 101]


def test_by_the_later_rule_the_group_that_misses_least_follows() -> None:
    assert scored(headroom([1.0, -1.0, -1.0], [-5.0, 1.0, -1.0]), idle_first=True) == [51, 0, 0]
    assert scored(headroom([-9.0, -1.0, -1.0], [1.0, -1.0, -1.0]), idle_first=True) == [51, 0, 0]
    assert scored(headroom([-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]), idle_first=True) == [101, 51, 1]


def test_an_objective_that_is_not_set_is_missed_by_none_where_the_other_is_set() -> None:
    ttft_s, tpot_s, strictest_s = np.array([0.1, 3.0]), np.array([0.02, 0.02]), np.array([np.nan, 0.01])
    first = headroom_of(ttft_s, tpot_s, slo_ttft_s=0.2, slo_tpot_s=None, strictest_s=strictest_s)
    np.testing.assert_allclose(first.ttft_s, [0.1, -2.8])
    np.testing.assert_allclose(first.tpot_s, [0.0, -0.01])
    token = headroom_of(ttft_s, tpot_s, slo_ttft_s=None, slo_tpot_s=0.03, strictest_s=strictest_s)
    assert token.ttft_s.tolist() == [0.0, 0.0]
    later = headroom_of(ttft_s, tpot_s, slo_ttft_s=0.2, slo_tpot_s=None, strictest_s=strictest_s, unset_is_zero=True)
    np.testing.assert_allclose(later.tpot_s, [-0.02, -0.02])


def test_scores_are_of_the_rows_given() -> None:
    assert scored(headroom([0.1, 0.2, 0.3], [0.1, 0.1, 0.1]), rows=np.array([2, 1])) == [1, 101]
