from __future__ import annotations

from math import exp, inf, nan

import pytest

from gorgo.core.latency.prefill import PrefillPrior
from gorgo.core.latency.reported_speed import MEMORY_TOKENS, MIN_TOKENS, ReportedSpeed

PRIOR = PrefillPrior(base_s=0.0, tokens_per_s=10_000.0, kappa_s=0.0)


def test_nothing_is_told_by_too_few_tokens_and_they_count_later() -> None:
    told = ReportedSpeed(PRIOR)
    assert not told.on_counters(MIN_TOKENS - 1, 1.0)
    assert told.factor is None
    assert told.on_counters(2 * MIN_TOKENS, 2 * MIN_TOKENS / 5_000.0)
    assert told.factor == pytest.approx(2.0)


def test_the_first_look_counts_from_the_start_of_the_engine() -> None:
    told = ReportedSpeed(PRIOR)
    told.on_counters(1e9, 3e5)
    assert told.factor == pytest.approx(3.0)


def test_a_replica_that_becomes_slow_shows_within_some_scrapes_however_long_it_was_fast() -> None:
    told, tokens, spent_s = ReportedSpeed(PRIOR), 1e9, 1e5
    told.on_counters(tokens, spent_s)
    for _ in range(20):
        tokens, spent_s = tokens + MEMORY_TOKENS / 10, spent_s + 3 * MEMORY_TOKENS / 10 / 10_000
        told.on_counters(tokens, spent_s)
    assert told.factor is not None
    assert 2.6 < told.factor < 3.0


def test_counters_that_went_back_are_an_engine_that_started_again() -> None:
    told = ReportedSpeed(PRIOR)
    told.on_counters(1e9, 1e5)
    assert told.on_counters(100_000, 20.0)
    assert told.factor is not None
    assert 1.0 < told.factor < 1.2


@pytest.mark.parametrize(("token_s", "plausible"), [(1.1e-7, True), (0.9e-7, False), (0.99, True), (1.01, False)])
def test_an_engine_prefills_ten_million_tokens_a_second_at_most_and_one_at_least(
    token_s: float, plausible: bool
) -> None:
    told = ReportedSpeed(PRIOR)
    assert told.on_counters(1e6, 1e6 * token_s) is plausible
    assert told.factor == (pytest.approx(token_s * 10_000) if plausible else None)
    assert told.on_counters(2e6, 1e6 * token_s + 100.0), "the next look counts from this one, whatever it was"
    assert told.factor is not None
    assert plausible or told.factor == pytest.approx(1.0)


def test_a_scrape_weighs_as_many_tokens_as_are_remembered_at_most_and_fades_with_later_ones() -> None:
    """4 and 3 times slower than the prior: 1e6 tokens faded by half of the memory, and half as many new ones."""
    told = ReportedSpeed(PRIOR)
    told.on_counters(5e6, 5e6 * 4e-4)
    told.on_counters(5e6 + 5e5, 5e6 * 4e-4 + 5e5 * 3e-4)
    kept = exp(-0.5)
    assert told.factor == pytest.approx((1e6 * kept * 4.0 + 5e5 * 3.0) / (1e6 * kept + 5e5))


@pytest.mark.parametrize("back", ["tokens", "seconds"])
def test_either_counter_that_went_back_is_an_engine_that_started_again(back: str) -> None:
    """10,000 tokens at twice the prior since its start; the difference to the last look would be something else."""
    told = ReportedSpeed(PRIOR)
    told.on_counters(*((1e6, 1.5) if back == "tokens" else (5e3, 100.0)))
    assert told.on_counters(10_000, 2.0)
    before, kept = ((1e6, 1e6 * 1.5e-6) if back == "tokens" else (5e3, 100.0)), exp(-10_000 / 1e6)
    spent_s = before[1] * kept + 2.0
    assert told.factor == pytest.approx(spent_s / (before[0] * kept + 10_000) * 10_000)


def test_the_mix_of_requests_is_of_those_dispatched_and_fades_with_them() -> None:
    """A usual request of 1,500 tokens, at 1 s and 0.1 ms a token, then one of 200,000 tokens in 60 s."""
    prior = PrefillPrior(base_s=1.0, tokens_per_s=10_000.0, kappa_s=0.0)
    told = ReportedSpeed(prior)
    told.on_request(200_000, 60.0)
    told.on_counters(1e6, 400.0)
    kept = exp(-1.0)
    assert told.factor == pytest.approx(4e-4 / ((1.15 * kept + 60.0) / (1500 * kept + 200_000)))


def test_a_usual_request_has_5500_cached_tokens_before_1500_new_ones() -> None:
    prior = PrefillPrior(base_s=0.0, tokens_per_s=1e9, kappa_s=1e-6)
    told = ReportedSpeed(prior)
    told.on_counters(1e6, 6250.0)
    assert told.factor == pytest.approx(6250e-6 / (1e-9 + 1e-6 * (5500 + 750)), rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "spent_s"), [(None, 1.0), (1e6, None), (1e6, 0.0), (1e6, 1e9), (nan, 1.0), (1e6, nan), (1e6, inf)]
)
def test_what_cannot_be_meant_changes_nothing(tokens: float | None, spent_s: float | None) -> None:
    told = ReportedSpeed(PRIOR)
    assert not told.on_counters(tokens, spent_s)
    assert told.factor is None


def test_the_same_engine_is_as_fast_whatever_the_lengths_of_its_prompts() -> None:
    """An engine that is exactly its prior, under short prompts whose constant part is most of them."""
    prior, told = PrefillPrior(), ReportedSpeed(PrefillPrior())
    tokens = spent_s = 0.0
    for _ in range(10_000):
        tokens, spent_s = tokens + 60, spent_s + prior.seconds(60, 4000)
        told.on_request(60, prior.seconds(60, 4000))
    told.on_counters(tokens, spent_s)
    assert told.factor == pytest.approx(1.0, rel=0.02)
