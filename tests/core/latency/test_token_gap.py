from __future__ import annotations

from math import isnan

import pytest

from gorgo.core.latency.token_gap import MEMORY, TokenGap


def test_a_gap_is_unknown_before_the_first_answer() -> None:
    assert isnan(TokenGap().value_s)


def test_a_long_answer_weighs_more_than_a_short_one() -> None:
    gap = TokenGap()
    gap.on_answer(10.0, tokens=1001)
    gap.on_answer(0.1, tokens=2)
    assert gap.value_s == pytest.approx(0.01, rel=0.02)


def test_a_gap_follows_the_load_within_some_answers() -> None:
    gap = TokenGap()
    for _ in range(100):
        gap.on_answer(1.0, tokens=101)
    for _ in range(int(3 * MEMORY)):
        gap.on_answer(3.0, tokens=101)
    assert 0.028 < gap.value_s < 0.03
