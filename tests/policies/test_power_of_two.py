from __future__ import annotations

from gorgo.policies.power_of_two import PowerOfTwo
from tests.policies.table import rows_chosen, table


def test_never_takes_the_most_loaded_when_another_is_less_loaded() -> None:
    assert rows_chosen(PowerOfTwo(), table(3, in_flight_requests=[1, 2, 3])) == {0, 1}


def test_takes_the_less_loaded_of_two() -> None:
    assert rows_chosen(PowerOfTwo(), table(2, in_flight_requests=[5, 4])) == {1}


def test_reaches_all_when_they_are_equal() -> None:
    assert rows_chosen(PowerOfTwo(), table(4)) == {0, 1, 2, 3}
