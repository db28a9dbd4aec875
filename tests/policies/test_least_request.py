from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.policy.interface import Policy
from gorgo.policies.least_request import LeastRequest, LeastRequestInFlight
from tests.policies.table import choose, rows_chosen, table

both = pytest.mark.parametrize("policy", [LeastRequest(), LeastRequestInFlight()], ids=lambda policy: policy.name)


@both
def test_takes_the_fewest_in_flight(policy: Policy) -> None:
    assert choose(policy, table(3, in_flight_requests=[4, 1, 2])).row == 1


@both
def test_ties_fall_at_random(policy: Policy) -> None:
    assert rows_chosen(policy, table(3, in_flight_requests=[0, 1, 0])) == {0, 2}


def test_the_larger_of_reported_and_own_count_decides_as_released() -> None:
    """Another proxy's requests are in the report alone; those dispatched since the scrape in the own count alone."""
    candidates = table(3, in_flight_requests=[0, 5, 2], running_requests=[6, 1, 4])
    choice = choose(LeastRequest(), candidates)
    assert choice.cost is not None
    assert choice.cost.tolist() == [6, 5, 4]
    assert choice.row == 2
    assert choose(LeastRequestInFlight(), candidates).row == 0


def test_an_unknown_report_counts_as_the_worst_known_one() -> None:
    candidates = table(3, in_flight_requests=[0, 1, 1], running_requests=[np.nan, 3, 2])
    assert choose(LeastRequest(), candidates).row == 2
