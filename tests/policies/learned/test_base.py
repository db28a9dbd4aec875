from __future__ import annotations

import numpy as np
import pytest

from gorgo.policies.learned.base import near_best, predict_ttft_s, rows_in_range, sample_rows

LOW, HIGH = np.array([0.0, 100.0], np.float32), np.array([10.0, 100.0], np.float32)


def inside(*rows: tuple[float, float], margin: float = 0.1) -> list[bool]:
    return [bool(row) for row in rows_in_range(np.array(rows, np.float32), LOW, HIGH, margin=margin)]


def test_every_row_is_checked_with_a_margin_of_the_range() -> None:
    assert inside((5, 100), (11, 100), (11.1, 100), (-1, 100), (-1.1, 100)) == [True, True, False, True, False]


def test_without_a_margin_the_bounds_themselves_are_in_range() -> None:
    assert inside((0, 100), (10, 100), (10.001, 100), margin=0.0) == [True, True, False]


def test_a_feature_that_was_constant_admits_no_other_value() -> None:
    assert inside((5, 100), (5, 101), (5, 99)) == [True, False, False]


class Answers:
    """A model with a fixed answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def ttft_s(self, table: np.ndarray) -> np.ndarray:
        if isinstance(self.answer, Exception):
            raise self.answer
        return np.array(self.answer)


def test_a_prediction_is_at_least_zero() -> None:
    predicted = predict_ttft_s(Answers([0.5, -0.1]), np.zeros((2, 1), np.float32))
    assert predicted is not None
    assert predicted.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("answer", [ValueError("no"), [1.0, np.nan], [np.inf, 1.0], [1.0], [[1.0, 2.0]], ["a", "b"]])
def test_a_model_that_raises_or_answers_no_number_per_row_predicts_nothing(answer: object) -> None:
    assert predict_ttft_s(Answers(answer), np.zeros((2, 1), np.float32)) is None


def test_near_best_never_lies_below_the_best_whatever_the_sign() -> None:
    assert near_best(np.array([1.0, 1.1, 1.11]), share=0.1).tolist() == [0, 1]
    assert near_best(np.array([-1.0, -0.9, -0.89]), share=0.1).tolist() == [0, 1]
    assert near_best(np.array([2.0, 1.0, 1.0]), share=0.0).tolist() == [1, 2]


def test_a_sample_has_its_size_and_the_included_row() -> None:
    rows = np.arange(300)
    drawn = sample_rows(rows, 16, np.random.default_rng(0), include=299)
    assert 299 in drawn
    assert len(drawn) in (16, 17)
    assert sorted(set(drawn.tolist())) == drawn.tolist()
    assert sample_rows(rows, 300, np.random.default_rng(0), include=0) is rows
