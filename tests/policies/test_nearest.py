from __future__ import annotations

import numpy as np

from gorgo.policies.nearest import Nearest
from tests.policies.table import choose, rows_chosen, table


def test_takes_the_least_round_trip_whatever_the_load() -> None:
    assert choose(Nearest(), table(3, rtt_s=[0.09, 0.002, 0.18], in_flight_requests=[0, 99, 0])).row == 1


def test_its_cost_is_the_round_trip_in_milliseconds() -> None:
    choice = choose(Nearest(), table(3, rtt_s=[0.09, 0.002, np.nan]))
    np.testing.assert_allclose(choice.terms["rtt"], [90.0, 2.0, 90.0])


def test_equal_distances_go_to_the_fewest_in_flight() -> None:
    assert choose(Nearest(), table(2, rtt_s=[0.01, 0.01], in_flight_requests=[2, 1])).row == 1


def test_unknown_distance_is_not_near() -> None:
    assert rows_chosen(Nearest(), table(3, rtt_s=[np.nan, 0.1, 0.2])) == {1}
