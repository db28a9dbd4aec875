"""The wait doubles, is bounded, and is never less than half of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.backoff import backoff_s

FIRSTS = st.floats(0.01, 10.0)


@given(st.integers(1, 10_000), FIRSTS, st.floats(1.0, 1e6))
def test_the_wait_equals_repeated_doubling_to_the_last_digit(failures: int, first_s: float, factor: float) -> None:
    longest_s, wait_s = first_s * factor, first_s
    for _ in range(failures - 1):
        wait_s = min(2.0 * wait_s, longest_s)
    assert backoff_s(failures, first_s=first_s, longest_s=longest_s) == wait_s


@given(st.integers(1, 100), FIRSTS, st.floats(0.0, 1.0, exclude_max=True))
def test_chance_draws_from_the_upper_half_of_the_wait(failures: int, first_s: float, chance: float) -> None:
    whole_s = backoff_s(failures, first_s=first_s, longest_s=60.0)
    assert whole_s / 2.0 <= backoff_s(failures, first_s=first_s, longest_s=60.0, chance=chance) <= whole_s


def test_a_first_wait_above_the_bound_is_cut() -> None:
    assert backoff_s(1, first_s=5.0, longest_s=2.0) == 2.0
