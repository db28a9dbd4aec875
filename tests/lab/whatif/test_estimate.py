"""Off-policy estimates on decisions whose truth is known: bias, intervals, and what has no support."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.numeric import Floats
from gorgo.lab.whatif import (
    LEAST_SUPPORT,
    EstimatedChange,
    Estimator,
    Weighted,
    binned_means,
    blocks_of,
    changes,
    support,
)

#: Replicas, and the share of decisions that goes to any of them.
K, SHARE = 4, 0.2


def world(seed: int, *, rows: int = 4000, gain: float = 0.5) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Outcomes, probabilities, chances under another policy, times, and a feature of a model.

    The log's policy takes replica 0 and the other one replica 1 on three decisions of ten, where that is better by
    `gain`. A level that is common to the decisions of half a minute is added to all outcomes.
    """
    rng = np.random.default_rng(seed)
    times_s = np.sort(rng.uniform(0.0, 1800.0, rows))
    level = rng.normal(0.0, 1.0, 61)[(times_s / 30.0).astype(int)]
    differs = rng.random(rows) < 0.3
    explores = rng.random(rows) < SHARE
    taken = np.where(explores, rng.integers(K, size=rows), 0)
    size = rng.exponential(1.0, rows)
    effect = np.where(differs & (taken == 1), -gain, np.where(taken == 0, 0.0, 0.3))
    outcomes = 10.0 + size + level + effect + rng.normal(0.0, 0.5, rows)
    probabilities = np.where(taken == 0, 1.0 - SHARE + SHARE / K, SHARE / K)
    chances = (taken == np.where(differs, 1, 0)).astype(float)
    return outcomes, probabilities, chances, times_s, size


def estimated(seed: int, **more: float) -> dict[Estimator, EstimatedChange]:
    outcomes, probabilities, chances, times_s, size = world(seed, **more)  # type: ignore[arg-type] # sizes
    edges, means = binned_means(size, outcomes)
    predicted = means[np.searchsorted(edges, size)]
    other = Weighted(chances / probabilities, predicted)
    return dict(changes(outcomes, blocks_of(times_s), predicted, other))


#: Of the other policy without exploration, over the log with it.
TRUTH = -0.3 * 0.5 - SHARE * (0.3 * (0.25 * -0.5 + 0.5 * 0.3) + 0.7 * 0.75 * 0.3)


def test_intervals_cover_the_truth_in_90_to_99_of_100_logs_although_a_minute_has_one_level() -> None:
    runs = [estimated(seed) for seed in range(100)]
    names: tuple[Estimator, ...] = ("snips", "dr")
    for name in names:
        covered = sum(run[name].low <= TRUTH <= run[name].high for run in runs)
        assert 90 <= covered <= 99, name
        assert np.mean([run[name].change for run in runs]) == pytest.approx(TRUTH, abs=0.02)


def test_intervals_of_the_doubly_robust_estimate_are_the_narrowest() -> None:
    runs = [estimated(seed) for seed in range(5)]
    names: tuple[Estimator, ...] = ("ips", "snips", "dr")
    ips, snips, dr = (sum(run[name].high - run[name].low for run in runs) for name in names)
    assert dr < snips < ips


def test_a_wrong_model_widens_the_interval_and_moves_no_estimate() -> None:
    outcomes, probabilities, chances, times_s, size = world(1, rows=40_000)
    weights = chances / probabilities
    wrong = 5.0 * size
    found = changes(outcomes, blocks_of(times_s), wrong, Weighted(weights, wrong))["dr"]
    assert found.change == pytest.approx(TRUTH, abs=2 * (found.high - found.low))
    right = changes(outcomes, blocks_of(times_s), size + 10.0, Weighted(weights, size + 10.0))["dr"]
    assert right.high - right.low < found.high - found.low


def test_two_weight_sets_are_compared_with_each_other() -> None:
    outcomes, probabilities, chances, times_s, size = world(2)
    own = (probabilities > 0.5).astype(float)
    ours, theirs = Weighted(chances / probabilities, size), Weighted(own / probabilities, size)
    blocks = blocks_of(times_s)
    found = changes(outcomes, blocks, size, ours, theirs)["dr"]
    assert found.low < -0.15 < found.high
    same = changes(outcomes, blocks, size, ours, ours)["dr"]
    assert (same.change, same.low, same.high) == (0.0, 0.0, 0.0)


def test_what_never_went_there_by_chance_has_no_support() -> None:
    probabilities = np.full(1000, 1.0)
    chances = np.where(np.arange(1000) % 5 == 0, 0.0, 1.0)
    found = support(chances, probabilities)
    assert found.changed == pytest.approx(0.2)
    assert (found.effective, found.is_enough) == (0.0, False)
    assert found.needed == np.inf


def test_support_is_the_number_of_decisions_by_chance_where_their_weights_are_equal() -> None:
    probabilities, chances = np.full(1000, 0.99), np.ones(1000)
    probabilities[:20], chances[20:220] = 0.01, 0.0
    found = support(chances, probabilities)
    assert found.effective == pytest.approx(20.0)
    assert found.changed == pytest.approx(200 / 980)
    assert found.needed == pytest.approx(LEAST_SUPPORT / 20.0)


def test_one_block_has_an_interval_without_end() -> None:
    outcomes, probabilities, chances, _, size = world(3, rows=300)
    found = changes(outcomes, blocks_of(np.zeros(300)), size, Weighted(chances / probabilities, size))["dr"]
    assert (found.low, found.high) == (-np.inf, np.inf)
