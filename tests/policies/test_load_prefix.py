from __future__ import annotations

import numpy as np
import pytest

from gorgo.policies.load_prefix import LoadPrefix
from tests.policies.table import choose, rows_chosen, table


def test_the_cost_is_the_sum_of_three_shares() -> None:
    candidates = table(
        3,
        cached=[500, 0, 250],
        queued_requests=[4, 2, 0],
        used_tokens=[100, 50, 200],
        kv_capacity_tokens=[1000, 100, 1000],
    )
    choice = choose(LoadPrefix(), candidates)
    terms = {name: list(column) for name, column in choice.terms.items()}
    assert terms == {"prefix": [0.5, 1.0, 0.75], "queue": [1.0, 0.5, 0.0], "kv": [0.1, 0.5, 0.2]}
    assert choice.row == 2


def test_the_weights_turn_a_choice() -> None:
    candidates = table(
        2, cached=[600, 0], queued_requests=[0, 0], used_tokens=[900, 100], kv_capacity_tokens=[1000, 1000]
    )
    assert choose(LoadPrefix(), candidates).row == 1
    assert choose(LoadPrefix(), candidates, prefix=3.0, queue=2.0, kv=2.0).row == 0


def test_one_request_more_in_the_queue_weighs_as_much_as_a_hundred_where_it_is_the_longest() -> None:
    """The scorer compares places, not lengths."""
    costs = [choose(LoadPrefix(), table(2, queued_requests=[0, longest])).cost for longest in (1, 100)]
    np.testing.assert_array_equal(costs[0], costs[1])


def test_ties_fall_at_random_whatever_is_in_flight() -> None:
    assert rows_chosen(LoadPrefix(), table(3, in_flight_requests=[9, 0, 5])) == {0, 1, 2}


def test_a_pool_of_unknown_size_counts_as_the_fullest_known_and_none_as_more_than_full() -> None:
    pools = [np.nan, 100.0, 100.0]
    choice = choose(LoadPrefix(), table(3, used_tokens=[50, 30, 250], kv_capacity_tokens=pools))
    assert list(choice.terms["kv"]) == [1.0, pytest.approx(0.3), 1.0]
