from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.policy.stalls import WHOLE, counted, counted_of_rows

numbers = st.lists(st.integers(0, 500).map(float), min_size=1, max_size=12)


@given(numbers)
def test_rows_have_the_very_numbers_of_columns(given_numbers: list[float]) -> None:
    assert counted_of_rows(given_numbers) == counted(np.array(given_numbers)).tolist()


@given(numbers)
def test_the_mean_and_the_order_are_those_of_the_numbers(given_numbers: list[float]) -> None:
    found = counted(np.array(given_numbers))
    np.testing.assert_allclose(found.mean(), np.mean(given_numbers))
    assert (np.diff(found[np.argsort(given_numbers, kind="stable")]) >= -1e-9).all()


def test_up_to_a_mean_of_eight_every_difference_counts_in_full() -> None:
    assert counted(np.array([WHOLE - 8, WHOLE + 8])).tolist() == [0.0, 16.0]
    assert counted(np.array([4 * WHOLE - 8, 4 * WHOLE + 8])).tolist() == [30.0, 34.0]
