""""""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf, isnan
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.latency.decode import (
    FIRST_SHARE,
    FIRST_STREAMS,
    FULL_TRUST,
    LEAST,
    MOST,
    PRIOR,
    PRIOR_WEIGHT,
    SHARE,
    WINDOW,
    Checkpoint,
    ConcurrencyLimit,
    DecodeSlope,
    DecodeTimes,
    TokenGap,
    relative_to_others,
)
from gorgo.core.latency.decode import GAP_MEMORY as MEMORY_TOKEN_GAP
from gorgo.core.latency.decode import SLOPE_MEMORY as MEMORY_DECODE_SLOPE
from gorgo.core.messages.request import Outcome
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, FAILED, dispatched, submitted
from tests.core.test_deadline import asked, held, holding

GOAL_S = 10.0
#: How long a request stays, by its number, among so many.
Engine = Callable[[int, int], float]


def mixture(alone_s: float, each_s: float) -> Engine:
    """One answer in eight takes twice as long to decode as the others."""
    return lambda number, batch: alone_s * (2.0 if number % 8 == 0 else 1.0) + each_s * batch


class Crowd:
    """A replica before which somebody always waits, up to `offered` at a time."""

    def __init__(
        self, bound: ConcurrencyLimit, *, prefill_s: float, tokens: Callable[[int], int] | None = None
    ) -> None:
        self.bound = bound
        self.prefill_s = prefill_s
        #: Of an answer, by its number; unknown by default.
        self.tokens = tokens
        self.now = 0.0
        self.number = 0
        self.there: list[tuple[float, int, float, Checkpoint]] = []

    def serve(self, ends: int, engine: Engine, *, offered: int = 64, most: float | None = None) -> float:
        """Answers in time per second over the last half of `ends`; `most` is a fixed bound in place of the learned."""
        in_time, since_s = 0, self.now
        for end in range(ends):
            if end == ends // 2:
                in_time, since_s = 0, self.now
            while len(self.there) < min(offered, self.bound.limit(GOAL_S) if most is None else most):
                self._send(engine)
            in_time += self._end(learn=most is None) <= GOAL_S
        return in_time / (self.now - since_s)

    def _send(self, engine: Engine) -> None:
        mark = self.bound.on_dispatched(prefill_s=self.prefill_s, now=self.now)
        self.number += 1
        ends_s = self.now + engine(self.number, len(self.there) + 1)
        heappush(self.there, (ends_s, self.number, self.now, mark))

    def _end(self, *, learn: bool) -> float:
        self.now, number, sent_s, mark = heappop(self.there)
        if learn:
            self.bound.on_left(now=self.now)
            tokens = None if self.tokens is None else self.tokens(number)
            self.bound.on_completed(mark, stayed_s=self.now - sent_s, waited_s=0.0, goal_s=GOAL_S, tokens=tokens)
        return self.now - sent_s


def test_a_replica_that_is_fast_enough_is_not_held_back() -> None:
    crowd = Crowd(ConcurrencyLimit(), prefill_s=0.001)
    crowd.serve(300, mixture(1.0, 0.01))
    assert crowd.bound.limit(GOAL_S) > 64


def test_nothing_was_sent_and_nothing_is_known() -> None:
    assert ConcurrencyLimit().limit(GOAL_S) == inf


@pytest.mark.parametrize("prefill_s", [0.1, 0.4])
def test_before_anything_has_ended_prefills_may_take_their_share_of_the_goal(prefill_s: float) -> None:
    bound = ConcurrencyLimit()
    for _ in range(10):
        bound.on_dispatched(prefill_s=prefill_s, now=0.0)
    assert bound.limit(GOAL_S) * prefill_s == pytest.approx(FIRST_SHARE * GOAL_S)


@pytest.mark.parametrize(("alone_s", "each_s"), [(1.0, 0.1), (1.0, 0.4), (2.5, 0.2), (0.2, 0.8)])
@pytest.mark.parametrize("stalled", [0.2, 0.8])
def test_as_many_end_in_time_as_with_the_best_fixed_bound(alone_s: float, each_s: float, stalled: float) -> None:
    engine, prefill_s = mixture(alone_s, each_s), each_s * stalled
    fixed = [Crowd(ConcurrencyLimit(), prefill_s=prefill_s).serve(300, engine, most=most) for most in range(2, 65, 4)]
    assert Crowd(ConcurrencyLimit(), prefill_s=prefill_s).serve(600, engine) > 0.8 * max(fixed)


def test_a_dense_model_is_known_before_it_has_many_at_a_time() -> None:
    """Two hundred together take twice the time of one, where 16 would by the usual growth."""

    def answer(number: int) -> int:
        return (300, 400, 500, 700)[number % 4]

    def dense(number: int, batch: int) -> float:
        return answer(number) * 0.0065 * (1.0 + batch / 200)

    def bound_after_quiet_times(tokens: Callable[[int], int] | None) -> float:
        crowd = Crowd(ConcurrencyLimit(), prefill_s=0.005, tokens=tokens)
        for _ in range(5):
            crowd.serve(60, dense, offered=5)
            crowd.serve(60, dense, offered=25)
        return crowd.bound.limit(GOAL_S)

    def in_time_per_s(most: float) -> float:
        return Crowd(ConcurrencyLimit(), prefill_s=0.005).serve(2000, dense, offered=256, most=most)

    told, untold = bound_after_quiet_times(answer), bound_after_quiet_times(None)
    assert in_time_per_s(told) > 0.9 * max(in_time_per_s(most) for most in range(20, 257, 20))
    assert told > 1.5 * untold, "who is not told of tokens takes it for a mixture of experts"


def test_the_next_place_comes_when_one_of_those_there_leaves() -> None:
    bound = ConcurrencyLimit()
    assert bound.slot_wait_s == 0.0
    for start_s in (0.0, 3600.0):  # an hour of nothing in between is nobody's stay
        for n in range(80):  # one comes each second and stays for eight
            if n >= 8:
                bound.on_left(now=start_s + n)
            bound.on_dispatched(prefill_s=0.1, now=start_s + n)
        assert bound.slot_wait_s == pytest.approx(1.0, rel=0.1)
        for n in range(80, 88):
            bound.on_left(now=start_s + n)
    assert bound.slot_wait_s == 0.0


def test_a_bound_comes_up_again_when_the_engine_is_faster() -> None:
    crowd = Crowd(ConcurrencyLimit(), prefill_s=0.1)
    crowd.serve(300, mixture(1.0, 0.4))
    low = crowd.bound.limit(GOAL_S)
    crowd.serve(600, mixture(1.0, 0.1))
    assert crowd.bound.limit(GOAL_S) > 2 * low


def test_quiet_times_do_not_close_a_replica() -> None:
    crowd = Crowd(ConcurrencyLimit(), prefill_s=0.05)
    crowd.serve(100, mixture(1.0, 0.2), offered=2)
    assert crowd.bound.limit(GOAL_S) > 16


def test_an_answer_that_took_no_time_says_nothing() -> None:
    bound = ConcurrencyLimit()
    for _ in range(100):
        mark = bound.on_dispatched(prefill_s=0.1, now=0.0)
        bound.on_left(now=0.0)
        bound.on_completed(mark, stayed_s=0.0, waited_s=0.0, goal_s=GOAL_S)
    assert bound.limit(GOAL_S) == pytest.approx(FIRST_SHARE * GOAL_S / 0.1)


def test_time_spent_waiting_here_is_missing_there() -> None:
    def learned(waited_s: float) -> float:
        bound = ConcurrencyLimit()
        for _ in range(100):
            mark = bound.on_dispatched(prefill_s=0.1, now=0.0)
            bound.on_left(now=0.0)
            bound.on_completed(mark, stayed_s=2.0, waited_s=waited_s, goal_s=GOAL_S)
        return bound.limit(GOAL_S)

    assert learned(4.0) < learned(0.0)


def test_where_nobody_could_be_in_time_nobody_is_held_back() -> None:
    crowd = Crowd(ConcurrencyLimit(), prefill_s=0.1)
    crowd.serve(100, mixture(60.0, 0.5))
    assert crowd.bound.limit(GOAL_S) == inf


def test_a_learned_bound_is_as_computed_by_hand() -> None:
    """One at a time: two seconds, half a second of which is its own prefill, with a usual growth of 1 / 16.

    Alone the other 1.5 s would be 1.5 / (1 + 1 / 16) = 24 / 17 s. Among n: 24 / 17 + (24 / 17 / 16 + 0.5) n, within a
    goal of 10 s for n up to 14.6. Of the numbers an eighth apart from 2 on, that is 2 x 1.125 ** 16 = 13.17.
    """
    bound = ConcurrencyLimit()
    for number in range(FULL_TRUST):
        mark = bound.on_dispatched(prefill_s=0.5, now=10.0 * number)
        bound.on_left(now=10.0 * number + 2.0)
        bound.on_completed(mark, stayed_s=2.0, waited_s=0.0, goal_s=GOAL_S)
    assert bound.limit(GOAL_S) == pytest.approx(2.0 * 1.125**16)


@pytest.mark.parametrize(("ends", "known"), [(3, 0.0), (4, 4 / 32), (16, 0.5), (32, 1.0), (64, 1.0)])
def test_the_first_bound_counts_for_less_with_each_end(ends: int, known: float) -> None:
    """8 at first, for prefills of half a second in a goal of 10 s; what is learned is 2 x 1.125 ** 16."""
    bound = ConcurrencyLimit()
    for number in range(ends):
        mark = bound.on_dispatched(prefill_s=0.5, now=10.0 * number)
        bound.on_left(now=10.0 * number + 2.0)
        bound.on_completed(mark, stayed_s=2.0, waited_s=0.0, goal_s=GOAL_S)
    assert bound.limit(GOAL_S) == pytest.approx(known * 2.0 * 1.125**16 + (1.0 - known) * 8.0)


def test_two_requests_are_dispatched_however_long_prefills_are() -> None:
    bound = ConcurrencyLimit()
    bound.on_dispatched(prefill_s=100.0, now=0.0)
    assert bound.limit(GOAL_S) == 2.0


def test_the_usual_prefill_is_the_mean_of_the_first_and_then_fades() -> None:
    """The mean of two is 0.3 s; after many of 0.1 s one of 1.7 s weighs a sixteenth."""
    bound = ConcurrencyLimit()
    for prefill_s in (0.2, 0.4):
        bound.on_dispatched(prefill_s=prefill_s, now=0.0)
    assert bound.limit(GOAL_S) == pytest.approx(4.0 / 0.3)
    for _ in range(500):
        bound.on_dispatched(prefill_s=0.1, now=0.0)
    bound.on_dispatched(prefill_s=1.7, now=0.0)
    assert bound.limit(GOAL_S) == pytest.approx(4.0 / 0.2, rel=1e-6)


def test_the_oldest_of_more_answers_than_are_remembered_are_forgotten() -> None:
    """64 of a slow engine, then 64 of one on which nothing takes long."""
    bound = ConcurrencyLimit()
    for number in range(2 * WINDOW):
        stay_s = 9.0 if number < WINDOW else 0.5
        mark = bound.on_dispatched(prefill_s=0.4, now=20.0 * number)
        bound.on_left(now=20.0 * number + stay_s)
        bound.on_completed(mark, stayed_s=stay_s, waited_s=0.0, goal_s=GOAL_S)
        if number == WINDOW - 1:
            slow = bound.limit(GOAL_S)
    quick = ConcurrencyLimit()
    for number in range(WINDOW):
        mark = quick.on_dispatched(prefill_s=0.4, now=20.0 * number)
        quick.on_left(now=20.0 * number + 0.5)
        quick.on_completed(mark, stayed_s=0.5, waited_s=0.0, goal_s=GOAL_S)
    assert bound.limit(GOAL_S) == quick.limit(GOAL_S) > slow


def fifth_waits(router: Router, *, now: float) -> bool:
    return any(held(submitted(router, asked(f"one-of-five-{n}", now=now), now=now)) for n in range(5))


def after_answers(outcome: Outcome, **limits: Any) -> Router:
    """One replica on which prefills take a second, after two seconds each for enough requests."""
    router = holding("a", max_concurrency_per_replica=9, max_backlog_s=1e9, **limits)
    for n in range(FULL_TRUST):
        attempt = dispatched(submitted(router, asked(f"r-{n}", now=100.0 * n), now=100.0 * n)).attempt_id
        router.on_finish(attempt, outcome, now=100.0 * n + 2.0)
    return router


NOW = 100.0 * FULL_TRUST


def test_with_a_goal_for_answers_a_replica_is_sent_no_more_than_can_end_in_time() -> None:
    assert fifth_waits(holding("a", max_concurrency_per_replica=9, max_backlog_s=1e9, slo_e2e_s=GOAL_S), now=NOW)
    assert not fifth_waits(holding("a", max_concurrency_per_replica=9, max_backlog_s=1e9), now=NOW)


def test_whole_answers_say_how_long_they_take_and_failures_do_not() -> None:
    assert not fifth_waits(after_answers(COMPLETED, slo_e2e_s=GOAL_S), now=NOW)
    assert fifth_waits(after_answers(FAILED, slo_e2e_s=GOAL_S), now=NOW)


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
    fade = (1.0 - 1.0 / MEMORY_DECODE_SLOPE) ** np.arange(count)[::-1]
    weight = fade * tokens
    mean_beside, mean_s = np.average(beside, weights=weight), (fade * spent_s).sum() / weight.sum()
    usual_s = mean_s * PRIOR / (1.0 + PRIOR * mean_beside)
    trust = PRIOR_WEIGHT * weight.sum() / fade.sum() * max(1.0, mean_beside)
    covered = (weight * (spent_s / tokens - mean_s) * (beside - mean_beside)).sum()
    each_s = (covered + trust * usual_s) / ((weight * (beside - mean_beside) ** 2).sum() + trust)
    assert each_s / (mean_s - each_s * mean_beside) > LEAST
    assert growth.value == pytest.approx(min(MOST, each_s / (mean_s - each_s * mean_beside)))


def test_the_bounds_are_those_of_the_design() -> None:
    assert (PRIOR, LEAST, MOST, PRIOR_WEIGHT, MEMORY_DECODE_SLOPE) == (1 / 16, 1 / 1024, 1 / 16, 32.0, 512.0)


def test_a_growth_that_changes_is_followed() -> None:
    growth, beside = DecodeSlope(), np.random.default_rng(0).uniform(1, 60, 4000)
    for number, so_many in enumerate(beside):
        each = 1 / 16 if number < 1000 else 1 / 100
        growth.learn(2.0 * (1.0 + each * so_many), tokens=200, beside=so_many)
    assert growth.value == pytest.approx(1 / 100, rel=0.25)


def answer(gap: TokenGap, spent_s: float, tokens: int, *, at: float) -> None:
    mark = gap.begin(now=at)
    gap.end(now=at + spent_s)
    gap.on_answer(spent_s, tokens=tokens, mark=mark)


def test_a_gap_is_unknown_before_the_first_answer() -> None:
    assert isnan(TokenGap().alone_s)


def test_a_long_answer_weighs_more_than_a_short_one() -> None:
    gap = TokenGap()
    answer(gap, 10.0 * (1.0 + SHARE), 1001, at=0.0)
    answer(gap, 0.1 * (1.0 + SHARE), 2, at=100.0)
    assert gap.alone_s == pytest.approx(0.01, rel=0.02)


def test_a_gap_follows_the_engine_within_some_answers() -> None:
    gap = TokenGap()
    for number in range(100):
        answer(gap, 1.0, 101, at=10.0 * number)
    before_s = gap.alone_s
    for number in range(int(3 * MEMORY_TOKEN_GAP)):
        answer(gap, 3.0, 101, at=1e4 + 10.0 * number)
    assert 2.8 * before_s < gap.alone_s < 3.0 * before_s


def test_answers_beside_others_teach_the_time_of_one_alone() -> None:
    """Four decode together, each step then 1 + 4 SHARE times as long."""
    gap = TokenGap()
    marks = [gap.begin(now=0.0) for _ in range(4)]
    spent_s = 100 * 0.01 * (1.0 + 4 * SHARE)
    gap.end(now=spent_s)
    gap.on_answer(spent_s, tokens=101, mark=marks[0])
    assert gap.alone_s == pytest.approx(0.01)
    assert gap.decoding == 3


def test_an_answer_that_takes_no_time_is_no_division_by_zero() -> None:
    gap = TokenGap()
    answer(gap, 0.0, 3, at=1.0)
    assert gap.alone_s == 0.0


@pytest.mark.parametrize(
    ("values", "factors"),
    [
        ([], []),
        ([0.01], [None]),
        ([0.01, 0.1], [0.1, 10.0]),
        ([0.01, 0.01, 0.1], [0.01 / 0.055, 0.01 / 0.055, 10.0]),
        ([4.0, 1.0, 2.0, 3.0], [2.0, 1.0 / 3.0, 2.0 / 3.0, 1.5]),
    ],
)
def test_a_replica_is_compared_with_the_median_of_the_others(values: list[float], factors: list[float | None]) -> None:
    assert relative_to_others(values) == [None if factor is None else pytest.approx(factor) for factor in factors]


@given(st.lists(st.floats(0.001, 10.0), min_size=2, max_size=9))
def test_the_median_of_the_others_is_that_of_a_list_without_the_one(values: list[float]) -> None:
    expected = [value / median(values[:row] + values[row + 1 :]) for row, value in enumerate(values)]
    assert relative_to_others(values) == pytest.approx(expected)


def test_times_between_tokens_are_unknown_before_some_streams_and_follow_a_change() -> None:
    times = DecodeTimes()
    for number in range(FIRST_STREAMS):
        assert (times.tpot_s, times.itl_s_p95) == (None, None), number
        times.on_stream(1.0, tokens=101, itl_s_p95=0.03)
    times.on_stream(1.0, tokens=1, itl_s_p95=None)
    assert times.tpot_s == pytest.approx(0.01)
    assert times.itl_s_p95 == pytest.approx(0.03)
    for _ in range(30):
        times.on_stream(10.0, tokens=101, itl_s_p95=0.3)
    assert times.tpot_s == pytest.approx(0.1, rel=0.05)
    assert times.itl_s_p95 == pytest.approx(0.3, rel=0.05)
