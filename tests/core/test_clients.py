"""Bounds per client: requests at a time and per second, each client by itself."""

from __future__ import annotations

import pytest

from gorgo.core.clients import MAX_ACCOUNTS, ClientBook, ClientLimits, ClientRules


def book(default: ClientLimits | None = None, **named: ClientLimits) -> ClientBook:
    return ClientBook(ClientRules(default or ClientLimits(), named))


def test_who_is_not_known_is_not_bounded() -> None:
    bounded = book(ClientLimits(max_in_flight=1))
    assert [bounded.enter(None, now=0.0) for _ in range(3)] == [None] * 3


def test_one_client_s_excess_is_not_another_s() -> None:
    bounded = book(ClientLimits(max_in_flight=1))
    assert bounded.enter("a", now=0.0) is None
    assert bounded.enter("b", now=0.0) is None
    excess = bounded.enter("a", now=0.0)
    assert excess is not None
    assert excess.code == "client_concurrency"


def test_those_that_are_coming_count_with_those_that_are_open() -> None:
    bounded = book(ClientLimits(max_in_flight=3), free=ClientLimits())
    bounded.enter("a", now=0.0)
    assert bounded.crowded("a", coming=1) is None
    excess = bounded.crowded("a", coming=2)
    assert excess is not None
    assert excess.code == "client_concurrency"
    assert bounded.open_of("a") == 1  # it only looked
    assert bounded.crowded("free", coming=10**6) is None


def test_own_rules_go_before_those_of_all() -> None:
    bounded = book(ClientLimits(max_in_flight=1), batch=ClientLimits(max_in_flight=2))
    assert [bounded.enter("batch", now=0.0) for _ in range(2)] == [None, None]
    assert bounded.enter("batch", now=0.0) is not None


def test_who_comes_when_told_gets_in() -> None:
    bounded = book(ClientLimits(requests_per_s=2.0, burst=1))
    assert bounded.enter("a", now=10.0) is None
    excess = bounded.enter("a", now=10.1)
    assert excess is not None
    assert excess.retry_after_s == pytest.approx(0.4)
    assert bounded.enter("a", now=10.1 + excess.retry_after_s) is None


def test_ten_seconds_worth_may_come_at_once() -> None:
    bounded = book(ClientLimits(requests_per_s=1.0))
    assert [bounded.enter("a", now=0.0) is None for _ in range(11)] == [True] * 10 + [False]


def test_memory_is_bounded_and_debts_are_kept() -> None:
    bounded = book(ClientLimits(requests_per_s=0.001, burst=1))
    assert bounded.enter("debtor", now=0.0) is None
    for number in range(MAX_ACCOUNTS + 10):
        bounded.enter(str(number), now=0.0)
    assert bounded.enter("debtor", now=1.0) is not None
