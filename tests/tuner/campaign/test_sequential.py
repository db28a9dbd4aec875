"""The sequential test keeps its error rate under any noise, and finds what is there."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from gorgo.core.arrays import Floats
from gorgo.errors import TunerError
from tuner.campaign.sequential import SignFlipTest

PAIRS, ALPHA = 20, 0.05


def gains(rng: np.random.Generator, *, effect: float, rho: float, kind: str) -> Floats:
    """Differences of a whole switchback whose block noise has sd 0.12 and autocorrelation `rho` from block to block."""
    noise = rng.standard_normal(2 * PAIRS) * 0.12 * (1 - rho**2) ** 0.5
    for i in range(1, 2 * PAIRS):
        noise[i] += rho * noise[i - 1]
    if kind == "bursts":
        noise += rng.random(2 * PAIRS) < 0.05
    if kind == "trend":
        noise += np.linspace(0, 1, 2 * PAIRS)
    blocks, first = noise.reshape(-1, 2), rng.random(PAIRS) < 0.5
    return np.asarray(np.where(first, 1, -1) * (blocks[:, 0] - blocks[:, 1]) + effect)


def is_significant(count: int, *, effect: float, rho: float, kind: str = "") -> float:
    """Share of switchbacks that show a gain at any of their twenty looks."""
    found = 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 77])
        test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=int(rng.integers(2**31)))
        found += test.is_significant(gains(rng, effect=effect, rho=rho, kind=kind).tolist())
    return found / count


@pytest.mark.parametrize(("rho", "kind"), [(0.0, ""), (0.9, ""), (0.5, "bursts"), (0.5, "trend")])
def test_where_there_is_no_gain_one_is_shown_as_rarely_as_stated(rho: float, kind: str) -> None:
    # Three standard errors of 600 draws. Of 10,000 it was 4.65 % (rho 0) and 5.17 % (bursts), give or take 0.2 %.
    assert is_significant(600, effect=0.0, rho=rho, kind=kind) < ALPHA + 0.027


def test_a_tenth_is_found_more_often_than_not() -> None:
    assert is_significant(100, effect=-log(0.9), rho=0.0) > 0.65
    assert is_significant(100, effect=-log(0.9), rho=0.5) > 0.85


def test_a_loss_is_hardly_ever_taken_for_a_gain() -> None:
    assert is_significant(300, effect=-0.05, rho=0.0) < 0.01


def test_what_is_clear_is_shown_after_seven_pairs_and_never_before_chance_allows() -> None:
    test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=1)
    first = next(n for n in range(1, PAIRS + 1) if test.is_significant([1.0 + 0.01 * i for i in range(n)]))
    assert first in (6, 7, 8)  # 2^-7 is below 7/20 of alpha


@pytest.mark.parametrize(("pairs", "alpha"), [(20, 0.05), (12, 0.1), (1, 0.6)])
def test_gains_that_are_alike_are_shown_when_few_enough_patterns_reach_them(pairs: int, alpha: float) -> None:
    # Of 2,000 patterns alpha * 2,000 * k / pairs may be crossed out by look k, and all that tie with the real one go
    # together. `chance` says how many tie: those whose first k signs are all plus.
    for seed in range(40):
        test = SignFlipTest(pairs=pairs, alpha=alpha, seed=seed)
        for looks in range(1, pairs + 1):
            few = [round(test.chance([1.0] * k) * 2000) <= int(alpha * 2000 * k / pairs) for k in range(1, looks + 1)]
            assert test.is_significant([1.0] * looks) == any(few), (seed, looks)
            if any(few):
                break


def test_gains_after_the_last_pair_are_not_looked_at() -> None:
    test = SignFlipTest(pairs=8, alpha=ALPHA, seed=2)
    losses, gained = [-0.1] * 8, [0.1] * 8
    assert not test.is_significant([*losses, *[9.0] * 30])
    assert test.is_significant([*gained, *[-9.0] * 30])
    assert test.chance([*gained, -9.0]) == test.chance(gained)


def test_a_look_sees_what_every_look_before_it_has_seen() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        values = rng.normal(0.1, 0.1, PAIRS).tolist()
        test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=seed)
        found = [test.is_significant(values[:looks]) for looks in range(PAIRS + 1)]
        assert found == sorted(found), "once shown, always shown"


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        # Of two signs four ways: the real sum is reached by those that equal it too.
        ([1.0, -1.0], 3 / 4),
        ([1.0, 1.0], 1 / 4),
        ([-1.0, -1.0], 1.0),
        ([0.0, 0.0], 1.0),
        ([2.0, -1.0], 1 / 2),
        ([1.0, 1.0, -1.0], 1 / 2),
    ],
)
def test_chance_counts_the_patterns_that_tie_with_what_happened(gains: list[float], expected: float) -> None:
    assert SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=0).chance(gains) == pytest.approx(expected, abs=0.035)


def test_what_was_shown_stays_shown() -> None:
    test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=1)
    assert test.is_significant([1.0] * 8 + [-5.0] * 8)


def test_the_same_seed_gives_the_same_answer() -> None:
    values = np.random.default_rng(0).normal(0.05, 0.1, PAIRS).tolist()
    answers = {SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=4).chance(values) for _ in range(3)}
    assert len(answers) == 1


def test_chance_of_all_of_ten_pairs_on_one_side_is_one_in_a_thousand() -> None:
    assert SignFlipTest(pairs=10, alpha=ALPHA, seed=0).chance([0.1] * 10) == pytest.approx(2**-10, abs=0.002)


def test_nothing_shows_nothing() -> None:
    test = SignFlipTest(pairs=PAIRS, alpha=ALPHA, seed=0)
    assert not test.is_significant([])
    assert not test.is_significant([0.0] * PAIRS)  # ties are never crossed out in part


@pytest.mark.parametrize(("alpha", "pairs"), [(0.0, 20), (1.0, 20), (0.05, 0)])
def test_an_error_rate_that_is_none_is_refused(alpha: float, pairs: int) -> None:
    with pytest.raises(TunerError, match="expected 0 < alpha < 1"):
        SignFlipTest(pairs=pairs, alpha=alpha, seed=0)
