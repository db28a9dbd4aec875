"""Adam, clipping and the training loop."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from gorgo.learning.models.descent import Adam, Descent, clip_norm, descend
from gorgo.learning.models.network import Perceptron


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
