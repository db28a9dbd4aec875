from __future__ import annotations

from math import inf, nan

import pytest

from gorgo.core.prefill import PrefillPrior
from gorgo.core.told_speed import MEMORY_TOKENS, MIN_TOKENS, ToldSpeed

PRIOR = PrefillPrior(base_s=0.0, tokens_per_s=10_000.0, kappa_s=0.0)


def test_nothing_is_told_by_too_few_tokens_and_they_count_later() -> None:
    told = ToldSpeed(PRIOR)
    assert not told.learn(MIN_TOKENS - 1, 1.0)
    assert told.factor is None
    assert told.learn(2 * MIN_TOKENS, 2 * MIN_TOKENS / 5_000.0)
    assert told.factor == pytest.approx(2.0)


def test_the_first_look_counts_from_the_start_of_the_engine() -> None:
    told = ToldSpeed(PRIOR)
    told.learn(1e9, 3e5)
    assert told.factor == pytest.approx(3.0)


def test_a_replica_that_becomes_slow_shows_within_some_scrapes_however_long_it_was_fast() -> None:
    told, tokens, spent_s = ToldSpeed(PRIOR), 1e9, 1e5
    told.learn(tokens, spent_s)
    for _ in range(20):
        tokens, spent_s = tokens + MEMORY_TOKENS / 10, spent_s + 3 * MEMORY_TOKENS / 10 / 10_000
        told.learn(tokens, spent_s)
    assert told.factor is not None
    assert 2.6 < told.factor < 3.0


def test_counters_that_went_back_are_an_engine_that_started_again() -> None:
    told = ToldSpeed(PRIOR)
    told.learn(1e9, 1e5)
    assert told.learn(100_000, 20.0)
    assert told.factor is not None
    assert 1.0 < told.factor < 1.2


@pytest.mark.parametrize(
    ("tokens", "spent_s"), [(None, 1.0), (1e6, None), (1e6, 0.0), (1e6, 1e9), (nan, 1.0), (1e6, nan), (1e6, inf)]
)
def test_what_cannot_be_meant_changes_nothing(tokens: float | None, spent_s: float | None) -> None:
    told = ToldSpeed(PRIOR)
    assert not told.learn(tokens, spent_s)
    assert told.factor is None


def test_the_same_engine_is_as_fast_whatever_the_lengths_of_its_prompts() -> None:
    """An engine that is exactly its prior, under short prompts whose constant part is most of them."""
    prior, told = PrefillPrior(), ToldSpeed(PrefillPrior())
    tokens = spent_s = 0.0
    for _ in range(10_000):
        tokens, spent_s = tokens + 60, spent_s + prior.seconds(60, 4000)
        told.sent(60, prior.seconds(60, 4000))
    told.learn(tokens, spent_s)
    assert told.factor == pytest.approx(1.0, rel=0.02)
