from __future__ import annotations

from random import Random

import pytest

from gorgo.core.latency.answer_length import MEMORY, PRIOR_TOKENS, AnswerLength


def test_a_few_long_answers_at_the_start_move_the_mean_little() -> None:
    length = AnswerLength()
    assert length.mean_tokens == PRIOR_TOKENS
    for _ in range(4):
        length.add(256)
    assert length.mean_tokens == pytest.approx(142.0, rel=0.01)


def test_the_mean_of_lengths_that_spread_as_much_as_their_mean_is_known_to_a_tenth() -> None:
    draw, length, found = Random(1), AnswerLength(), []
    for number in range(8 * int(MEMORY)):
        length.add(1 + int(draw.expovariate(1 / 300.0)))
        if number > 4 * MEMORY and number % 64 == 0:
            found.append(length.mean_tokens)
    assert found == pytest.approx([300.0] * len(found), rel=0.15)
    assert sum(found) / len(found) == pytest.approx(300.0, rel=0.1)


def test_lengths_that_change_are_followed() -> None:
    length = AnswerLength()
    for tokens in (500, 100):
        for _ in range(4 * int(MEMORY)):
            length.add(tokens)
        assert length.mean_tokens == pytest.approx(tokens, rel=0.1)
