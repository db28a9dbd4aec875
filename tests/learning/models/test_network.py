"""The network against finite differences and a plain forward pass."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.model import TrainingSpec
from gorgo.learning.models.network import (
    HIDDEN,
    Adam,
    AnyFloats,
    Descent,
    MlpModel,
    Perceptron,
    clip_norm,
    descend,
    fit_mlp,
    parameter_count,
)
from tests.learning.outcomes import NAMES, rows_of, training_rows, with_censoring


def network(sizes: tuple[int, ...], seed: int) -> Perceptron:
    """Of float64, where a difference of losses has enough digits."""
    drawn = Perceptron.xavier(sizes, np.random.default_rng(seed))
    return Perceptron(sizes, drawn.parameters.astype(np.float64))


def plain_outputs(network: Perceptron, row: AnyFloats) -> float:
    """One row, one unit at a time."""
    values = row.tolist()
    for number, (weights, bias) in enumerate(network.layers):
        values = [
            sum(value * weights[source, unit] for source, value in enumerate(values)) + bias[unit]
            for unit in range(weights.shape[1])
        ]
        if number < len(network.layers) - 1:
            values = [max(0.0, value) for value in values]
    return float(values[0])


def masked_loss(network: Perceptron, table: AnyFloats, target: AnyFloats, masks: list[AnyFloats | None]) -> float:
    hidden = table
    for number, (weights, bias) in enumerate(network.layers[:-1]):
        hidden = np.maximum(hidden @ weights + bias, 0.0)
        mask = masks[number] if number < len(masks) else None
        if mask is not None:
            hidden = hidden * mask
    weights, bias = network.layers[-1]
    return float(np.mean(((hidden @ weights + bias)[:, 0] - target) ** 2))


@given(st.integers(0, 10_000), st.sampled_from([(3, 4), (2, 5, 3), (4, 6, 6, 6)]), st.booleans())
def test_gradient_equals_finite_differences(seed: int, sizes: tuple[int, ...], dropout: bool) -> None:
    rng = np.random.default_rng(seed)
    subject = network(sizes, seed)
    table, target = rng.normal(size=(7, sizes[0])), rng.normal(size=7)
    masks: list[AnyFloats | None] = []
    if dropout:
        masks = [(rng.random((7, width)) > 0.3) / 0.7 for width in sizes[1:3]]
    gradient = subject.gradient(table, lambda outputs: 2.0 * (outputs - target) / 7, masks)
    step = 1e-6
    for at in rng.choice(len(gradient), min(20, len(gradient)), replace=False).tolist():
        losses = []
        for sign in (1.0, -1.0):
            moved = subject.parameters.copy()
            moved[at] += sign * step
            losses.append(masked_loss(Perceptron(sizes, moved), table, target, masks))
        assert gradient[at] == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-7)


@given(st.integers(0, 10_000))
def test_batched_pass_equals_one_unit_at_a_time(seed: int) -> None:
    subject = network((3, 4, 5), seed)
    table = np.random.default_rng(seed).normal(size=(6, 3))
    assert subject.outputs(table) == pytest.approx([plain_outputs(subject, row) for row in table])


def test_random_weights_are_xavier_uniform_with_small_positive_biases() -> None:
    subject = Perceptron.xavier((20, 128, 128, 128), np.random.default_rng(1))
    for weights, bias in subject.layers:
        limit = (6 / sum(weights.shape)) ** 0.5
        assert (np.abs(weights) <= limit).all()
        assert np.std(weights) == pytest.approx(limit / 3**0.5, rel=0.2)
        assert bias == pytest.approx(0.01)
    assert subject.parameters.dtype == np.float32
    assert len(subject.parameters) == parameter_count(subject.sizes)


def test_last_hidden_layer_times_its_weights_is_the_output() -> None:
    subject = network((3, 4, 5), 1)
    table = np.random.default_rng(1).normal(size=(6, 3))
    weights, bias = subject.layers[-1]
    assert (subject.last_hidden(table) @ weights + bias)[:, 0] == pytest.approx(subject.outputs(table))


def test_adam_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    parameters = rng.normal(size=5)
    expected, mean, square = parameters.copy(), np.zeros(5), np.zeros(5)
    optimizer = Adam(parameters, decay=0.1)
    for step in range(1, 20):
        gradient = rng.normal(size=5)
        decayed = gradient + 0.1 * expected
        mean = 0.9 * mean + 0.1 * decayed
        square = 0.999 * square + 0.001 * decayed**2
        unbiased = mean / (1 - 0.9**step), square / (1 - 0.999**step)
        expected = expected - 0.01 * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        optimizer.step(gradient.copy(), 0.01)
        assert parameters == pytest.approx(expected, rel=1e-6)


def test_long_gradient_is_shortened_to_the_limit_and_a_short_one_is_left() -> None:
    long, short = np.array([3.0, 4.0]), np.array([0.3, 0.4])
    clip_norm(long, 1.0)
    clip_norm(short, 1.0)
    assert long == pytest.approx([0.6, 0.8])
    assert short == pytest.approx([0.3, 0.4])


def trained(**settings: object) -> Perceptron:
    rng = np.random.default_rng(3)
    table = rng.normal(size=(500, 4)).astype(np.float32)
    network = Perceptron.xavier((4, 16, 16, 16), rng)
    reward, censored = table[:, 0], np.zeros(500, dtype=np.bool_)
    descend(network, table, reward, censored, rng=rng, settings=Descent(**settings))  # type: ignore[arg-type]
    return network


def test_same_chance_trains_the_same_network() -> None:
    assert (trained(epochs=2).parameters == trained(epochs=2).parameters).all()


def test_rate_falls_to_nothing_with_a_small_gamma() -> None:
    assert trained(epochs=3, gamma=0.0).parameters == pytest.approx(trained(epochs=1, gamma=0.0).parameters, abs=1e-7)


def test_dropout_changes_the_training() -> None:
    assert not np.allclose(trained(epochs=1, dropout=()).parameters, trained(epochs=1).parameters)


def test_large_errors_count_in_proportion_where_small_ones_count_by_their_square() -> None:
    rng = np.random.default_rng(3)
    table = np.ones((1000, 1), dtype=np.float32)
    # One row in twenty is a stall: the mean of all is 5, the median 0.
    reward = np.where(np.arange(1000) % 20 == 0, 100.0, 0.0).astype(np.float32)
    found = {}
    for limit in (inf, 0.1):
        network = Perceptron.xavier((1, 8), np.random.default_rng(0))
        settings = Descent(epochs=200, rate=0.01, clip=inf, linear_from=limit, dropout=())
        descend(network, table, reward, np.zeros(1000, dtype=np.bool_), rng=rng, settings=settings)
        found[limit] = float(network.outputs(table)[0])
    assert found[inf] == pytest.approx(5.0, abs=1.0)
    assert found[0.1] == pytest.approx(0.0, abs=0.1)


def test_output_below_the_bound_of_a_censored_reward_is_left_and_one_above_it_moves_down() -> None:
    rng = np.random.default_rng(3)
    table = rng.normal(size=(64, 4)).astype(np.float32)
    censored = np.ones(64, dtype=np.bool_)
    settings = Descent(epochs=100, decay=0.0, rate=0.01)
    network = Perceptron.xavier((4, 8), rng)
    before = network.parameters.copy()
    descend(network, table, np.full(64, 100.0, np.float32), censored, rng=rng, settings=settings)
    assert (network.parameters == before).all()
    descend(network, table, np.full(64, -1.0, np.float32), censored, rng=rng, settings=settings)
    assert network.outputs(table).mean() < -0.8


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
