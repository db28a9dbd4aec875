"""Reports of caches on their own: what each of them leaves in the feeds and in the history."""

from __future__ import annotations

import pytest

from gorgo.core.messages.kv_events import (
    BlocksStored,
    CacheChanges,
    CacheCleared,
    CacheEvictions,
    CacheSnapshot,
    KvEvent,
    KvEventBatch,
    KvTier,
)
from gorgo.core.prefix.kv_source import token_bytes
from gorgo.core.router_parts import RouterCaches
from gorgo.errors import UnknownReplica
from tests.core.parts import Parts, make_parts
from tests.core.routers import PROMPT

STORED = BlocksStored((1, 2, 3, 4), None, token_bytes(range(64)), 16, KvTier.GPU)


@pytest.fixture
def parts() -> Parts:
    return make_parts("a", "b")


def caches_of(parts: Parts) -> RouterCaches:
    return RouterCaches(parts.fleet, parts.feeds, parts.index, parts.peers, parts.accuracy, parts.dispatcher)


def blocks_of_feeds(parts: Parts, name: str = "a") -> int:
    return parts.feeds.blocks(parts.fleet.member(name).slot)


def history_of(parts: Parts, name: str = "a") -> int:
    return parts.index.resident_blocks(parts.fleet.member(name).slot)


def report(caches: RouterCaches, *events: KvEvent, replica: str = "a") -> None:
    batch = KvEventBatch(sent_s=None, rank=0, events=events)
    caches.on_kv_events(replica, batch, model=None, block_tokens=16, complete=True, now=0.0)


def test_events_count_until_the_feed_is_lost(parts: Parts) -> None:
    caches = caches_of(parts)
    report(caches, STORED)
    assert (blocks_of_feeds(parts), caches.block_sizes(None)) == (4, frozenset({16}))
    assert caches.sources(now=1.0)["a"].source == "events"
    caches.on_kv_lost("a", now=1.0)
    assert (blocks_of_feeds(parts), caches.block_sizes(None)) == (0, frozenset())
    assert caches.sources(now=1.0)["a"].source != "events"


def test_a_whole_cleared_cache_empties_the_history_too(parts: Parts) -> None:
    caches = caches_of(parts)
    parts.index.confirm(PROMPT, parts.fleet.member("a").slot)
    report(caches, STORED)
    assert history_of(parts) == 4
    report(caches, CacheCleared())
    assert (blocks_of_feeds(parts), history_of(parts)) == (0, 0)


def test_a_flush_of_one_leaves_the_others_and_one_of_all_leaves_none(parts: Parts) -> None:
    caches = caches_of(parts)
    for name in "ab":
        parts.index.confirm(PROMPT, parts.fleet.member(name).slot)
        report(caches, STORED, replica=name)
    caches.flush("a", now=0.0)
    assert [(history_of(parts, name), blocks_of_feeds(parts, name)) for name in "ab"] == [(0, 0), (4, 4)]
    caches.flush(now=0.0)
    assert [(history_of(parts, name), blocks_of_feeds(parts, name)) for name in "ab"] == [(0, 0), (0, 0)]
    with pytest.raises(UnknownReplica, match="'z'"):
        caches.flush("z", now=0.0)


def test_a_flush_in_slices_removes_as_many_blocks_as_it_may_until_there_are_none(parts: Parts) -> None:
    caches = caches_of(parts)
    report(caches, STORED)
    before = blocks_of_feeds(parts)
    assert caches.flush_some("a", blocks=3, now=0.0)
    assert 0 < blocks_of_feeds(parts) < before
    while caches.flush_some("a", blocks=3, now=0.0):
        pass
    assert (blocks_of_feeds(parts), caches.forget_some("a", blocks=3, now=0.0)) == (0, False)


def test_pushes_are_replaced_evicted_changed_and_lost(parts: Parts) -> None:
    caches = caches_of(parts)
    caches.on_snapshot("a", CacheSnapshot("m", 16, [1, 2, 3]), now=0.0)
    feed = caches.pushed_feed("a", "m", 16)
    assert feed is not None
    assert feed.reported_blocks == 3
    caches.on_evictions("a", CacheEvictions("m", 16, [3]), now=1.0)
    caches.on_changes("a", CacheChanges("m", 16, added=[4], removed=[1], whole=True), now=2.0)
    assert blocks_of_feeds(parts) == 2
    caches.on_push_lost("a", now=3.0)
    assert (blocks_of_feeds(parts), caches.pushed_feed("a", "m", 16)) == (0, None)


def test_a_report_of_a_replica_that_has_left_is_ignored(parts: Parts) -> None:
    caches = caches_of(parts)
    report(caches, STORED, replica="z")
    caches.on_snapshot("z", CacheSnapshot("m", 16, [1]), now=0.0)
    caches.on_evictions("z", CacheEvictions("m", 16, [1]), now=0.0)
    caches.on_changes("z", CacheChanges("m", 16, added=[1], removed=[], whole=True), now=0.0)
    caches.on_kv_lost("z", now=0.0)
    caches.on_push_lost("z", now=0.0)
    assert not caches.forget_some("z", blocks=1, now=0.0)
    assert not caches.clear_some("z", model=None, rank=0, blocks=1, now=0.0)
    assert not caches.flush_some("z", blocks=1, now=0.0)
    assert (caches.pushed_feed("z", "m", 16), parts.feeds.changes) == (None, 0)
