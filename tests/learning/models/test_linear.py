"""Z-scores, linear models against batch solutions, and boosted trees on known functions."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.learning import TrainingSpec
from gorgo.errors import MissingExtra
from gorgo.learning.base import Scaler
from gorgo.learning.linear import RecursiveLeastSquares, fit_linear, fit_rls
from gorgo.learning.trainer import fit
from gorgo.learning.trees import TreesModel, fit_trees, import_lightgbm
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from tests.learning.extra import needs_lightgbm
from tests.learning.outcomes import NAMES, STEP_S, training_rows, with_censoring

# --- Z-scores.


def test_scores_of_the_training_rows_have_mean_0_and_deviation_1() -> None:
    table = np.random.default_rng(0).lognormal(8, 2, (1000, 3)).astype(np.float32)
    scores = Scaler.of(table).apply(table)
    assert scores.dtype == np.float32
    assert scores.mean(axis=0) == pytest.approx(0.0, abs=1e-4)
    assert scores.std(axis=0) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, 123_456.7])
def test_constant_feature_scores_0_whatever_its_value_becomes(value: float) -> None:
    table = np.full((1000, 1), value, dtype=np.float32)
    assert Scaler.of(table).apply(table + 7) == pytest.approx(0.0)


# --- Ridge regression and recursive least squares on known functions and against batch solutions.


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


# --- Boosted trees on known functions; most tests need the extra.


SPEC_TREES = TrainingSpec("trees", NAMES)


def fitted(rows: object, seed: int = 0) -> TreesModel:
    return fit_trees(rows, SPEC_TREES, seed=seed, version=1)  # type: ignore[arg-type]


@needs_lightgbm
def test_both_times_of_unseen_rows_are_within_a_twentieth() -> None:
    model, unseen = fitted(training_rows(4000)), training_rows(500, seed=9)
    tpot = model.tpot_s(unseen.features)
    assert tpot is not None
    assert np.mean(np.abs(model.ttft_s(unseen.features) / unseen.ttft_s - 1)) < 0.05
    assert np.mean(np.abs(tpot / unseen.tpot_s - 1)) < 0.05


@needs_lightgbm
def test_rows_with_and_without_a_queue_have_models_of_their_own_from_200_each() -> None:
    rows = training_rows(1500)
    queued = np.flatnonzero(rows.features[:, NAMES.index("queued_requests")] > 0)
    idle = np.flatnonzero(rows.features[:, NAMES.index("queued_requests")] == 0)
    enough = rows.select(np.concatenate([queued[:200], idle[:200]]))
    assert sorted(fitted(enough).boosters) == ["tpot_idle", "tpot_queued", "ttft_idle", "ttft_queued"]
    fewer = rows.select(np.concatenate([queued[:199], idle[:200]]))
    assert sorted(fitted(fewer).boosters) == ["tpot", "ttft"]
    unknown = replace(enough, tpot_s=np.where(np.arange(400) == 0, np.nan, enough.tpot_s))
    assert sorted(fitted(unknown).boosters) == ["tpot", "ttft"]


@needs_lightgbm
def test_model_without_a_queue_does_not_use_the_columns_of_the_queue() -> None:
    model = fitted(training_rows(1500))
    used = {NAMES[column] for column in model.boosters["ttft_idle"].columns.tolist()}
    assert used == set(NAMES) - {"queued_requests", "is_queued"}
    assert len(model.boosters["ttft_queued"].columns) == len(NAMES)


@needs_lightgbm
def test_each_row_is_predicted_by_the_model_of_its_queue() -> None:
    model, table = fitted(training_rows(1500)), training_rows(60, seed=3).features
    expected = [
        model.boosters["ttft_queued" if row[NAMES.index("queued_requests")] > 0 else "ttft_idle"].predict(row[None])[0]
        for row in table
    ]
    assert model.ttft_s(table) == pytest.approx(expected)


@needs_lightgbm
def test_same_seed_makes_the_same_trees_and_another_seed_others() -> None:
    rows = training_rows(390, noise=0.1)
    texts = [fitted(rows, seed).boosters["ttft"].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@needs_lightgbm
def test_censored_rows_are_bounds() -> None:
    rows, unseen = with_censoring(training_rows(4000), seed=1, patience_s=1.0), training_rows(500, seed=9)

    def bias(censored: bool) -> float:
        model = fitted(replace(rows, censored=rows.censored & censored))
        return float(np.mean(model.ttft_s(unseen.features) - unseen.ttft_s))

    assert bias(False) < -0.25
    assert abs(bias(True)) < 0.1


@needs_lightgbm
def test_model_without_known_times_per_token_predicts_none() -> None:
    rows = training_rows(300)
    model = fitted(replace(rows, tpot_s=np.full(300, np.nan)))
    assert model.tpot_s(rows.features) is None


@needs_lightgbm
def test_logarithms_as_targets_are_predicted_as_times() -> None:
    rows, unseen = training_rows(4000), training_rows(500, seed=9)
    model = fit_trees(rows, replace(SPEC_TREES, target="log"), seed=0, version=1)
    tpot = model.tpot_s(unseen.features)
    assert tpot is not None
    assert np.mean(np.abs(model.ttft_s(unseen.features) / unseen.ttft_s - 1)) < 0.05
    assert np.mean(np.abs(tpot / unseen.tpot_s - 1)) < 0.05


@needs_lightgbm
def test_model_passes_a_pipe() -> None:
    model, table = fitted(training_rows(300)), training_rows(10).features
    assert (pickle.loads(pickle.dumps(model)).ttft_s(table) == model.ttft_s(table)).all()


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        import_lightgbm()


def test_without_the_package_no_other_model_takes_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(MissingExtra, match=r"boosted trees need the extra: .*gorgo-router\[learned\]"):
        fit(training_rows(100), SPEC_TREES, seed=0, version=1)


def test_a_policy_of_trees_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.learning.trees.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"gorgo-router\[learned\]"):
        PredictedLatency().require_packages()
    PredictedLatency(replace(PredictedLatency().training, kind="rls")).require_packages()
    Lodestar().require_packages()
