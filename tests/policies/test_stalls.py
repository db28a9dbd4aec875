from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gorgo.policies.gorgo_ms import FEW_RUN, RISE_MAX, STALLED, WHOLE, counted, counted_of_rows, excess, stall_ms

numbers = st.lists(st.integers(0, 500).map(float), min_size=1, max_size=12)


@given(numbers)
def test_rows_have_the_very_numbers_of_columns(given_numbers: list[float]) -> None:
    mean = sum(given_numbers) / len(given_numbers)
    assert counted_of_rows(given_numbers, mean) == counted(np.array(given_numbers), mean).tolist()


@given(numbers)
def test_the_mean_and_the_order_are_those_of_the_numbers(given_numbers: list[float]) -> None:
    found = counted(np.array(given_numbers), sum(given_numbers) / len(given_numbers))
    np.testing.assert_allclose(found.mean(), np.mean(given_numbers))
    assert (np.diff(found[np.argsort(given_numbers, kind="stable")]) >= -1e-9).all()


def test_up_to_a_mean_of_eight_every_difference_counts_in_full() -> None:
    assert counted(np.array([WHOLE - 8, WHOLE + 8]), WHOLE).tolist() == [0.0, 16.0]
    assert counted(np.array([4 * WHOLE - 8, 4 * WHOLE + 8]), 4 * WHOLE).tolist() == [30.0, 34.0]


@given(st.floats(0.0, 500.0), st.floats(0.0, 500.0))
def test_stalls_to_come_never_count_for_more_where_more_are_in_flight(fewer: float, more: float) -> None:
    fewer, more = sorted((fewer, more))
    assert stall_ms(1000.0, FEW_RUN) == 1000.0
    assert 0.0 <= stall_ms(1000.0, more) <= stall_ms(1000.0, fewer) <= 1000.0


means = st.tuples(st.floats(0.0, 500.0), st.floats(0.0, 3.0))


@given(means, means)
def test_prefills_never_cost_less_where_they_stall_more(one: tuple[float, float], other: tuple[float, float]) -> None:
    less, more = ([pick(pair) for pair in zip(one, other, strict=True)] for pick in (min, max))
    assert 1.0 <= excess(*less) <= excess(*more) <= RISE_MAX


@given(means)
def test_up_to_two_stalled_at_any_time_the_prices_are_as_given(given_means: tuple[float, float]) -> None:
    mean, share = given_means
    assert (excess(mean, share) > 1.0) == (mean * share > STALLED)
    assert excess(1.5 * STALLED, 1.0) == 1.5
