"""Ridge regression and recursive least squares on known functions and against batch solutions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.model import TrainingSpec
from gorgo.learning.models.linear import RecursiveLeastSquares, fit_linear, fit_rls
from tests.learning.outcomes import NAMES, STEP_S, training_rows, with_censoring

SPEC = TrainingSpec("linear", NAMES)


def test_ridge_regression_finds_a_linear_function() -> None:
    rows, unseen = training_rows(2000), training_rows(500, seed=9)
    model = fit_linear(rows, SPEC, version=1)
    assert model.ttft_s(unseen.features) == pytest.approx(unseen.ttft_s, rel=0.01)
    assert model.tpot_s(unseen.features) is None
    assert model.kind == "linear"


def test_ridge_regression_of_censored_rows_is_nearly_unbiased() -> None:
    rows, unseen = with_censoring(training_rows(4000), seed=1, patience_s=1.0), training_rows(500, seed=9)

    def bias(censored: bool) -> float:
        training = replace(rows, censored=rows.censored & censored)
        return float(np.mean(fit_linear(training, SPEC, version=1).ttft_s(unseen.features) - unseen.ttft_s))

    assert bias(False) < -0.25
    assert abs(bias(True)) < 0.1


@given(st.integers(0, 10_000))
def test_recursive_weights_equal_the_weighted_batch_solution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, target = rng.normal(size=(60, 4)), rng.normal(size=60)
    estimate = RecursiveLeastSquares(4, forgetting=0.97)
    for row, value in zip(table, target, strict=True):
        estimate.update(row, value)
    ages = np.arange(60)[::-1]
    # The prior variance is forgotten from the second row on: the first update is at its bound.
    prior = 0.97**59 / 100.0
    gram = (table.T * 0.97**ages) @ table + np.eye(4) * prior
    assert estimate.weights == pytest.approx(np.linalg.solve(gram, (table.T * 0.97**ages) @ target), rel=1e-6)


def test_recursive_weights_follow_a_change_that_the_batch_solution_averages() -> None:
    rng = np.random.default_rng(0)
    estimate = RecursiveLeastSquares(1)
    for number in range(10_000):
        estimate.update(np.array([1.0]), (1.0 if number < 5000 else 3.0) + rng.normal() * 0.1)
    assert estimate.weights[0] == pytest.approx(3.0, abs=0.05)


def test_covariance_stays_bounded_while_rows_lack_a_direction() -> None:
    estimate = RecursiveLeastSquares(2)
    for _ in range(20_000):
        estimate.update(np.array([1.0, 0.0]), 1.0)
    assert np.trace(estimate.covariance) <= 2 * 100.0 / 0.999
    estimate.update(np.array([1.0, 1.0]), 2.0)
    assert np.isfinite(estimate.weights).all()


def test_recursive_least_squares_predict_both_times() -> None:
    rows, unseen = training_rows(3000), training_rows(500, seed=9)
    model = fit_rls(rows, SPEC, version=2)
    tpot = model.tpot_s(unseen.features)
    assert tpot is not None
    assert model.ttft_s(unseen.features) == pytest.approx(unseen.ttft_s, rel=0.01)
    assert tpot == pytest.approx(unseen.tpot_s, abs=0.01 * STEP_S)
    assert (model.kind, model.version, model.samples) == ("rls", 2, 3000)


def test_square_of_the_prompt_is_learned() -> None:
    rows = training_rows(3000)
    prompts = rows.features[:, 0].astype(np.float64)
    squared = replace(rows, ttft_s=0.1 + (prompts / 2000) ** 2)
    model = fit_rls(squared, SPEC, version=1)
    assert model.ttft_s(rows.features) == pytest.approx(squared.ttft_s, abs=0.01)


def test_too_few_known_times_per_token_leave_them_unpredicted() -> None:
    rows = training_rows(200)
    few = replace(rows, tpot_s=np.where(np.arange(200) < 49, rows.tpot_s, np.nan))
    assert fit_rls(few, SPEC, version=1).tpot_s(rows.features) is None


def test_rows_count_in_the_order_of_their_dispatch() -> None:
    rows = training_rows(500, noise=0.3)
    shuffled = rows.select(np.random.default_rng(0).permutation(500))
    first, second = (fit_rls(each, SPEC, version=1) for each in (rows, shuffled))
    assert first.ttft_weights == pytest.approx(second.ttft_weights, rel=1e-4)


def test_censored_row_moves_an_estimate_up_and_never_down() -> None:
    estimate = RecursiveLeastSquares(1)
    estimate.update(np.array([1.0]), 5.0, censored=True)
    raised = float(estimate.weights[0])
    estimate.update(np.array([1.0]), 0.1, censored=True)
    assert raised > 4.0
    assert estimate.weights[0] == raised
