"""Gaps between tokens count the steps of a prompt beside a decode."""

from __future__ import annotations

import random
from math import ceil

import pytest

from gorgo.lab.calibrate.measure import Stalls, stalls, step_budget
from gorgo.lab.calibrate.measured_engine import Answer

DECODE_S, TOKENS_PER_S = 0.005, 7000.0


def pair(prompt_tokens: int, budget: int, *, seed: int, lead: int) -> tuple[Answer, Answer]:
    """Return a decode and a prompt that comes `lead` steps later, with times that vary by a tenth."""
    draw, now_s = random.Random(seed), 0.0
    times_s: list[float] = []
    left, first_s = prompt_tokens, 0.0
    for step in range(64):
        chunk = min(left, budget - 1) if step >= lead else 0
        now_s += (DECODE_S + chunk / TOKENS_PER_S) * draw.uniform(0.9, 1.1)
        left -= chunk
        times_s.append(now_s)
        if not left and not first_s:
            first_s = now_s
    return Answer(30, 0, tuple(times_s)), Answer(prompt_tokens, 0, (first_s, first_s + DECODE_S))


@pytest.mark.parametrize("budget", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("lead", [0, 1, 3])
def test_budget_is_found_whatever_comes_first(budget: int, lead: int) -> None:
    found = [stalls(*pair(tokens, budget, seed=seed, lead=lead)) for tokens in (4750, 3000) for seed in range(3)]
    assert step_budget([one for one in found if one]) == budget


def test_steps_of_a_prompt_are_its_chunks() -> None:
    found = stalls(*pair(4750, 1024, seed=1, lead=1))
    assert found == Stalls(4750, ceil(4750 / 1023))


def test_gaps_that_do_not_stand_out_tell_nothing() -> None:
    decoding = Answer(30, 0, tuple(0.01 * step for step in range(1, 40)))
    assert stalls(decoding, Answer(4000, 0, (0.2,))) is None


def test_a_decode_that_ends_first_or_fails_tells_nothing() -> None:
    decoding, prompt = pair(4750, 512, seed=1, lead=0)
    assert stalls(Answer(30, 0, decoding.tokens_s[:5]), prompt) is None
    assert stalls(Answer(30, 0, decoding.tokens_s, "timeout"), prompt) is None
    assert stalls(decoding, Answer(None, None, (), "http 503")) is None


def test_without_any_there_is_no_budget() -> None:
    assert step_budget([]) is None
