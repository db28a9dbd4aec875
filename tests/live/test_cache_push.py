"""Bodies of pushes, right and wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.live.cache_push import (
    BURST_HASHES,
    FIELDS,
    HASHES_PER_S,
    KEYS,
    LEAST_HASHES,
    MAX_HASHES,
    SILENT_S,
    CachePush,
    Order,
    PushSource,
    from_json,
    from_query,
    unpacked,
)
from gorgo.live.http.errors import HttpError

BODY: dict[str, Any] = {
    "worker_id": "r0",
    "model": "m",
    "block_tokens": 16,
    "epoch": 1,
    "sequence": 0,
    "hashes": [0, 1, 2**64 - 1],
}
QUERY = {key: str(value) for key, value in BODY.items() if key != "hashes"}


def refusal(body: dict[str, Any]) -> HttpError:
    with pytest.raises(HttpError) as refused:
        from_json(body)
    return refused.value


def test_hashes_of_64_bits_are_read_as_they_are() -> None:
    push = from_json(BODY)
    assert (push.replica, push.model, push.block_tokens, push.epoch, push.sequence) == ("r0", "m", 16, 1, 0)
    assert push.hashes.tolist() == BODY["hashes"]


def test_push_without_a_model_is_for_all_of_the_replica() -> None:
    assert from_json({**BODY, "model": None}).model is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"worker_id": None}, "worker_id"),
        ({"worker_id": ""}, "worker_id"),
        ({"worker_id": "a" * 257}, "worker_id"),
        ({"worker_id": "a\nb"}, "worker_id"),
        ({"worker_id": 7}, "worker_id"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 65_537}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"block_tokens": 16.0}, "block_tokens"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**63}, "epoch"),
        ({"sequence": "0"}, "sequence"),
        ({"sequence": None}, "sequence"),
        ({"hashes": None}, "hashes"),
        ({"hashes": {}}, "hashes"),
        ({"hashes": [-1]}, "hashes"),
        ({"hashes": [2**64]}, "hashes"),
        ({"hashes": [10**400]}, "hashes"),
        ({"hashes": [1.5]}, "hashes"),
        ({"hashes": [True]}, "hashes"),
        ({"hashes": ["7"]}, "hashes"),
        ({"hashes": [[1]]}, "hashes"),
        ({"evicted_hashes": []}, "evicted_hashes"),
    ],
)
def test_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    error = refusal(BODY | change)
    assert (error.status, error.code) == (400, "invalid_request")
    assert named in error.message


@pytest.mark.parametrize("version", [0, 2, "1", 1.5, None])
def test_another_version_is_refused_as_such(version: object) -> None:
    assert refusal(BODY | {"version": version}).code == "unsupported_version"
    assert from_json(BODY | {"version": 1}).replica == "r0"


@pytest.mark.parametrize("missing", [key for key in BODY if key != "model"])
def test_missing_field_is_named(missing: str) -> None:
    assert missing in refusal({key: value for key, value in BODY.items() if key != missing}).message


def test_query_describes_a_packed_push() -> None:
    push = from_query(QUERY.items())
    assert (push.replica, push.model, push.block_tokens, push.epoch, push.sequence) == ("r0", "m", 16, 1, 0)
    assert len(push.hashes) == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epoch": "-1"}, "epoch"),
        ({"epoch": "1e3"}, "epoch"),
        ({"epoch": "9" * 4000}, "epoch"),
        ({"sequence": "\u0661"}, "sequence"),
        ({"block_tokens": ""}, "block_tokens"),
        ({"version": "2"}, "version"),
        ({"hashes": "1"}, "hashes"),
        ({"odd": "1"}, "odd"),
    ],
)
def test_wrong_field_of_a_query_is_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(HttpError, match=named):
        from_query((QUERY | change).items())


def test_repeated_field_of_a_query_is_refused() -> None:
    with pytest.raises(HttpError, match="worker_id"):
        from_query([*QUERY.items(), ("worker_id", "r1")])


def test_packed_hashes_are_little_endian() -> None:
    assert unpacked(struct.pack("<3Q", 1, 2**63, 2**64 - 1)).tolist() == [1, 2**63, 2**64 - 1]
    assert unpacked(b"").tolist() == []


def test_packed_hash_that_is_cut_is_refused() -> None:
    with pytest.raises(HttpError, match="15 bytes"):
        unpacked(b"x" * 15)


def result(parse: Callable[[], CachePush]) -> CachePush | HttpError:
    try:
        return parse()
    except HttpError as refused:
        if refused.status != 400:
            raise
        return refused


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), json_values))
def test_any_json_object_is_a_push_or_a_refusal(body: dict[str, Any]) -> None:
    found = result(lambda: from_json(body))
    if isinstance(found, CachePush):
        assert found.hashes.dtype == np.uint64
    else:
        json.dumps(found.message)


@given(st.lists(st.tuples(st.sampled_from(FIELDS) | st.text(max_size=8), st.text(max_size=30)), max_size=8))
def test_any_query_is_a_push_or_a_refusal(query: list[tuple[str, str]]) -> None:
    result(lambda: from_query(query))


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
