"""Bounds per client: requests at a time and per second, each client by itself."""

from __future__ import annotations

import pytest

from gorgo.core.limits import MAX_CLIENTS, ClientLimits, ClientQuotas, ClientRules


def book(default: ClientLimits | None = None, **named: ClientLimits) -> ClientQuotas:
    return ClientQuotas(ClientRules(default or ClientLimits(), named))


def test_who_is_not_known_is_not_bounded() -> None:
    bounded = book(ClientLimits(max_in_flight=1))
    assert [bounded.acquire(None, now=0.0) for _ in range(3)] == [None] * 3


def test_one_client_s_excess_is_not_another_s() -> None:
    bounded = book(ClientLimits(max_in_flight=1))
    assert bounded.acquire("a", now=0.0) is None
    assert bounded.acquire("b", now=0.0) is None
    excess = bounded.acquire("a", now=0.0)
    assert excess is not None
    assert excess.code == "client_concurrency"


def test_those_that_are_coming_count_with_those_that_are_open() -> None:
    bounded = book(ClientLimits(max_in_flight=3), free=ClientLimits())
    bounded.acquire("a", now=0.0)
    assert bounded.check("a", coming=1) is None
    excess = bounded.check("a", coming=2)
    assert excess is not None
    assert excess.code == "client_concurrency"
    assert bounded.in_flight("a") == 1  # it only looked
    assert bounded.check("free", coming=10**6) is None


def test_own_rules_go_before_those_of_all() -> None:
    bounded = book(ClientLimits(max_in_flight=1), batch=ClientLimits(max_in_flight=2))
    assert [bounded.acquire("batch", now=0.0) for _ in range(2)] == [None, None]
    assert bounded.acquire("batch", now=0.0) is not None


def test_who_comes_when_told_gets_in() -> None:
    bounded = book(ClientLimits(requests_per_s=2.0, burst=1))
    assert bounded.acquire("a", now=10.0) is None
    excess = bounded.acquire("a", now=10.1)
    assert excess is not None
    assert excess.retry_after_s == pytest.approx(0.4)
    assert bounded.acquire("a", now=10.1 + excess.retry_after_s) is None


def test_ten_seconds_worth_may_come_at_once() -> None:
    bounded = book(ClientLimits(requests_per_s=1.0))
    assert [bounded.acquire("a", now=0.0) is None for _ in range(11)] == [True] * 10 + [False]


def test_requests_are_counted_only_where_there_is_a_bound() -> None:
    free = book()
    assert free.acquire("a", now=0.0) is None
    assert (free.counts("a"), free.in_flight("a")) == (False, 0)
    bounded = book(named=ClientLimits())
    assert bounded.acquire("a", now=0.0) is None
    assert (bounded.counts("a"), bounded.counts(None), bounded.in_flight("a")) == (True, False, 1)


def test_an_end_makes_room_and_one_too_many_makes_no_more() -> None:
    bounded = book(ClientLimits(max_in_flight=1))
    bounded.acquire("a", now=0.0)
    for client in ("a", "a", "never", None):
        bounded.release(client)
    assert [bounded.acquire("a", now=0.0) is None for _ in range(2)] == [True, False]
    assert (bounded.in_flight("a"), bounded.in_flight("never")) == (1, 0)


def test_a_refusal_for_concurrency_takes_no_token_from_the_bucket() -> None:
    bounded = book(ClientLimits(max_in_flight=1, requests_per_s=1.0, burst=2))
    bounded.acquire("a", now=0.0)
    for _ in range(5):
        excess = bounded.acquire("a", now=0.0)
        assert excess is not None
        assert (excess.code, excess.retry_after_s) == ("client_concurrency", 1.0)
    bounded.release("a")
    assert bounded.acquire("a", now=0.0) is None
    bounded.release("a")
    excess = bounded.acquire("a", now=0.0)
    assert excess is not None
    assert (excess.code, excess.retry_after_s) == ("client_rate", 1.0)
    assert "60 requests a minute" in excess.message


def test_a_bucket_fills_by_its_rate_and_no_further_than_it_is_large() -> None:
    bounded = book(ClientLimits(requests_per_s=2.0, burst=3))
    assert [bounded.acquire("a", now=0.0) is None for _ in range(4)] == [True] * 3 + [False]
    assert [bounded.acquire("a", now=1.0) is None for _ in range(3)] == [True] * 2 + [False]
    assert [bounded.acquire("a", now=1000.0) is None for _ in range(4)] == [True] * 3 + [False]


def test_a_clock_that_goes_back_gives_and_takes_nothing() -> None:
    bounded = book(ClientLimits(requests_per_s=1.0, burst=1))
    bounded.acquire("a", now=10.0)
    assert bounded.acquire("a", now=5.0) is not None
    assert bounded.acquire("a", now=10.5) is not None
    assert bounded.acquire("a", now=11.0) is None


@pytest.mark.parametrize(
    ("rate", "burst", "bucket"), [(None, None, 1.0), (0.05, None, 1.0), (2.0, None, 20.0), (2.0, 3.0, 3.0)]
)
def test_a_bucket_is_ten_seconds_worth_unless_it_is_given(
    rate: float | None, burst: float | None, bucket: float
) -> None:
    assert ClientLimits(requests_per_s=rate, burst=burst).bucket == bucket


def test_other_rules_count_for_clients_with_open_requests_too() -> None:
    bounded = book(ClientLimits(max_in_flight=2))
    bounded.acquire("a", now=0.0)
    bounded.set_rules(ClientRules(ClientLimits(max_in_flight=1)))
    assert bounded.acquire("a", now=0.0) is not None
    bounded.set_rules(ClientRules())
    assert bounded.acquire("a", now=0.0) is None
    assert bounded.in_flight("a") == 1, "and who enters without a bound is not counted"


def fill(bounded: ClientQuotas, count: int, *, leave: bool) -> None:
    for number in range(count):
        assert bounded.acquire(f"other-{number}", now=0.0) is None
        if leave:
            bounded.release(f"other-{number}")


@pytest.mark.parametrize(("per_s", "now", "kept"), [(None, 0.0, 2), (1.0, 1.0, 2), (1.0, 0.99, MAX_CLIENTS + 1)])
def test_accounts_without_a_debt_give_way_to_new_ones(per_s: float | None, now: float, kept: int) -> None:
    """Who has ended and could send as many as ever is as one never seen; who is open, or has spent, is not."""
    bounded = book(ClientLimits(max_in_flight=1, requests_per_s=per_s, burst=2))
    bounded.acquire("open", now=0.0)
    fill(bounded, MAX_CLIENTS - 1, leave=True)
    assert bounded.acquire("new", now=now) is None
    assert bounded.acquire("open", now=now) is not None
    assert len(bounded._quotas) == kept


def test_memory_is_bounded_and_debts_are_kept() -> None:
    bounded = book(ClientLimits(requests_per_s=0.001, burst=1))
    assert bounded.acquire("debtor", now=0.0) is None
    for number in range(MAX_CLIENTS + 10):
        bounded.acquire(str(number), now=0.0)
    assert bounded.acquire("debtor", now=1.0) is not None


# -- tokens per second


def tokens(per_s: float = 10.0, **more: float) -> ClientQuotas:
    return book(ClientLimits(tokens_per_s=per_s, **more))  # type: ignore[arg-type]


def test_prompt_is_charged_on_arrival_and_the_answer_at_its_end() -> None:
    """100 tokens at once, ten more a second."""
    quotas = tokens()
    assert quotas.acquire("a", now=0.0, tokens=60) is None
    quotas.release("a", tokens=60, used=80)
    assert quotas.acquire("a", now=0.0, tokens=50) is None
    exceeded = quotas.acquire("a", now=0.0, tokens=1)
    assert exceeded is not None
    assert (exceeded.code, exceeded.retry_after_s) == ("client_tokens", 3.0)
    assert exceeded.message == "this key may use 600 tokens a minute, prompts and answers together"
    assert quotas.acquire("b", now=0.0, tokens=1) is None


def test_a_client_that_comes_at_its_retry_after_is_admitted() -> None:
    quotas = tokens(0.7)
    now = 1_700_000_000.3
    quotas.acquire("a", now=now, tokens=1000)
    exceeded = quotas.acquire("a", now=now, tokens=1)
    assert exceeded is not None
    assert quotas.acquire("a", now=now + exceeded.retry_after_s - 0.1, tokens=1) is not None
    assert quotas.acquire("a", now=now + exceeded.retry_after_s, tokens=1) is None


def test_request_that_used_nothing_costs_nothing() -> None:
    quotas = tokens()
    quotas.acquire("a", now=0.0, tokens=500)
    quotas.release("a", tokens=500)
    assert quotas.acquire("a", now=0.0, tokens=100) is None
    assert quotas.acquire("a", now=0.0, tokens=1) is None
    assert quotas.acquire("a", now=0.0, tokens=1) is not None


def test_allowance_is_never_more_than_ten_seconds_worth() -> None:
    quotas = tokens()
    quotas.acquire("a", now=0.0, tokens=10)
    quotas.release("a", tokens=10, used=0)
    quotas.acquire("a", now=1000.0, tokens=101)
    exceeded = quotas.acquire("a", now=1000.0)
    assert exceeded is not None
    assert exceeded.retry_after_s == pytest.approx(0.1)


def test_request_over_its_tokens_is_not_counted_against_the_other_rate() -> None:
    quotas = tokens(1.0, requests_per_s=0.1, burst=2)
    quotas.acquire("a", now=0.0, tokens=20)
    for _ in range(3):
        exceeded = quotas.acquire("a", now=0.0)
        assert exceeded is not None
        assert exceeded.code == "client_tokens"
    assert quotas.acquire("a", now=10.0) is None


def test_client_that_owes_tokens_is_not_forgotten() -> None:
    quotas = tokens()
    quotas.acquire("owes", now=0.0, tokens=10_000)
    quotas.release("owes", tokens=10_000, used=10_000)
    for number in range(MAX_CLIENTS):
        quotas.acquire(f"c{number}", now=100.0)
        quotas.release(f"c{number}")
    assert quotas.acquire("owes", now=100.0) is not None


def test_long_run_holds_the_rate_whatever_the_answers_are() -> None:
    quotas, used, now = tokens(), 0, 0.0
    while now < 1000.0:
        if quotas.acquire("a", now=now, tokens=70) is None:
            quotas.release("a", tokens=70, used=190)
            used += 190
        now += 0.5
    assert 10_000 - 190 <= used <= 10_000 + 100 + 190


def test_a_false_count_of_an_engine_costs_a_client_a_minute_and_no_century() -> None:
    quotas = tokens()
    for _ in range(2):
        assert quotas.acquire("a", now=0.0, tokens=10) is None
    quotas.release("a", tokens=10, used=10**15)
    quotas.release("a", tokens=10, used=10**15)
    exceeded = quotas.acquire("a", now=0.0)
    assert exceeded is not None
    assert exceeded.retry_after_s == pytest.approx(60.0)
    assert quotas.acquire("a", now=60.1) is None


def test_a_prompt_of_many_minutes_is_charged_in_full_whatever_an_engine_reports() -> None:
    quotas = tokens()
    quotas.acquire("a", now=0.0, tokens=100_100)
    quotas.release("a", tokens=100_100, used=100_100)
    exceeded = quotas.acquire("a", now=0.0)
    assert exceeded is not None
    assert exceeded.retry_after_s == pytest.approx(10_000.0)
