"""The prior with a learned residual."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.training.spec import TrainingSpec
from gorgo.errors import ConfigError
from gorgo.learning.models.engine_waits import PRIOR
from gorgo.learning.models.residual import LEAST_SHARE, ResidualModel, fit_residual
from tests.learning.outcomes import NAMES, training_rows, with_censoring

SPEC = TrainingSpec("residual", NAMES)


def fitted(rows: object, seed: int = 0) -> ResidualModel:
    return fit_residual(rows, SPEC, rng=np.random.default_rng(seed), version=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> ResidualModel:
    return fitted(training_rows(4000))


def prior_of(table: np.ndarray) -> np.ndarray:
    return table[:, NAMES.index(PRIOR)].astype(np.float64)


def test_learned_residual_halves_the_error_of_the_prior_and_more(model: ResidualModel) -> None:
    unseen = training_rows(1000, seed=9)
    error = np.mean(np.abs(model.ttft_s(unseen.features) - unseen.ttft_s))
    assert error < 0.2 * np.mean(np.abs(prior_of(unseen.features) - unseen.ttft_s))


def test_the_error_of_the_prior_is_a_share_of_the_measured_times(model: ResidualModel) -> None:
    rows = training_rows(4000)
    shares = np.abs(prior_of(rows.features) - rows.ttft_s) / rows.ttft_s
    assert model.prior_error == pytest.approx(float(np.mean(shares)), rel=1e-6)
    assert fitted(replace(rows, ttft_s=prior_of(rows.features))).prior_error == 0.0


def test_row_out_of_range_has_the_prior_alone(model: ResidualModel) -> None:
    table = training_rows(10, seed=9).features.copy()
    table[:5, NAMES.index("queued_requests")] = 50.0
    table[:5, NAMES.index(PRIOR)] = 7.0
    assert (model.ttft_s(table)[:5] == 7.0).all()
    assert model.in_range(table).tolist() == [False] * 5 + [True] * 5


def test_residual_of_noise_is_nothing() -> None:
    rows = training_rows(2000)
    rng = np.random.default_rng(1)
    noisy = replace(rows, ttft_s=np.maximum(prior_of(rows.features) + rng.normal(0, 0.3, 2000), 0.01))
    model = fitted(noisy)
    assert model.factor == 0.0
    assert (model.ttft_s(rows.features) == prior_of(rows.features)).all()


def test_prediction_is_clipped_to_the_measured_residuals_and_to_a_share_of_the_prior() -> None:
    rows = training_rows(2000)
    quick = replace(rows, ttft_s=np.full(2000, 1e-4))
    model = fitted(quick)
    predicted, prior = model.ttft_s(rows.features), prior_of(rows.features)
    assert (predicted >= LEAST_SHARE * prior - 1e-9).all()
    unit = np.sqrt(prior)
    assert (predicted - prior >= model.least * unit - 1e-9).all()
    assert (predicted <= prior + 1e-9).all()
    assert model.most == 0.0


def test_censored_rows_are_bounds() -> None:
    rows, unseen = with_censoring(training_rows(4000), seed=1, patience_s=1.0), training_rows(1000, seed=9)

    def bias(censored: bool) -> float:
        model = fitted(replace(rows, censored=rows.censored & censored))
        return float(np.mean(model.ttft_s(unseen.features) - unseen.ttft_s))

    assert bias(False) < -0.25
    assert abs(bias(True)) < 0.1


def test_gradient_of_a_row_follows_the_error_of_its_residual(model: ResidualModel) -> None:
    rows = training_rows(50, seed=4)
    unit = np.sqrt(prior_of(rows.features))
    learned = -model.network.outputs(model.scaler.apply(rows.features)).astype(np.float64)
    for late in (0.0, 0.3, -0.3):
        times = prior_of(rows.features) + (learned + late) * unit
        found = model.gradients(replace(rows, ttft_s=times), 60.0)
        assert found.shape == (50, model.network.sizes[-1] + 1)
        assert found[:, -1] == pytest.approx(late, abs=1e-3)


def test_only_censored_rows_leave_the_prior() -> None:
    rows = training_rows(200)
    model = fitted(replace(rows, censored=np.ones(200, dtype=np.bool_)))
    assert model.ttft_s(rows.features) == pytest.approx(prior_of(rows.features))


def test_features_without_the_prior_are_refused() -> None:
    with pytest.raises(ConfigError, match="no feature 'prior_s' among kv_usage"):
        fitted(training_rows(10, names=("kv_usage",)))


def test_same_seed_makes_the_same_model() -> None:
    rows = training_rows(300)
    assert (fitted(rows).network.parameters == fitted(rows).network.parameters).all()
    assert not (fitted(rows).network.parameters == fitted(rows, seed=1).network.parameters).all()
