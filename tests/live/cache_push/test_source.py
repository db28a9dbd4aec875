"""The order, rate and silence of one engine's pushes."""

from __future__ import annotations

import pytest

from gorgo.live.cache_push.source import (
    BURST_HASHES,
    HASHES_PER_S,
    LEAST_HASHES,
    MAX_HASHES,
    SILENT_S,
    Order,
    PushSource,
)


def test_pushes_in_order_are_next() -> None:
    source = PushSource()
    assert source.order(7, 0, now=0.0) is Order.NEW_RUN
    assert [source.order(7, place, now=0.0) for place in (1, 2)] == [Order.NEXT, Order.NEXT]
    assert source.stats.lost == 0


def test_overtaken_push_is_stale_also_when_it_is_repeated() -> None:
    source = PushSource()
    source.order(7, 5, now=0.0)
    assert [source.order(7, place, now=0.0) for place in (5, 4)] == [Order.STALE, Order.STALE]
    assert (source.sequence, source.stats.stale) == (5, 2)


def test_late_push_of_an_earlier_run_is_stale_and_leaves_the_run() -> None:
    source = PushSource()
    source.order(8, 0, now=0.0)
    assert source.order(7, 100, now=1.0) is Order.STALE
    assert (source.epoch, source.sequence) == (8, 0)


def test_skipped_places_are_lost_pushes_that_need_a_snapshot() -> None:
    source = PushSource()
    source.order(7, 0, now=0.0)
    source.snapshot_applied(now=0.0)
    assert not source.needs_snapshot
    assert source.order(7, 4, now=0.1) is Order.NEXT
    assert (source.stats.lost, source.needs_snapshot) == (3, True)


def test_new_run_needs_a_snapshot() -> None:
    source = PushSource()
    source.order(7, 0, now=0.0)
    source.snapshot_applied(now=0.0)
    assert source.order(8, 0, now=1.0) is Order.NEW_RUN
    assert source.needs_snapshot


def test_source_without_a_snapshot_for_long_is_silent_once() -> None:
    source = PushSource()
    assert not source.expire(now=1000.0), "it never pushed"
    source.order(7, 0, now=0.0)
    source.snapshot_applied(now=1.0)
    source.order(7, 1, now=10.0)  # evictions alone do not show that the rest is right
    assert not source.expire(now=1.0 + SILENT_S - 0.1)
    assert source.expire(now=1.0 + SILENT_S)
    assert not source.expire(now=100.0)
    assert source.stats.silences == 1


def test_run_that_never_synced_is_silent_too() -> None:
    source = PushSource()
    source.order(7, 0, now=5.0)
    assert not source.expire(now=5.0 + SILENT_S - 0.1)
    assert source.expire(now=5.0 + SILENT_S)


def test_engine_whose_clock_went_back_is_accepted_after_the_silence() -> None:
    source = PushSource()
    source.order(9, 3, now=0.0)
    assert source.order(5, 0, now=SILENT_S - 1) is Order.STALE
    source.expire(now=SILENT_S)
    assert source.order(5, 1, now=SILENT_S) is Order.NEW_RUN


def test_largest_snapshot_each_five_seconds_and_evictions_are_within_the_rate() -> None:
    source = PushSource()
    for tenth in range(600):
        now = tenth / 10
        assert source.charge(MAX_HASHES if tenth % 50 == 0 else 100, now=now) == 0.0, now
    assert source.stats.limited == 0


def test_push_beyond_the_rate_has_to_wait_and_costs_nothing() -> None:
    source = PushSource()
    assert [source.charge(MAX_HASHES, now=0.0) for _ in range(2)] == [0.0, 0.0]
    wait_s = source.charge(MAX_HASHES, now=0.0)
    assert wait_s == pytest.approx(MAX_HASHES / HASHES_PER_S)
    assert source.stats.limited == 1
    assert source.charge(MAX_HASHES, now=wait_s) == 0.0


def test_empty_pushes_are_bounded_too() -> None:
    source = PushSource()
    sent = sum(source.charge(0, now=0.0) == 0.0 for _ in range(10_000))
    assert sent == BURST_HASHES // LEAST_HASHES
