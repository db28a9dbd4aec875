"""Runs of decode iterations: how long so many take, and which one is under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.lab.sim.engine.request import EngineRequest, Step, run_duration_s


def run(first_s: float, growth_s: float, iterations: int, *, started_s: float = 0.0) -> Step[EngineRequest]:
    ends_s = started_s + run_duration_s(first_s, growth_s, iterations)
    return Step(started_s, ends_s, (), (), iterations, first_s, growth_s)


@pytest.mark.parametrize(
    ("first_s", "growth_s", "iterations", "seconds"),
    [
        (2.0, 0.5, 0, 0.0),
        (2.0, 0.5, 1, 2.0),
        (2.0, 0.5, 2, 4.5),
        (2.0, 0.5, 4, 2.0 + 2.5 + 3.0 + 3.5),
        (2.0, 0.0, 3, 6.0),
    ],
)
def test_each_iteration_is_longer_than_the_one_before_by_the_growth(
    first_s: float, growth_s: float, iterations: int, seconds: float
) -> None:
    assert run_duration_s(first_s, growth_s, iterations) == seconds
    assert run(first_s, growth_s, 9, started_s=100.0).ended_s(iterations) == 100.0 + seconds


@pytest.mark.parametrize(
    ("now", "number"),
    # They end at 102, 104.5, 107.5 and 111.
    [
        (90.0, 1),
        (100.0, 1),
        (102.0, 1),
        (102.1, 2),
        (104.5, 2),
        (104.6, 3),
        (107.5, 3),
        (107.6, 4),
        (111.0, 4),
        (200.0, 4),
    ],
)
def test_the_iteration_under_way_is_the_first_that_ends_now_or_later(now: float, number: int) -> None:
    assert run(2.0, 0.5, 4, started_s=100.0).iteration_at(now) == number


@given(
    first_s=st.floats(1e-3, 0.1),
    growth_s=st.just(0.0) | st.floats(1e-9, 1e-3),
    iterations=st.integers(1, 400),
    share=st.floats(0, 1.2),
)
def test_the_solution_is_the_one_that_counting_finds(
    first_s: float, growth_s: float, iterations: int, share: float
) -> None:
    step = run(first_s, growth_s, iterations, started_s=5.0)
    for now in (5.0 + share * (step.ends_s - 5.0), step.ended_s(max(1, round(share * iterations)))):
        counted = next((n for n in range(1, iterations + 1) if step.ended_s(n) >= now), iterations)
        assert step.iteration_at(now) == counted
