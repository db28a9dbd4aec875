"""The tie-break by rows beside the one by columns."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import pytest

from gorgo.core.fleet.replica import Columns
from gorgo.core.policy.interface import (
    TIE_EPSILON,
    Candidates,
    Choice,
    Prediction,
    argmin_tiebreak,
    choose_min_cost,
    fill_unknown,
    least_of_rows,
)

COSTS = ([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0 + TIE_EPSILON / 2, 1.0], [0.0], [1.0, 1.0 + 3 * TIE_EPSILON])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("costs", COSTS)
def test_rows_choose_as_columns_do_and_draw_as_often(costs: list[float], seed: int) -> None:
    in_flight = np.random.default_rng(seed).integers(0, 3, len(costs)).astype(float)
    by_rows, by_columns = np.random.default_rng(seed), np.random.default_rng(seed)
    row = least_of_rows(costs, min(costs), in_flight, by_rows)
    assert row == argmin_tiebreak(np.array(costs), in_flight, by_columns)
    assert by_rows.bit_generator.state == by_columns.bit_generator.state


def test_unknown_is_taken_as_the_worst_known() -> None:
    np.testing.assert_array_equal(fill_unknown(np.array([1.0, nan, 3.0])), [1, 3, 3])


def test_all_unknown_drops_out() -> None:
    np.testing.assert_array_equal(fill_unknown(np.array([nan, nan])), [0, 0])


def test_the_least_sum_of_all_terms_is_chosen_with_what_is_predicted_there() -> None:
    columns = Columns.empty()
    for _ in range(3):
        columns.grow()
    candidates = Candidates(np.arange(3), ("a", "b", "c"), columns, np.zeros(3), 100, is_all=True)
    terms = {"one": np.array([1.0, 5.0, 3.0]), "two": np.array([6.0, 1.0, 3.0]), "three": np.array([0.0, 0.5, 1.0])}

    def chosen(**more: Any) -> Choice:
        return choose_min_cost(terms, candidates, np.random.default_rng(0), **more)

    assert chosen().cost is not None
    np.testing.assert_array_equal(chosen().cost, [7.0, 6.5, 7.0])
    assert (chosen().row, chosen().terms, chosen().fallback, chosen().predicted_ttft_s) == (1, terms, None, None)
    by_row = chosen(predicted_ttft_s=lambda row: 10.0 + row, fallback="why")
    assert (by_row.predicted_ttft_s, by_row.fallback) == (11.0, "why")
    by_column = chosen(predicted_ttft_s=np.array([nan, 0.5, 0.7]))
    assert by_column.predict is not None
    assert (by_column.predicted_ttft_s, by_column.predict(2), by_column.predict(0)) == (0.5, 0.7, None)
    forecast = Prediction(np.zeros(3), np.zeros(3), np.zeros(3))
    assert chosen(forecast=lambda: forecast).prediction() is forecast  # type: ignore[misc]  # it was given


def test_equal_costs_go_to_the_fewest_in_flight() -> None:
    columns = Columns.empty()
    for _ in range(2):
        columns.grow()
    columns.in_flight_requests[0] = 1.0
    candidates = Candidates(np.arange(2), ("a", "b"), columns, np.zeros(2), 100, is_all=True)
    rows = {choose_min_cost({"x": np.ones(2)}, candidates, np.random.default_rng(seed)).row for seed in range(20)}
    assert rows == {1}


def test_known_columns_are_passed_on_as_they_are() -> None:
    column = np.array([1.0, 2.0])
    assert fill_unknown(column) is column
