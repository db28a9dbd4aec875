from __future__ import annotations

from math import isnan

import pytest

from gorgo.core.latency.token_gap import MEMORY, SHARE, TokenGap


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
    for number in range(int(3 * MEMORY)):
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
