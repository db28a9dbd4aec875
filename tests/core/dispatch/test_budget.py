"""A share over a sliding window: never more than that, and a minimum in any case."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.dispatch.budget import RatioBudget


def test_a_spent_retry_comes_back_as_soon_as_the_window_has_passed() -> None:
    budget = RatioBudget(share=0.1, minimum=1, window_s=10.0)
    assert budget.try_spend(now=0.0)
    assert not budget.try_spend(now=9.99)
    assert budget.try_spend(now=10.0)


def test_requests_count_for_one_window_and_no_longer() -> None:
    budget = RatioBudget(share=0.5, minimum=0, window_s=10.0)
    budget.record(now=0.0)
    assert not budget.available(now=0.0), "half of one request is none"
    budget.record(now=5.0)
    assert budget.available(now=9.99)
    assert not budget.available(now=10.0)
    assert not budget.try_spend(now=10.0)


def test_a_clock_that_goes_back_a_little_changes_no_account() -> None:
    budget = RatioBudget(share=0.1, minimum=1, window_s=10.0)
    assert budget.try_spend(now=100.0)
    assert not budget.try_spend(now=80.0)
    assert budget.try_spend(now=110.0)


def test_a_minimum_of_zero_allows_nothing_without_requests() -> None:
    assert not RatioBudget(share=1.0, minimum=0, window_s=10.0).try_spend(now=0.0)


@given(steps=st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=200), share=st.floats(0, 1))
def test_share_is_kept_in_every_window(steps: list[tuple[float, bool]], share: float) -> None:
    budget, now = RatioBudget(share=share, minimum=2, window_s=10.0), 0.0
    asked: list[float] = []
    spent: list[float] = []
    for step_s, ask in steps:
        now += step_s
        if ask:
            budget.record(now=now)
            asked.append(now)
        elif budget.try_spend(now=now):
            spent.append(now)
            within = sum(at > now - 9.0 for at in spent)
            assert within <= max(2, share * sum(at > now - 11.0 for at in asked))
