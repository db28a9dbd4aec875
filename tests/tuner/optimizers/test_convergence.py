"""ES and CMA-ES find the bottom of a bowl in log space within a stated budget, with and without noise."""

from __future__ import annotations

from math import cos, exp, log, pi, sin
from typing import Any

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from tuner.optimizers.cma_es import CmaEs
from tuner.optimizers.es import SIGMA_MAX, OnePlusOneES
from tuner.space import LogBox

WIDE = LogBox(tuple(WeightSpec(name, 1.0, 1e-3, 1e3, "any") for name in ("a", "b")))
BEST = {"a": 0.2, "b": 4.0}


def sphere(weights: dict[str, float]) -> float:
    return sum(log(weights[name] / BEST[name]) ** 2 for name in BEST)


def noisy(weights: dict[str, float], rng: np.random.Generator) -> float:
    """A p95 that is 5 % lower at the bottom than a factor of e away, and varies by 1 % from window to window."""
    return (1 + 0.05 * sphere(weights)) * exp(0.01 * rng.standard_normal())


def distance(weights: dict[str, float]) -> float:
    return float(sphere(weights) ** 0.5)


@pytest.mark.parametrize(("kind", "evaluations"), [(OnePlusOneES, 150), (CmaEs, 240)])
def test_the_sphere_s_bottom_is_found_to_a_percent(kind: type[OnePlusOneES] | type[CmaEs], evaluations: int) -> None:
    for seed in range(20):
        optimizer = kind(WIDE, {}, np.random.default_rng(seed), budget=evaluations, sigma_min=1e-6)
        while optimizer.observed < evaluations:
            weights = optimizer.ask()
            optimizer.tell(weights, sphere(weights))
        assert distance(optimizer.incumbent) < 0.01, seed


@pytest.mark.parametrize("kind", [OnePlusOneES, CmaEs])
def test_a_noisy_bowl_s_bottom_is_found_to_a_factor_in_120_evaluations(
    kind: type[OnePlusOneES] | type[CmaEs],
) -> None:
    far = [distance(_down_the_noisy_bowl(kind, seed)) for seed in range(20)]
    assert np.median(far) < 0.4
    assert max(far) < 1.2  # from 2.1


def _down_the_noisy_bowl(kind: type[OnePlusOneES] | type[CmaEs], seed: int) -> dict[str, float]:
    noise = np.random.default_rng(1000 + seed)
    optimizer = kind(WIDE, {}, np.random.default_rng(seed), sigma_min=1e-6)
    while optimizer.observed < 120:
        optimizer.tell_incumbent(noisy(optimizer.incumbent, noise))  # a lucky window does not reign
        weights = optimizer.ask()
        optimizer.tell(weights, noisy(weights, noise))
    return optimizer.incumbent


def test_one_proposal_in_five_succeeds_where_the_bottom_stays_as_far_away() -> None:
    for seed in range(20):
        assert _share_of_successes(seed) == pytest.approx(0.2, abs=0.01), seed


def _share_of_successes(seed: int) -> float:
    # Nothing but the rule sets the step here: each time the bottom lies at the same distance, wherever it is.
    optimizer = OnePlusOneES(WIDE, {}, np.random.default_rng(seed), sigma0=0.01, sigma_min=1e-6, patience=1000)
    compass, far = np.random.default_rng(1000 + seed), 0.01
    successes = 0
    for _ in range(500):
        angle = compass.uniform(0, 2 * pi)
        bottom = _log(optimizer.incumbent) + far * np.array([cos(angle), sin(angle)])
        weights = optimizer.ask()
        better = bool(np.linalg.norm(_log(weights) - bottom) < far)
        optimizer.tell(weights, 1.0, accepted=better)
        successes += better
    return successes / 500


def test_fewer_succeed_on_the_way_down_by_what_sigma_has_to_shrink() -> None:
    # Sigma stays in proportion to the distance, so ln sigma falls as fast as ln distance, phi per proposal. By the
    # rule it changes by (5 p - 1) / (4 d): p = 1/5 - 4/5 d phi. With two weights (d = 2) that is about 0.1.
    rates, expected = [], []
    for seed in range(20):
        optimizer = OnePlusOneES(WIDE, {}, np.random.default_rng(seed), sigma_min=1e-12, patience=1000)
        for _ in range(20):  # from the first step's size to the right one
            _one_step(optimizer)
        before = distance(optimizer.incumbent)
        taken = [_one_step(optimizer) for _ in range(80)]
        phi = log(before / distance(optimizer.incumbent)) / len(taken)
        rates.append(np.mean(taken))
        expected.append(1 / 5 - 4 / 5 * optimizer.damping * phi)
    assert np.mean(rates) == pytest.approx(np.mean(expected), abs=0.01)
    assert 0.08 < np.mean(rates) < 0.14


def _one_step(optimizer: OnePlusOneES) -> bool:
    before = optimizer.incumbent
    weights = optimizer.ask()
    optimizer.tell(weights, sphere(weights))
    return optimizer.incumbent != before


def _log(weights: dict[str, float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.log(list(weights.values()))


def test_sigma_follows_the_rule_and_stands_still_at_one_success_in_five() -> None:
    optimizer = OnePlusOneES(WIDE, {}, np.random.default_rng(0))
    optimizer.tell(optimizer.ask(), 1.0, accepted=True)
    assert optimizer.sigma == pytest.approx(0.5 * exp(1 / 2))  # d = 1 + 2/2
    optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert optimizer.sigma == pytest.approx(0.5 * exp(1 / 2 - 1 / 8))
    for _ in range(3):
        optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert optimizer.sigma == pytest.approx(0.5)


def test_sigma_has_a_ceiling_and_a_floor_at_which_the_search_has_converged() -> None:
    optimizer = OnePlusOneES(WIDE, {}, np.random.default_rng(0))
    for _ in range(9):
        optimizer.tell(optimizer.ask(), 1.0, accepted=True)
    assert optimizer.sigma == SIGMA_MAX
    while not (reason := optimizer.stop()):
        optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert reason == "converged: no success in 25 proposals"
    optimizer = OnePlusOneES(WIDE, {}, np.random.default_rng(0))
    while not (reason := optimizer.stop()):
        optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert optimizer.observed == 19
    assert reason == "converged: steps of 4.7% are below 5.0%"


def test_a_parent_in_the_corner_is_not_proposed_to_itself() -> None:
    box = LogBox((WeightSpec("w_rtt", 2.0, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.5, 0.05, 0.5, "per token")))
    optimizer = OnePlusOneES(box, {}, np.random.default_rng(0))
    for _ in range(20):
        weights = optimizer.ask()
        assert weights != {"w_rtt": 2.0, "w_queue": 0.5}
        optimizer.tell(weights, 1.0, accepted=False)


def test_cma_stops_where_steps_are_small() -> None:
    optimizer = CmaEs(WIDE, {}, np.random.default_rng(0))
    while not (reason := optimizer.stop()):
        weights = optimizer.ask()
        optimizer.tell(weights, sphere(weights))
    assert reason.startswith("converged: steps of")
    assert distance(optimizer.incumbent) < 0.2
