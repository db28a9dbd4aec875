from __future__ import annotations

from math import nan

import numpy as np

from gorgo.core.cost import known_or_worst


def test_unknown_is_taken_as_the_worst_known() -> None:
    np.testing.assert_array_equal(known_or_worst(np.array([1.0, nan, 3.0])), [1, 3, 3])


def test_all_unknown_drops_out() -> None:
    np.testing.assert_array_equal(known_or_worst(np.array([nan, nan])), [0, 0])


def test_known_columns_are_passed_on_as_they_are() -> None:
    column = np.array([1.0, 2.0])
    assert known_or_worst(column) is column
