"""Greedy k-centre against its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gorgo.learning.buffers.coreset import k_centre


def plain(points: np.ndarray, count: int) -> list[int]:
    """Every distance anew for every pick."""
    picked = [int(np.argmax((points**2).sum(axis=1)))]
    while len(picked) < min(count, len(points)):
        nearest = [
            -1.0 if row in picked else min(((points[row] - points[other]) ** 2).sum() for other in picked)
            for row in range(len(points))
        ]
        picked.append(int(np.argmax(nearest)))
    return picked


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_picks_are_those_of_the_definition(seed: int, rows: int, count: int) -> None:
    # Small whole numbers: sums are exact, and ties are frequent.
    points = np.random.default_rng(seed).integers(-3, 4, (rows, 3)).astype(np.float32)
    assert k_centre(points, count).tolist() == plain(points, count)


def test_no_row_is_picked_twice_where_all_are_alike() -> None:
    assert sorted(k_centre(np.ones((6, 2), dtype=np.float32), 6).tolist()) == list(range(6))


def test_nothing_is_picked_out_of_nothing() -> None:
    assert k_centre(np.empty((0, 3), dtype=np.float32), 3).tolist() == []
    assert k_centre(np.ones((3, 3), dtype=np.float32), 0).tolist() == []


def test_rows_that_a_model_predicts_well_count_as_one() -> None:
    rng = np.random.default_rng(0)
    well = rng.normal(size=(90, 8)) * 1e-4
    badly = rng.normal(size=(10, 8))
    picked = k_centre(np.concatenate([well, badly]).astype(np.float32), 11)
    assert len(set(picked.tolist()) & set(range(90, 100))) == 10


def test_errors_of_both_signs_are_far_apart() -> None:
    points = np.array([[2.0, 1.0], [1.9, 1.0], [-1.9, -1.0]], dtype=np.float32)
    assert k_centre(points, 2).tolist() == [0, 2]
