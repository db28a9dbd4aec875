from __future__ import annotations

import numpy as np

from gorgo.policies.gorgo import Gorgo
from tests.policies.table import choose, rows_chosen, table


def test_cost_is_equation_3() -> None:
    candidates = table(2, rtt_s=[0.002, 0.1], in_flight_tokens=[3000, 0], cached=[0, 600])
    choice = choose(Gorgo(), candidates, w_rtt=0.5, w_queue=0.1)
    np.testing.assert_allclose(choice.terms["rtt"], [0.5 * 2, 0.5 * 100])
    np.testing.assert_allclose(choice.terms["queue"], [0.1 * 3000, 0])
    np.testing.assert_allclose(choice.terms["prefill"], [1000, 400])
    assert choice.cost is not None
    np.testing.assert_allclose(choice.cost, [1 + 300 + 1000, 50 + 400])
    assert choice.row == 1


def test_start_weights_are_the_published_ones_and_the_box_holds_theirs() -> None:
    assert [(spec.name, spec.default, spec.low, spec.high) for spec in Gorgo.weight_specs] == [
        ("w_rtt", 0.5, 0.05, 200.0),
        ("w_queue", 0.1, 0.02, 5.0),
    ]
    assert Gorgo.index == "published"


def test_cold_replica_is_not_free() -> None:
    """A replica that has not answered a probe yet counts as far as the farthest known one."""
    choice = choose(Gorgo(), table(3, rtt_s=[np.nan, 0.05, 0.2]))
    assert choice.terms["rtt"][0] == choice.terms["rtt"][2]
    assert choice.row == 1


def test_a_warm_cache_far_away_beats_a_cold_one_nearby() -> None:
    assert choose(Gorgo(), table(2, rtt_s=[0.002, 0.18], cached=[0, 900])).row == 1


def test_a_long_queue_outweighs_a_warm_cache() -> None:
    candidates = table(2, rtt_s=[0.002, 0.002], cached=[1000, 0], in_flight_tokens=[20_000, 0])
    assert choose(Gorgo(), candidates).row == 1


def test_ties_go_to_the_fewest_in_flight_and_then_to_chance() -> None:
    assert rows_chosen(Gorgo(), table(3, in_flight_requests=[1, 0, 0])) == {1, 2}
