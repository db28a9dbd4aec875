"""How much longer a token takes for each request beside: from the usual to what answers show."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from gorgo.core.latency.decode_slope import LEAST, MEMORY, MOST, PRIOR, PRIOR_WEIGHT, DecodeSlope


def learned(each: float, beside: Iterable[float], *, alone_s: float = 0.01) -> float:
    growth = DecodeSlope()
    for number, so_many in enumerate(beside):
        tokens = 50 + 37 * number % 400
        growth.learn(tokens * alone_s * (1.0 + each * so_many), tokens=tokens, beside=so_many)
    return growth.value


def test_nothing_is_known_before_the_first_answer() -> None:
    assert DecodeSlope().value == PRIOR


@pytest.mark.parametrize("each", [1 / 200, 1 / 50, 1 / 20])
def test_a_number_that_varies_shows_the_growth_of_the_engine(each: float) -> None:
    assert learned(each, np.random.default_rng(0).uniform(1, 60, 600)) == pytest.approx(each, rel=0.1)


def test_a_number_that_never_varies_shows_nothing() -> None:
    assert learned(1 / 200, [20.0] * 600) == pytest.approx(PRIOR)


def test_no_fit_leaves_what_an_engine_can_do() -> None:
    falling = np.random.default_rng(0).uniform(1, 60, 600)
    assert learned(-1 / 100, falling) == LEAST
    assert learned(1e6, falling) == MOST


def test_what_looks_steeper_than_usual_is_not_estimated() -> None:
    assert learned(1 / 4, np.random.default_rng(0).uniform(1, 60, 600)) == PRIOR


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_the_fit_is_a_line_through_the_means_of_fading_answers_that_leans_on_the_usual(count: int) -> None:
    """Against the same written as weighted sums of differences from the means, one term per answer."""
    rng = np.random.default_rng(count)
    tokens, beside = rng.integers(20, 400, count), rng.uniform(0.5, 30, count)
    spent_s = tokens * 0.01 * (1.0 + beside / 40) * rng.uniform(0.9, 1.1, count)
    growth = DecodeSlope()
    for one in range(count):
        growth.learn(float(spent_s[one]), tokens=int(tokens[one]), beside=float(beside[one]))
    fade = (1.0 - 1.0 / MEMORY) ** np.arange(count)[::-1]
    weight = fade * tokens
    mean_beside, mean_s = np.average(beside, weights=weight), (fade * spent_s).sum() / weight.sum()
    usual_s = mean_s * PRIOR / (1.0 + PRIOR * mean_beside)
    trust = PRIOR_WEIGHT * weight.sum() / fade.sum() * max(1.0, mean_beside)
    covered = (weight * (spent_s / tokens - mean_s) * (beside - mean_beside)).sum()
    each_s = (covered + trust * usual_s) / ((weight * (beside - mean_beside) ** 2).sum() + trust)
    assert each_s / (mean_s - each_s * mean_beside) > LEAST
    assert growth.value == pytest.approx(min(MOST, each_s / (mean_s - each_s * mean_beside)))


def test_the_bounds_are_those_of_the_design() -> None:
    assert (PRIOR, LEAST, MOST, PRIOR_WEIGHT, MEMORY) == (1 / 16, 1 / 1024, 1 / 16, 32.0, 512.0)


def test_a_growth_that_changes_is_followed() -> None:
    growth, beside = DecodeSlope(), np.random.default_rng(0).uniform(1, 60, 4000)
    for number, so_many in enumerate(beside):
        each = 1 / 16 if number < 1000 else 1 / 100
        growth.learn(2.0 * (1.0 + each * so_many), tokens=200, beside=so_many)
    assert growth.value == pytest.approx(1 / 100, rel=0.25)
