"""The network against finite differences and a plain forward pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.learning.models.network import AnyFloats, Perceptron, parameter_count


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
