"""Lodestar's network on a known function."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.training.spec import TrainingSpec
from gorgo.learning.models.mlp import HIDDEN, MlpModel, fit_mlp
from gorgo.learning.models.network import Perceptron
from tests.learning.outcomes import NAMES, rows_of, training_rows, with_censoring

SPEC = TrainingSpec("mlp", NAMES)


def fitted(rows_count: int = 4000, **options: object) -> MlpModel:
    rows = training_rows(rows_count, **options)  # type: ignore[arg-type]
    return fit_mlp(rows, SPEC, rng=np.random.default_rng(42), version=3)


@pytest.fixture(scope="module")
def model() -> MlpModel:
    return fitted()


def test_mean_error_on_unseen_rows_is_below_a_tenth(model: MlpModel) -> None:
    unseen = training_rows(1000, seed=9)
    assert np.mean(np.abs(model.ttft_s(unseen.features) / unseen.ttft_s - 1)) < 0.1


def test_model_has_the_facts_of_its_training(model: MlpModel) -> None:
    rows = training_rows(4000)
    assert (model.version, model.kind, model.names, model.samples) == (3, "mlp", NAMES, 4000)
    assert (model.low == rows.features.min(axis=0)).all()
    assert (model.high == rows.features.max(axis=0)).all()
    assert model.network.sizes == (len(NAMES), *HIDDEN)


def test_prediction_has_no_chance_in_it_and_does_not_depend_on_the_other_rows(model: MlpModel) -> None:
    table = training_rows(50, seed=5).features
    together = model.ttft_s(table)
    assert (together == model.ttft_s(table)).all()
    assert together == pytest.approx(np.concatenate([model.ttft_s(row[None]) for row in table]), rel=1e-4)


def test_same_seed_makes_the_same_model() -> None:
    assert (fitted(500).network.parameters == fitted(500).network.parameters).all()


def test_time_beyond_the_cap_counts_as_the_cap() -> None:
    rows = training_rows(1000)
    stalled = replace(rows, ttft_s=np.full(1000, 1e6))
    spec = TrainingSpec("mlp", NAMES, target_cap_s=3.0)
    model = fit_mlp(stalled, spec, rng=np.random.default_rng(0), version=1)
    assert model.ttft_s(rows.features).mean() == pytest.approx(3.0, rel=0.1)


def test_logarithm_as_target_halves_the_relative_error_of_short_times() -> None:
    rows, unseen = training_rows(4000), training_rows(1000, seed=9)
    # From 10 ms to 30 s.
    steep, truth = (
        replace(each, ttft_s=np.exp(each.features[:, 0].astype(float) / 500) / 100) for each in (rows, unseen)
    )
    found = {}
    for target in ("seconds", "log"):
        spec = TrainingSpec("mlp", NAMES, target=target)
        predicted = fit_mlp(steep, spec, rng=np.random.default_rng(1), version=1).ttft_s(unseen.features)
        found[target] = float(np.mean(np.abs(predicted / truth.ttft_s - 1)))
    assert found["log"] < 0.25
    assert found["log"] < found["seconds"] / 2


def test_gradients_are_those_of_the_target() -> None:
    rows = training_rows(200)
    model = fit_mlp(rows, TrainingSpec("mlp", NAMES, target="log", epochs=2), rng=np.random.default_rng(1), version=1)
    exact = replace(rows, ttft_s=model.ttft_s(rows.features))
    assert model.gradients(exact, 60.0) == pytest.approx(0.0, abs=1e-4)
    late = replace(rows, ttft_s=exact.ttft_s * np.e)
    assert model.gradients(late, 1e9)[:, -1] == pytest.approx(1.0, abs=1e-3)


def test_censored_rows_are_bounds_and_neither_dropped_nor_taken_at_their_time() -> None:
    rows = with_censoring(training_rows(4000), seed=1, patience_s=1.5)
    assert 0.2 < rows.censored.mean() < 0.8
    unseen = training_rows(1000, seed=9)

    def bias(training: object) -> float:
        model = fit_mlp(training, SPEC, rng=np.random.default_rng(1), version=1)  # type: ignore[arg-type]
        return float(np.mean(model.ttft_s(unseen.features) - unseen.ttft_s))

    as_measured = bias(replace(rows, censored=np.zeros(4000, dtype=np.bool_)))
    assert as_measured < -0.25
    assert abs(bias(rows)) < 0.1


def test_gradient_of_a_row_is_that_of_the_last_layer(model: MlpModel) -> None:
    rows = training_rows(20, seed=4)
    found = model.gradients(rows, 60.0)
    network = Perceptron(model.network.sizes, model.network.parameters.astype(np.float64))
    last = sum(array.size for array in network.layers[-1])
    for at in range(20):
        scores = model.scaler.apply(rows.features[at : at + 1]).astype(np.float64)
        whole = network.gradient(scores, lambda outputs, at=at: outputs + rows.ttft_s[at])  # type: ignore[misc]
        assert found[at] == pytest.approx(whole[-last:], rel=1e-3, abs=1e-3)


def test_gradients_of_errors_of_both_signs_are_opposite(model: MlpModel) -> None:
    row = training_rows(1, seed=4)
    predicted = model.ttft_s(row.features)
    early = model.gradients(replace(row, ttft_s=predicted - 0.5), 60.0)
    late = model.gradients(replace(row, ttft_s=predicted + 0.5), 60.0)
    assert early == pytest.approx(-late, rel=1e-3, abs=1e-4)


def test_censored_row_below_its_prediction_has_no_gradient(model: MlpModel) -> None:
    row = training_rows(1, seed=4)
    bound = rows_of(NAMES, row.features, model.ttft_s(row.features) / 2, censored=np.array([True]))
    assert not model.gradients(bound, 60.0).any()
