from __future__ import annotations

from gorgo.policies.least_request import LeastRequest
from tests.policies.table import choose, rows_chosen, table


def test_takes_the_fewest_in_flight() -> None:
    assert choose(LeastRequest(), table(3, in_flight_requests=[4, 1, 2])).row == 1


def test_ties_fall_at_random() -> None:
    assert rows_chosen(LeastRequest(), table(3, in_flight_requests=[0, 1, 0])) == {0, 2}
