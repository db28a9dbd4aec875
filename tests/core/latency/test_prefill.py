"""Prefills: their speed as it is learned, and the queue of them on an engine."""

from __future__ import annotations

from math import exp, inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.latency.prefill import (
    FADE_S,
    MEMORY_TOKENS,
    MIN_TOKENS,
    MOST_PASSED,
    SLOWEST,
    PrefillPrior,
    PrefillQueue,
    PrefillSpeed,
    ReportedSpeed,
    faded,
    mean_of_columns,
    mean_of_rows,
    prefill_s,
    shares_of_columns,
    with_prefill,
)


def test_time_of_a_prefill_is_constant_linear_and_quadratic() -> None:
    prior = PrefillPrior(base_s=0.01, tokens_per_s=1000.0, kappa_s=1e-6)
    assert prior.seconds(500, 2000) == pytest.approx(0.01 + 0.5 + 1e-6 * 500 * (2000 + 250))


def test_columns_give_what_single_replicas_do() -> None:
    priors = [PrefillPrior(), PrefillPrior(0.1, 100.0, 1e-3)]
    column = prefill_s(
        np.array([prior.base_s for prior in priors]),
        np.array([1 / prior.tokens_per_s for prior in priors]),
        np.array([prior.kappa_s for prior in priors]),
        np.array([100.0, 300.0]),
        np.array([900.0, 700.0]),
    )
    assert column.tolist() == pytest.approx([priors[0].seconds(100, 900), priors[1].seconds(300, 700)])


def test_a_prior_counts_as_known_by_its_rate() -> None:
    assert not PrefillPrior.of(0.02, None, None).known
    given = PrefillPrior.of(None, 20_000.0, None)
    assert given.known
    assert (given.base_s, given.kappa_s) == (PrefillPrior().base_s, PrefillPrior().kappa_s)


cells = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=12)


@pytest.mark.parametrize(("every_s", "prefill_s"), [(0.1, 0.05), (0.5, 0.4), (2.0, 0.5)])
def test_in_a_steady_stream_it_is_the_share_of_the_time(every_s: float, prefill_s: float) -> None:
    share = 0.0
    for _ in range(round(10 * FADE_S / every_s)):
        share = with_prefill(share, every_s, prefill_s)
    assert share == pytest.approx(prefill_s / every_s, rel=0.05)


def test_an_empty_cell_of_any_age_has_no_share() -> None:
    assert with_prefill(0.0, 1.8e9, 3.0) == 3.0 / FADE_S


@given(cells, st.floats(0.0, 1e9))
def test_rows_have_the_very_numbers_of_columns(shares: list[float], now: float) -> None:
    since_s = [now / (1 + place) for place in range(len(shares))]
    assert [faded(share, now - at_s) for share, at_s in zip(shares, since_s, strict=True)] == shares_of_columns(
        np.array(shares), np.array(since_s), now
    ).tolist()


@given(st.floats(0.0, 3.0), st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_it_only_fades(share: float, age_s: float, more_s: float) -> None:
    assert 0.0 <= faded(share, age_s + more_s) <= faded(share, age_s) <= share


@given(cells)
def test_the_mean_of_rows_is_the_very_number_of_columns(shares: list[float]) -> None:
    assert mean_of_rows(shares) == mean_of_columns(np.array(shares))


def learned(*tokens: tuple[float, float, float, bool]) -> PrefillSpeed:
    """Of tokens (engine time, arrival, prior, head of the line)."""
    speed = PrefillSpeed()
    for engine_s, arrived_s, prior_s, head in tokens:
        speed.on_first_token(engine_s=engine_s, arrived_s=arrived_s, prior_s=prior_s, head=head)
    return speed


def test_a_replica_is_as_fast_as_its_prior_until_it_shows_otherwise() -> None:
    assert learned().factor == 1.0


def test_the_first_token_of_an_idle_replica_counts_from_the_arrival_less_half_a_step() -> None:
    assert learned((12.005, 10.0, 1.0, True)).factor == pytest.approx((2.0 + 5.0) / (1.0 + 5.0))


def test_a_request_that_was_there_before_the_last_first_token_counts_from_that() -> None:
    speed = learned((11.005, 10.0, 1.0, True), (14.005, 10.5, 1.0, True))
    kept = exp(-0.1)
    assert speed.factor == pytest.approx((1.0 * kept + 3.0 + 5.0) / (1.0 * kept + 1.0 + 5.0))


def test_a_request_that_came_within_half_a_step_of_the_last_first_token_counts_from_its_arrival() -> None:
    speed = learned((11.005, 10.0, 1.0, True), (13.009, 11.004, 1.0, True))
    kept = exp(-0.1)
    assert speed.factor == pytest.approx((1.0 * kept + 1.999 + 5.0) / (1.0 * kept + 1.0 + 5.0))


def test_tokens_that_come_together_count_with_nothing_for_the_later_ones() -> None:
    speed = learned((12.005, 10.0, 1.0, True), (12.005, 10.0, 1.0, True))
    kept = exp(-0.1)
    assert speed.factor == pytest.approx((2.0 * kept + 0.0 + 5.0) / (1.0 * kept + 1.0 + 5.0))


def test_nothing_is_learned_while_an_older_request_has_the_engine() -> None:
    assert learned((12.0, 10.0, 1.0, False)).factor == 1.0


def test_a_short_prompt_that_ends_in_the_last_step_of_a_long_one_hides_no_time() -> None:
    """An engine ends both in one step, and the token of the later one may be read first."""
    speed = learned((40.005, 35.0, 0.1, False), (40.005, 20.0, 20.0, True))
    assert speed.factor == pytest.approx((20.0 + 5.0) / (20.1 + 5.0))


def test_what_passed_an_older_request_counts_with_it() -> None:
    passed = learned((11.0, 10.0, 1.0, True), (13.0, 10.6, 1.0, False), (14.0, 10.5, 2.0, True))
    kept = exp(-0.3)
    assert passed.factor == pytest.approx((0.995 * kept + 3.0 + 5.0) / (1.0 * kept + 3.0 + 5.0))


def test_what_passed_a_request_that_failed_counts_for_no_later_one() -> None:
    speed = learned((12.0, 11.0, 1.0, False), (22.005, 20.0, 2.0, True))
    assert speed.factor == pytest.approx((2.0 + 5.0) / (2.0 + 5.0))


def test_a_stuck_request_may_be_passed_by_so_many() -> None:
    speed = learned(*((10.0 + number, 10.0, 0.5, False) for number in range(MOST_PASSED + 1)))
    assert speed.last_s == 10.0 + MOST_PASSED
    speed.on_first_token(engine_s=100.0, arrived_s=5.0, prior_s=26.0, head=True)
    assert speed.factor == pytest.approx((26.0 + 5.0) / (26.0 + 5.0), rel=1e-3)


def test_work_of_others_before_a_token_that_passed_leaves_the_time_out() -> None:
    speed = PrefillSpeed()
    speed.on_first_token(engine_s=12.0, arrived_s=10.5, prior_s=0.5, head=False, shared_until_s=11.0)
    speed.on_first_token(engine_s=13.0, arrived_s=10.0, prior_s=0.5, head=True)
    assert speed.factor == 1.0


def test_the_factor_stays_within_its_bounds() -> None:
    assert learned((1e6, 10.0, 1.0, True)).factor == 10.0
    assert learned((10.0, 20.0, 100.0, True)).factor == 0.1


def test_a_replica_three_times_slower_is_known_after_some_seconds_of_work_and_forgiven_as_fast() -> None:
    speed, now = PrefillSpeed(), 0.0
    for slowdown, wanted in ((3.0, pytest.approx(2.82, abs=0.02)), (1.0, pytest.approx(1.17, abs=0.02))):
        for _ in range(40):
            arrived_s, now = now, now + 0.5 * slowdown
            speed.on_first_token(engine_s=now + 0.005, arrived_s=arrived_s, prior_s=0.5, head=True)
        assert speed.factor == wanted


@pytest.mark.parametrize(("slowdown", "steady"), [(1.7, True), (2.5, False), (0.6, True), (0.3, False)])
def test_the_quick_average_is_believed_where_noise_does_not_reach(slowdown: float, steady: bool) -> None:
    speed = learned(*((slowdown * second, 0.0, 1.0, True) for second in range(1, 100)))
    halfway = (1.0 + slowdown) / 2
    leans = abs(speed.factor - slowdown) > 0.2 * abs(1.0 - slowdown)
    assert leans == steady
    assert (speed.factor - halfway) * (slowdown - halfway) > 0  # nearer to the truth than to the prior, in both


def test_what_the_engine_tells_is_where_learning_starts_from_and_weighs_as_a_given_prior() -> None:
    speed = learned()
    speed.set_prior(3.0)
    assert speed.factor == 3.0
    speed.on_first_token(engine_s=12.005, arrived_s=10.0, prior_s=1.0, head=True)
    assert speed.factor == pytest.approx((2.0 + 5.0 * 3.0) / (1.0 + 5.0))


@pytest.mark.parametrize(("told", "start"), [(50.0, 10.0), (0.01, 0.1)])
def test_a_reported_speed_is_a_start_within_the_bounds(told: float, start: float) -> None:
    """Then a second of the prior takes a second: the quick average of (1 + 0.5 x start) / 1.5 is far from the start."""
    speed = learned()
    speed.set_prior(told)
    assert speed.factor == start
    speed.on_first_token(engine_s=11.005, arrived_s=10.0, prior_s=1.0, head=True)
    assert speed.factor == pytest.approx((1.0 + 0.5 * start) / 1.5)


@pytest.mark.parametrize(
    ("spent_s", "factor"),
    [
        (5.5, (5.5 + 0.5) / (2.0 + 0.5)),  # quick: 2.4: counts
        (4.45, (4.45 + 5.0) / (2.0 + 5.0)),  # quick: 1.98: the steady one
        (0.76, (0.76 + 5.0) / (2.0 + 5.0)),  # quick: 0.504
        (0.74, (0.74 + 0.5) / (2.0 + 0.5)),  # quick: 0.496: counts
        (4.55, (4.55 + 0.5) / (2.0 + 0.5)),  # quick: 2.02: counts
    ],
)
def test_the_quick_average_counts_beyond_twice_and_below_half_of_the_start(spent_s: float, factor: float) -> None:
    assert learned((10.005 + spent_s, 10.0, 2.0, True)).factor == pytest.approx(factor)


def test_the_quick_average_forgets_twice_as_fast() -> None:
    """Two seconds of the prior each: one that took 10 s, one that took 10 s again."""
    speed = learned((20.005, 10.0, 2.0, True), (30.005, 10.5, 2.0, True))
    kept = exp(-2.0 / 5.0)
    assert speed.factor == pytest.approx((10.0 * kept + 10.0 + 0.5) / (2.0 * kept + 2.0 + 0.5))


def test_telling_does_not_count_again_what_was_learned() -> None:
    speed = learned(*((3.0 * second, 0.0, 1.0, True) for second in range(1, 400)))
    before = speed.factor
    speed.set_prior(3.0)
    assert speed.factor == pytest.approx(before, rel=0.07)
    speed.set_prior(1e6)
    assert speed.factor <= SLOWEST


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


def test_a_replica_that_stalled_once_looks_like_its_prior_again_within_twenty_seconds_without_work() -> None:
    speed = PrefillSpeed()
    for second in range(30):
        speed.on_first_token(engine_s=second + 0.1, arrived_s=float(second), prior_s=0.1, head=True)
    speed.on_first_token(engine_s=38.0, arrived_s=30.0, prior_s=0.1, head=True)
    for _ in range(5):  # what waited with it has its token at once
        speed.on_first_token(engine_s=38.0, arrived_s=30.5, prior_s=0.1, head=True)
    assert speed.is_slow
    for engine_s in range(39, 59):
        speed.age(engine_s=float(engine_s))
    assert speed.factor < 1.1
    assert speed.is_forgotten


def test_a_replica_that_was_slow_in_every_prefill_still_looks_slow_after_a_pause() -> None:
    speed = PrefillSpeed()
    for second in range(30):
        speed.on_first_token(engine_s=second + 0.4, arrived_s=float(second), prior_s=0.1, head=True)
    for engine_s in range(30, 50):
        speed.age(engine_s=float(engine_s))
    assert speed.is_slow
    for engine_s in range(50, 600):
        speed.age(engine_s=float(engine_s))
    assert speed.is_forgotten  # else nothing would ever correct it


def test_a_usual_prefill_ends_the_count_of_slow_ones_and_one_in_the_time_of_another_does_not() -> None:
    def slow(*later_s: float) -> PrefillSpeed:
        speed = PrefillSpeed()
        for second in range(5):
            speed.on_first_token(engine_s=second + 0.8, arrived_s=float(second), prior_s=0.1, head=True)
        for end_s in later_s:
            speed.on_first_token(engine_s=end_s, arrived_s=4.5, prior_s=0.1, head=True)
        speed.on_first_token(engine_s=18.0, arrived_s=10.0, prior_s=0.1, head=True)
        speed.age(engine_s=36.0)
        return speed

    assert slow().is_slow
    assert slow(4.8).is_slow
    assert not slow(4.9).is_slow


def test_what_was_learned_fades_alike_however_often_its_age_is_asked_for() -> None:
    once, often = PrefillSpeed(), PrefillSpeed()
    for speed in (once, often):
        speed.on_first_token(engine_s=5.0, arrived_s=0.0, prior_s=0.5, head=True)
    once.age(engine_s=9.0)
    for step in range(1, 41):
        often.age(engine_s=5.0 + step / 10)
    assert often.factor == pytest.approx(once.factor)
    assert once.factor < 5.0


def clock_with(*line: tuple[str, float, float], streamed: bool = True) -> PrefillQueue:
    """Whose line is (key, arrival, prior) each."""
    clock = PrefillQueue()
    for key, arrives_s, prior_s in line:
        clock.add(key, arrives_s=arrives_s, prior_s=prior_s, streamed=streamed)
    return clock


def test_an_idle_replica_is_free_and_owes_nothing() -> None:
    clock = PrefillQueue()
    assert (clock.drained_at_s, clock.head_due_s, clock.backlog_s) == (-inf, inf, 0.0)


def test_each_dispatch_adds_its_prefill_behind_what_is_there() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.5, 0.5))
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (11.5, 1.5, 11.0)


def test_an_idle_gap_is_not_work() -> None:
    clock = clock_with(("a", 10.0, 1.0))
    clock.on_first_token("a", engine_s=11.005)
    clock.add("b", arrives_s=20.0, prior_s=0.5, streamed=True)
    assert clock.drained_at_s == pytest.approx(20.5)


def test_a_first_token_sets_the_clock_to_what_still_waits() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5), ("c", 10.0, 0.25))
    clock.on_first_token("a", engine_s=10.705)
    assert clock.drained_at_s == pytest.approx(10.705 + 0.75 * clock.speed.factor)
    assert clock.head_due_s == pytest.approx(10.705 + 0.5 * clock.speed.factor)


def test_a_first_token_out_of_line_leaves_the_older_ones_waiting() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.on_first_token("b", engine_s=10.6)
    assert clock.backlog_s == 1.0
    assert clock.head_due_s == pytest.approx(11.6)


def test_a_first_token_told_twice_or_of_a_stranger_changes_nothing() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.on_first_token("a", engine_s=11.0)
    before = (clock.drained_at_s, clock.head_due_s, clock.backlog_s, clock.speed.last_s)
    clock.on_first_token("a", engine_s=12.0)
    clock.remove("never", engine_s=12.0)
    assert (clock.drained_at_s, clock.head_due_s, clock.backlog_s, clock.speed.last_s) == before


def test_who_leaves_from_the_middle_takes_its_prefill_along() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5), ("c", 10.0, 0.25))
    clock.remove("b", engine_s=10.3)
    assert (clock.drained_at_s, clock.head_due_s, clock.backlog_s) == (11.25, 11.0, 1.25)


def test_the_engine_has_spent_on_the_first_in_line_what_passed_until_it_left() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.remove("a", engine_s=10.75)
    assert (clock.drained_at_s, clock.head_due_s) == (11.25, 11.25)


def test_the_next_in_line_inherits_how_late_a_stuck_replica_is() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 0.5))
    clock.remove("a", engine_s=19.0)
    assert clock.head_due_s == 11.5


def test_an_answer_in_one_piece_is_in_line_until_its_prefill_should_be_over() -> None:
    clock = clock_with(("whole", 10.0, 1.0), streamed=False)
    assert (clock.drained_at_s, clock.head_due_s) == (11.0, inf)
    clock.add("b", arrives_s=10.5, prior_s=0.5, streamed=True)
    assert (clock.drained_at_s, clock.head_due_s, len(clock)) == (11.5, inf, 2)
    clock.add("c", arrives_s=11.25, prior_s=0.5, streamed=True)
    assert (clock.drained_at_s, clock.head_due_s, len(clock)) == (12.0, 11.5, 2)


def test_an_answer_in_one_piece_was_prefilled_before_a_later_one_s_first_token() -> None:
    clock = clock_with(("whole", 10.0, 1.0), streamed=False)
    clock.add("b", arrives_s=10.0, prior_s=0.5, streamed=True)
    clock.on_first_token("b", engine_s=10.9)
    assert len(clock) == 0
    assert clock.drained_at_s == 10.9


def test_the_end_of_an_answer_in_one_piece_teaches_no_speed() -> None:
    clock = clock_with(("whole", 10.0, 1.0), streamed=False)
    clock.remove("whole", engine_s=60.0)
    assert clock.speed.factor == 1.0
    assert clock.drained_at_s <= 60.0


def slow_clock(factor: float = 2.0) -> PrefillQueue:
    """Of an engine that says that its prefills take so many times their prior."""
    clock = PrefillQueue()
    clock.speed.set_prior(factor)
    return clock


def test_a_prefill_queue_is_as_long_as_its_priors_times_the_learned_factor() -> None:
    """Behind an arrival at 10 s: 2 s for a prior of 1 s, 1 s for one of half a second."""
    clock = slow_clock()
    clock.add("a", arrives_s=10.0, prior_s=1.0, streamed=True)
    clock.add("b", arrives_s=10.0, prior_s=0.5, streamed=True)
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (13.0, 3.0, 12.0)


def test_a_request_that_leaves_takes_its_prior_times_the_learned_factor_along() -> None:
    clock = slow_clock()
    for key, prior_s in (("a", 1.0), ("b", 0.5), ("c", 0.25)):
        clock.add(key, arrives_s=10.0, prior_s=prior_s, streamed=True)
    clock.remove("b", engine_s=10.5)  # from the middle: its whole second goes
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (12.5, 2.5, 12.0)
    clock.remove("a", engine_s=11.5)  # the first: 1.5 s of its two are spent
    assert (clock.drained_at_s, clock.backlog_s, clock.head_due_s) == (12.0, 0.5, 12.0)


def test_the_first_in_the_prefill_queue_has_spent_its_prior_times_the_learned_factor_at_most() -> None:
    clock = slow_clock()
    clock.add("a", arrives_s=10.0, prior_s=1.0, streamed=True)
    clock.add("b", arrives_s=10.0, prior_s=0.5, streamed=True)
    clock.remove("a", engine_s=60.0)
    assert (clock.drained_at_s, clock.head_due_s) == (13.0, 13.0)


def test_a_first_token_leaves_the_queued_priors_times_the_factor_that_it_taught() -> None:
    """One second where the prior says two, leaning on 5 s of prior: (1 - 0.005 + 5) / (2 + 5)."""
    clock = clock_with(("a", 10.0, 2.0), ("b", 10.0, 1.0))
    clock.on_first_token("a", engine_s=11.0)
    factor = 5.995 / 7.0
    assert clock.speed.factor == pytest.approx(factor)
    assert (clock.drained_at_s, clock.backlog_s) == pytest.approx((11.0 + factor, factor))


def test_a_first_token_out_of_order_says_nothing_of_the_speed() -> None:
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.0, 1.0))
    clock.on_first_token("b", engine_s=13.0)
    assert clock.speed.factor == 1.0


def test_an_empty_prefill_queue_is_an_idle_engine_whatever_was_learned_meanwhile() -> None:
    """A second was added at dispatch and half a second is taken back: what is left is no work."""
    clock = clock_with(("a", 10.0, 1.0))
    clock.speed.set_prior(0.5)
    clock.remove("a", engine_s=10.0)
    assert clock.drained_at_s == 10.0


def test_requests_ahead_in_the_prefill_queue_are_the_streams_before_it() -> None:
    clock = clock_with(("a", 10.0, 1.0))
    clock.add("whole", arrives_s=10.0, prior_s=1.0, streamed=False)
    clock.add("b", arrives_s=10.0, prior_s=1.0, streamed=True)
    clock.add("c", arrives_s=10.0, prior_s=1.0, streamed=True)
    assert [clock.before(key) for key in ("a", "b", "c", "nobody")] == [[], ["a"], ["a", "b"], []]


def test_a_prefill_begins_no_sooner_than_its_request_arrives() -> None:
    """The first has not arrived by the time at which its client leaves: the engine has spent nothing on it."""
    clock = clock_with(("a", 10.0, 1.0), ("b", 10.5, 1.0))
    clock.remove("a", engine_s=9.5)
    assert (clock.drained_at_s, clock.head_due_s) == (11.0, 11.5)


def shared_clock(*line: tuple[str, float, float]) -> PrefillQueue:
    """Whose line is (key, work of other routers before it, prior) each, all there at 10 s."""
    clock = PrefillQueue()
    for key, shared_s, prior_s in line:
        clock.add(key, arrives_s=10.0, prior_s=prior_s, streamed=True, shared_s=shared_s)
    clock.check()
    return clock


def test_while_the_engine_is_at_the_work_of_other_routers_nothing_of_the_own_is_done() -> None:
    clock = shared_clock(("a", 1.0, 0.5))
    assert (clock.drained_at_s, clock.head_due_s, clock.shared_s) == (11.5, 11.5, 1.0)
    assert [clock.left_s(engine_s=at_s) for at_s in (10.0, 10.75, 11.25, 11.5)] == [0.5, 0.5, 0.25, 0.0]
    assert [clock.own_drained_at_s(engine_s=at_s) for at_s in (10.0, 10.75, 11.25)] == [10.5, 11.25, 11.5]


def test_a_first_token_ends_what_was_before_its_request_alone() -> None:
    clock = shared_clock(("a", 1.0, 0.5), ("b", 0.25, 0.5))
    assert clock.drained_at_s == 12.25
    clock.on_first_token("a", engine_s=11.0, shared_until_s=10.5)
    assert (clock.drained_at_s, clock.head_due_s, clock.shared_s) == (11.75, 11.75, 0.25)
    assert clock.left_s(engine_s=11.125) == 0.5


@pytest.mark.parametrize(
    ("gone", "at_s", "shared_s", "drained_at_s"),
    [
        ("a", 10.25, 1.0, 11.75),  # Three quarters of a second of others are left before the second.
        ("a", 11.25, 0.25, 12.0),  # All of that is done, and half of the first.
        ("b", 10.25, 1.0, 11.5),  # Behind the last request nobody waits.
    ],
)
def test_work_of_other_routers_before_a_request_that_leaves_is_before_the_next_one(
    gone: str, at_s: float, shared_s: float, drained_at_s: float
) -> None:
    clock = shared_clock(("a", 1.0, 0.5), ("b", 0.25, 0.5))
    clock.remove(gone, engine_s=at_s)
    clock.check()
    assert (clock.shared_s, clock.drained_at_s) == (shared_s, drained_at_s)


def test_time_that_the_engine_had_for_other_routers_teaches_no_speed() -> None:
    clock = shared_clock(("a", 1.0, 0.5))
    clock.on_first_token("a", engine_s=11.5, shared_until_s=11.0)
    assert clock.speed.factor == 1.0
    clock.add("b", arrives_s=12.0, prior_s=0.5, streamed=True)
    clock.on_first_token("b", engine_s=13.005, shared_until_s=11.0)
    assert clock.speed.factor > 1.0


moves = st.lists(
    st.tuples(
        st.sampled_from(("dispatched", "dispatched", "first_token", "left")),
        st.integers(0, 12),
        st.floats(0, 3),
        st.booleans(),
    ),
    max_size=60,
)


@given(moves=moves)
def test_the_clock_is_idle_again_when_all_have_ended_in_any_order(
    moves: list[tuple[str, int, float, bool]],
) -> None:
    clock, now, known = PrefillQueue(), 100.0, 0
    keys: list[str] = []
    for move, number, step_s, streamed in moves:
        now += step_s
        if move == "dispatched":
            known += 1
            keys.append(f"k{known}")
            shared_s = step_s / 3 if number > 6 else 0.0
            clock.add(keys[-1], arrives_s=now + 0.05, prior_s=step_s / 2, streamed=streamed, shared_s=shared_s)
        elif move == "first_token":
            clock.on_first_token(f"k{number}", engine_s=now - 0.05)
        else:
            clock.remove(f"k{number}", engine_s=now + 0.05)
        clock.check()
        assert 0.0 <= clock.shared_left_s(engine_s=now) <= clock.shared_s + 1e-9
    for key in keys:
        clock.remove(key, engine_s=now + 0.05)
        clock.check()
    assert len(clock) == 0
    assert (clock.head_due_s, clock.backlog_s) == (inf, 0.0)
    assert clock.drained_at_s <= now + 0.05 + 1e-9
