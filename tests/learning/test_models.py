"""Z-scores, linear models against batch solutions, and boosted trees on known functions."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.learning import TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import ConfigError, MissingExtra
from gorgo.learning.base import Scaler
from gorgo.learning.linear import RecursiveLeastSquares, fit_linear, fit_rls
from gorgo.learning.network import (
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
from gorgo.learning.residual import LEAST_SHARE, PRIOR, EngineWaits, ResidualModel, fit_residual, fit_waits
from gorgo.learning.trainer import fit
from gorgo.learning.trees import TreesModel, fit_trees, import_lightgbm
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.learned.predicted_latency import PredictedLatency
from tests.learning.extra import needs_lightgbm
from tests.learning.outcomes import NAMES, STEP_S, rows_of, training_rows, with_censoring
from tests.learning.outcomes import NAMES as NAMES_OUTCOMES

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
def test_censored_rows_are_bounds_of_trees() -> None:
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


# --- The network against finite differences, and the prior with a learned residual.


# --- The network against finite differences and a plain forward pass.


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


SPEC_MLP = TrainingSpec("mlp", NAMES)


def fitted_mlp(rows_count: int = 4000, **options: object) -> MlpModel:
    rows = training_rows(rows_count, **options)  # type: ignore[arg-type]
    return fit_mlp(rows, SPEC_MLP, rng=np.random.default_rng(42), version=3)


@pytest.fixture(scope="module")
def model() -> MlpModel:
    return fitted_mlp()


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
    assert (fitted_mlp(500).network.parameters == fitted_mlp(500).network.parameters).all()


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
        model = fit_mlp(training, SPEC_MLP, rng=np.random.default_rng(1), version=1)  # type: ignore[arg-type]
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


# --- The prior with a learned residual.


SPEC_RESIDUAL = TrainingSpec("residual", NAMES_OUTCOMES)


def fitted_residual(rows: object, seed: int = 0) -> ResidualModel:
    return fit_residual(rows, SPEC_RESIDUAL, rng=np.random.default_rng(seed), version=1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model_residual() -> ResidualModel:
    return fitted_residual(training_rows(4000))


def prior_of(table: np.ndarray) -> np.ndarray:
    return table[:, NAMES_OUTCOMES.index(PRIOR)].astype(np.float64)


def test_learned_residual_halves_the_error_of_the_prior_and_more(model_residual: ResidualModel) -> None:
    unseen = training_rows(1000, seed=9)
    error = np.mean(np.abs(model_residual.ttft_s(unseen.features) - unseen.ttft_s))
    assert error < 0.2 * np.mean(np.abs(prior_of(unseen.features) - unseen.ttft_s))


def test_the_error_of_the_prior_is_a_share_of_the_measured_times(model_residual: ResidualModel) -> None:
    rows = training_rows(4000)
    shares = np.abs(prior_of(rows.features) - rows.ttft_s) / rows.ttft_s
    assert model_residual.prior_error == pytest.approx(float(np.mean(shares)), rel=1e-6)
    assert fitted_residual(replace(rows, ttft_s=prior_of(rows.features))).prior_error == 0.0


def test_row_out_of_range_has_the_prior_alone(model_residual: ResidualModel) -> None:
    table = training_rows(10, seed=9).features.copy()
    table[:5, NAMES_OUTCOMES.index("queued_requests")] = 50.0
    table[:5, NAMES_OUTCOMES.index(PRIOR)] = 7.0
    assert (model_residual.ttft_s(table)[:5] == 7.0).all()
    assert model_residual.in_range(table).tolist() == [False] * 5 + [True] * 5


def test_residual_of_noise_is_nothing() -> None:
    rows = training_rows(2000)
    rng = np.random.default_rng(1)
    noisy = replace(rows, ttft_s=np.maximum(prior_of(rows.features) + rng.normal(0, 0.3, 2000), 0.01))
    model = fitted_residual(noisy)
    assert model.factor == 0.0
    assert (model.ttft_s(rows.features) == prior_of(rows.features)).all()


def test_prediction_is_clipped_to_the_measured_residuals_and_to_a_share_of_the_prior() -> None:
    rows = training_rows(2000)
    quick = replace(rows, ttft_s=np.full(2000, 1e-4))
    model = fitted_residual(quick)
    predicted, prior = model.ttft_s(rows.features), prior_of(rows.features)
    assert (predicted >= LEAST_SHARE * prior - 1e-9).all()
    unit = np.sqrt(prior)
    assert (predicted - prior >= model.least * unit - 1e-9).all()
    assert (predicted <= prior + 1e-9).all()
    assert model.most == 0.0


def test_censored_rows_are_bounds_of_a_residual() -> None:
    rows, unseen = with_censoring(training_rows(4000), seed=1, patience_s=1.0), training_rows(1000, seed=9)

    def bias(censored: bool) -> float:
        model = fitted_residual(replace(rows, censored=rows.censored & censored))
        return float(np.mean(model.ttft_s(unseen.features) - unseen.ttft_s))

    assert bias(False) < -0.25
    assert abs(bias(True)) < 0.1


def test_gradient_of_a_row_follows_the_error_of_its_residual(model_residual: ResidualModel) -> None:
    rows = training_rows(50, seed=4)
    unit = np.sqrt(prior_of(rows.features))
    learned = -model_residual.network.outputs(model_residual.scaler.apply(rows.features)).astype(np.float64)
    for late in (0.0, 0.3, -0.3):
        times = prior_of(rows.features) + (learned + late) * unit
        found = model_residual.gradients(replace(rows, ttft_s=times), 60.0)
        assert found.shape == (50, model_residual.network.sizes[-1] + 1)
        assert found[:, -1] == pytest.approx(late, abs=1e-3)


def test_only_censored_rows_leave_the_prior() -> None:
    rows = training_rows(200)
    model = fitted_residual(replace(rows, censored=np.ones(200, dtype=np.bool_)))
    assert model.ttft_s(rows.features) == pytest.approx(prior_of(rows.features))


def test_features_without_the_prior_are_refused() -> None:
    with pytest.raises(ConfigError, match="no feature 'prior_s' among kv_usage"):
        fitted_residual(training_rows(10, names=("kv_usage",)))


def test_same_seed_makes_the_same_residual_model() -> None:
    rows = training_rows(300)
    assert (fitted_residual(rows).network.parameters == fitted_residual(rows).network.parameters).all()
    assert not (fitted_residual(rows).network.parameters == fitted_residual(rows, seed=1).network.parameters).all()


COLUMNS = ("uncached_tokens", "decoding_requests", "decode_step_s", "kv_short_tokens", "prior_s")
#: Of each request: tokens that it takes from the pool, and how long it holds them.
NEW_TOKENS, HOLD_S = 2000.0, 40.0


def outcomes(count: int, *, seed: int = 0, most_decoding: int = 20, short: float = 0.0) -> TrainingRows:
    """Requests that wait for 0.6 of a decode step; and for KV memory where `short` tokens of it are missing."""
    rng = np.random.default_rng(seed)
    decoding = rng.integers(0, most_decoding + 1, count).astype(np.float64)
    step_s = np.where(decoding > 0, 0.02 * (1 + decoding / 16), 0.0)
    prior_s = rng.uniform(0.05, 0.4, count)
    ttft_s = np.maximum(prior_s, short * HOLD_S / np.maximum(decoding, 1) / NEW_TOKENS) + 0.6 * step_s
    table = np.column_stack([np.full(count, NEW_TOKENS), decoding, step_s, np.full(count, short), prior_s])
    rows = rows_of(COLUMNS, table.astype(np.float32), ttft_s)
    return replace(
        rows, e2e_s=ttft_s + HOLD_S, prompt_tokens=np.full(count, 2500.0), cached_tokens=np.full(count, 500.0)
    )


def error(predicted_s: np.ndarray, rows: TrainingRows) -> float:
    return float(np.mean(np.abs(predicted_s - rows.ttft_s) / rows.ttft_s))


def test_the_share_of_a_step_and_the_release_of_memory_are_learned() -> None:
    waits = fit_waits(outcomes(500))
    assert waits.step_share == pytest.approx(0.6, abs=0.02)
    assert waits.hold_s == pytest.approx(HOLD_S / NEW_TOKENS)


def test_a_full_pool_is_predicted_before_any_request_has_waited_for_it() -> None:
    waits, full = fit_waits(outcomes(500)), outcomes(100, seed=1, short=30_000.0)
    assert error(waits.base_s(full.features, COLUMNS), full) < 0.05
    assert error(full.features[:, -1].astype(np.float64), full) > 0.9


def test_reported_cached_tokens_are_not_taken_and_estimates_count_without_a_report() -> None:
    rows = outcomes(200)
    unreported = replace(rows, cached_tokens=np.full(200, np.nan))
    wrong = replace(rows, prompt_tokens=np.full(200, 4500.0))
    assert fit_waits(unreported).hold_s == pytest.approx(HOLD_S / NEW_TOKENS)
    assert fit_waits(wrong).hold_s == pytest.approx(HOLD_S / 4000.0)


def test_one_stall_does_not_teach_the_share_of_a_step() -> None:
    rows = outcomes(500)
    stalled = rows.ttft_s.copy()
    stalled[::25] += 30.0
    assert fit_waits(replace(rows, ttft_s=stalled)).step_share == pytest.approx(0.6, abs=0.1)


def mixed(count: int, *, seed: int = 0) -> TrainingRows:
    """Every other answer comes in one piece, 8 s and a round of 20 ms per decode after its first token."""
    rows = outcomes(count, seed=seed)
    whole = np.arange(count) % 2 == 1
    ends_s = rows.ttft_s + 8.0 + 0.02 * rows.features[:, COLUMNS.index("decoding_requests")]
    ttft_s = np.where(whole, ends_s, rows.ttft_s)
    table = np.insert(rows.features, len(COLUMNS) - 1, ~whole, axis=1)
    return replace(
        rows, names=(*COLUMNS[:-1], "streamed", COLUMNS[-1]), features=table.astype(np.float32), ttft_s=ttft_s,
        e2e_s=np.maximum(rows.e2e_s, ttft_s), unstreamed=whole,
    )  # fmt: skip


def test_answers_in_one_piece_are_learned_beside_streams_and_teach_nothing_of_a_first_token() -> None:
    rows = mixed(1500)
    spec = TrainingSpec("residual", rows.names)
    model: ResidualModel = fit_residual(rows, spec, rng=np.random.default_rng(0), version=1)
    assert model.waits.step_share == pytest.approx(0.6, abs=0.02)
    assert model.waits.hold_s == pytest.approx(HOLD_S / NEW_TOKENS)
    assert model.waits.answer_s == pytest.approx(8.2, abs=0.1)
    unseen = mixed(200, seed=5)
    assert error(model.ttft_s(unseen.features), unseen) < 0.1
    streams = fit_residual(rows.select(~rows.unstreamed), spec, rng=np.random.default_rng(0), version=1)
    assert model.prior_error == pytest.approx(streams.prior_error)


def test_answers_in_one_piece_alone_make_a_model_that_is_not_trusted_as_its_priors() -> None:
    rows = mixed(800)
    whole = rows.select(rows.unstreamed)
    model = fit_residual(whole, TrainingSpec("residual", whole.names), rng=np.random.default_rng(0), version=1)
    assert model.prior_error > 0.5
    assert error(model.ttft_s(whole.features), whole) < 0.05


def test_without_outcomes_or_features_there_is_no_wait() -> None:
    none = TrainingRows.empty(COLUMNS)
    assert fit_waits(none).hold_s == 0.0
    table = np.array([[0.3]], dtype=np.float32)
    assert EngineWaits(step_share=0.5, hold_s=0.1).base_s(table, ("prior_s",)).tolist() == pytest.approx([0.3])


def test_a_row_out_of_range_has_the_waits_and_no_residual() -> None:
    rows = outcomes(800)
    spec = TrainingSpec("residual", COLUMNS)
    model: ResidualModel = fit_residual(rows, spec, rng=np.random.default_rng(0), version=1)
    busier = outcomes(100, seed=1, most_decoding=120, short=30_000.0)
    assert not model.in_range(busier.features).any()
    assert error(model.ttft_s(busier.features), busier) < 0.1
    np.testing.assert_array_equal(model.ttft_s(busier.features), model.base_s(busier.features))
