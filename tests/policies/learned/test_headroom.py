from __future__ import annotations

import numpy as np

from gorgo.policies.learned.headroom import Headroom, headroom_of, scores, tier

ALL = np.arange(3)
BUSY = np.ones(3)


def headroom(ttft_s: list[float], tpot_s: list[float]) -> Headroom:
    return Headroom(np.array(ttft_s), np.array(tpot_s))


def scored(given: Headroom, *, in_flight: np.ndarray = BUSY, rows: np.ndarray = ALL, share: float = 0.8) -> list[int]:
    return [int(score) for score in scores(rows, given, in_flight, ttft_share=share)]


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


def test_where_none_meets_both_an_idle_one_is_taken() -> None:
    given = headroom([-1.0, -3.0, -2.0], [-1.0, -1.0, -1.0])
    assert scored(given, in_flight=np.array([1.0, 0.0, 0.0])) == [0, 1, 101]


def test_else_the_group_that_misses_least() -> None:
    assert scored(headroom([1.0, -1.0, -1.0], [-5.0, 1.0, -1.0])) == [51, 0, 0]
    assert scored(headroom([-9.0, -1.0, -1.0], [1.0, -1.0, -1.0])) == [51, 0, 0]
    assert scored(headroom([-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0])) == [101, 51, 1]


def test_scores_are_of_the_rows_given() -> None:
    assert scored(headroom([0.1, 0.2, 0.3], [0.1, 0.1, 0.1]), rows=np.array([2, 1])) == [1, 101]
