"""Bounds: what each is where nothing is configured, quotas per client, and memory for bodies."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from gorgo.core.limits import (
    GRACE_S,
    MAX_CLIENTS,
    SLOW_BYTES_PER_S,
    Buffer,
    BufferBudget,
    ClientLimits,
    ClientQuotas,
    ClientRules,
    HedgeLimits,
    OutlierLimits,
    OverloadLimits,
    RouterLimits,
)
from gorgo.core.messages.request import RouteRequest

# --- Every bound where nothing is configured, as the reference states it.


def test_bounds_are_those_of_the_design() -> None:
    assert {name: value for name, value in asdict(RouterLimits()).items() if not isinstance(value, dict)} == {
        "max_attempts": 3,
        "continuations": 2,
        "max_routes": 100_000,
        "route_ttl_s": 3600.0,
        "max_in_flight": 4096,
        "stale_after_s": 90.0,
        "rtt_ewma_alpha": 0.3,
        "max_index_blocks": 4_000_000,
        "block_tokens": 64.0,
        "max_decisions": 1000,
        "max_samples": 10_000,
        "panic_threshold": 0.5,
        "retry_budget_ratio": 0.2,
        "retry_budget_minimum": 20,
        "retry_budget_window_s": 10.0,
        "slow_start_s": 0.0,
        "region_window_s": 30.0,
        "fallbacks": 0,
        "explore": 0.0,
        "sampled_replicas": 128,
    }
    assert OutlierLimits() == OutlierLimits(failures=3, base_s=5.0, max_s=60.0)


def test_queueing_and_hedging_are_off_by_default() -> None:
    assert asdict(OverloadLimits()) == {
        "queue_enabled": False,
        "queue_every_policy": False,
        "queue_max_requests": 1000,
        "max_backlog_s": 0.2,
        "max_concurrency_per_replica": None,
        "slo_ttft_s": None,
        "slo_e2e_s": None,
        "shed_on_objective": False,
        "infeasible_max_wait_s": 0.3,
        "no_replica_wait_s": 0.0,
    }
    assert asdict(HedgeLimits()) == {
        "budget_ratio": 0.0,
        "budget_minimum": 0,
        "window_s": 300.0,
        "delay_s": 0.5,
        "grace_s": 0.1,
    }
    assert not RouterLimits().clients.has_limits
    assert ClientLimits() == ClientLimits(None, None, None)


def test_a_request_may_go_anywhere_without_a_deadline_by_default() -> None:
    request = RouteRequest("r", 0.0, 1, b"", 64.0, 0)
    assert (request.model, request.session_id, request.pinned_replica, request.client, request.regions) == (None,) * 5
    assert (request.slo_ttft_s, request.priority, request.body_bytes) == (None, 0, 0)
    assert request.streamed
    assert request.idempotent


# --- Bounds per client: requests at a time and per second, each client by itself.


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


# --- Who gets memory for a body, and whose upload makes way.


LATER_S = 2 * GRACE_S


def uploads(budget: BufferBudget, client: str, sizes: list[int]) -> list[Buffer]:
    """Uploads since 0.0, each with its reservation."""
    found = []
    for size in sizes:
        buffer = budget.new_buffer(client, now=0.0)
        assert budget.reserve(buffer, size, now=0.0)
        buffer.on_evict = lambda: None
        found.append(buffer)
    return found


def test_one_client_leaves_half_and_two_leave_a_third() -> None:
    budget = BufferBudget(120)
    a, b = budget.new_buffer("a", now=0.0), budget.new_buffer("b", now=0.0)
    assert not budget.reserve(a, 61, now=0.0)
    assert budget.reserve(a, 60, now=0.0)
    assert budget.reserve(b, 30, now=0.0)
    assert not budget.reserve(b, 31, now=0.0)
    budget.close(a)
    assert budget.reserve(b, 60, now=0.0)
    assert budget.used_bytes == 60


def test_slow_upload_of_another_makes_way_after_the_grace() -> None:
    budget = BufferBudget(120)
    (slow,) = uploads(budget, "a", [60])
    other = budget.new_buffer("b", now=0.0)
    assert not budget.reserve(other, 60, now=GRACE_S / 2)
    assert budget.client_bytes("a") == 60
    assert budget.reserve(other, 60, now=GRACE_S)
    assert slow.evicted
    assert budget.used_bytes == 60


def test_slow_uploads_of_the_same_client_make_way_and_no_more_than_needed() -> None:
    budget = BufferBudget(120)
    buffers = uploads(budget, "a", [20, 20, 20])
    for number, buffer in enumerate(buffers):
        buffer.received(1000 * (3 - number), now=GRACE_S)
    late = budget.new_buffer("a", now=LATER_S)
    assert budget.reserve(late, 20, now=LATER_S)
    assert [buffer.evicted for buffer in buffers] == [False, False, True]


def test_spare_reservation_makes_way_at_once_and_before_a_slow_upload() -> None:
    budget = BufferBudget(120)
    (slow,) = uploads(budget, "a", [30])
    (spare,) = uploads(budget, "answers", [20])
    spare.spare = True
    late = budget.new_buffer("b", now=0.0)
    assert budget.reserve(late, 40, now=0.0)
    assert (slow.evicted, spare.evicted) == (False, True)
    (spare,) = uploads(budget, "answers", [5])
    spare.spare = True
    assert budget.reserve(late, 45, now=LATER_S)
    assert (slow.evicted, spare.evicted) == (False, True)


def test_spare_reservation_evicts_none() -> None:
    budget = BufferBudget(120)
    uploads(budget, "a", [60])
    (spare,) = uploads(budget, "answers", [20])
    spare.spare = True
    assert not budget.reserve(spare, 40, now=LATER_S)
    assert budget.used_bytes == 80


def test_burst_that_turns_into_a_drip_is_slow() -> None:
    (buffer,) = uploads(BufferBudget(1000), "a", [1])
    buffer.received(30 * 2**20, now=0.5)
    assert not buffer.is_evictable(GRACE_S)
    buffer.received(1, now=4.0)
    buffer.received(1, now=8.0)
    assert buffer.rate(9.0) < 2
    assert buffer.is_evictable(9.0)


def test_steady_upload_above_the_rate_is_never_slow() -> None:
    (buffer,) = uploads(BufferBudget(1000), "a", [1])
    for tenth in range(1, 200):
        now = tenth / 10
        buffer.received(int(SLOW_BYTES_PER_S * 0.12), now=now)
        assert not buffer.is_evictable(now + 0.05)


def test_uploads_that_would_not_suffice_are_not_evicted() -> None:
    budget = BufferBudget(120)
    (slow,) = uploads(budget, "a", [20])
    complete = budget.new_buffer("b", now=0.0)
    assert budget.reserve(complete, 50, now=0.0)
    assert not budget.reserve(budget.new_buffer("c", now=0.0), 60, now=LATER_S)
    assert not slow.evicted


def test_complete_body_is_not_evicted() -> None:
    budget = BufferBudget(120)
    (buffer,) = uploads(budget, "a", [60])
    buffer.on_evict = None
    assert not budget.reserve(budget.new_buffer("b", now=0.0), 60, now=LATER_S)
    assert not buffer.evicted


def test_sums_are_those_of_the_open_reservations_whatever_happens() -> None:
    chance = random.Random(4)
    budget = BufferBudget(1000)
    buffers: list[Buffer] = []
    for step in range(3000):
        now = step / 10
        kind = chance.random()
        if kind < 0.3:
            buffers.append(budget.new_buffer(chance.choice("abc"), now=now))
        elif buffers:
            buffer = chance.choice(buffers)
            if kind < 0.6:
                buffer.on_evict = (lambda: None) if chance.random() < 0.5 else None
                budget.reserve(buffer, chance.randrange(300), now=now)
            elif kind < 0.7:
                buffer.received(chance.randrange(SLOW_BYTES_PER_S), now=now)
            else:
                budget.close(buffer)
        budget.check()
        assert budget.used_bytes <= budget.limit_bytes
    for buffer in buffers:
        budget.close(buffer)
    assert (budget.used_bytes, len(budget)) == (0, 0)
