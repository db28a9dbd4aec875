"""Feeds: which replicas report their caches by KV events or pushes, and what of a prompt each of them has.

Owns one `KvEventIndex` per model and block size, made with its first feed and dropped with its last, and the feeds of
each replica. Replicas without a feed for a request are left to the history of requests (`index`).

Theory of operation. A replica has one feed per model: an engine with another block size has restarted. A feed without a
model is that of all models of its replica, whose adapters have roots of their own (`kv_chain`). Events take precedence
over pushes, which are up to a push interval late. A complete feed alone counts; of a partial one, joined while the
cache had blocks already, the better of it and the history.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.cache_source import CacheSource, KvEventStats
from gorgo.core.messages.kv_events import CacheChanges, CacheCleared, CacheEvictions, CacheSnapshot, KvEventBatch
from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.kv_feed import HISTORY, Feed, FeedKey, FeedRows, serves
from gorgo.core.prefix.kv_index import KvEventIndex

#: Models of one replica with a feed each: names come from the wire. One more replaces the feed silent for longest.
MAX_MODELS = 8
#: Age of a snapshot at its arrival, with room: a trip and its body. Blocks confirmed later are not in it.
SNAPSHOT_AGE_S = 1.0


class KvFeeds:
    """Feeds of all replicas.

    Parameters
    ----------
    max_blocks:
        Bound on memory: blocks of each index, in equal shares of the replicas.
    used:
        Whether decisions use feeds; may be replaced. Reports are applied in any case.

    Example
    -------
    >>> feeds = KvFeeds(max_blocks=1000)
    >>> feeds.set_replicas([0, 1])
    >>> feeds.replace(1, CacheSnapshot("m", 16, [7, 8]), now=0.0)
    >>> request = RouteRequest("r", 0.0, 48, b"", 64.0, 0, model="m", kv_hashes={16: [7, 8, 9]})
    >>> matched = np.array([10.0, 0.0])  # by the history
    >>> feeds.match(request, matched).tolist(), matched.tolist()
    ([0, 2], [10.0, 32.0])
    """

    def __init__(self, *, max_blocks: int, used: bool = True) -> None:
        self.max_blocks = max_blocks
        self.used = used
        self._slots: list[int] = []
        self._indexes: dict[FeedKey, KvEventIndex] = {}
        self._feeds: dict[int, dict[str | None, Feed]] = {}
        self._stats: dict[int, KvEventStats] = {}
        #: By index, until a feed changes.
        self._rows: dict[FeedKey, FeedRows] = {}
        #: Counts feeds made and dropped.
        self.changes = 0

    def __bool__(self) -> bool:
        """Return whether any replica has a feed."""
        return bool(self._feeds)

    @property
    def counted(self) -> bool:
        """Return whether decisions depend on a feed."""
        return self.used and bool(self._feeds)

    # -- replicas

    def set_replicas(self, slots: list[int]) -> None:
        """Share the bound among these replicas."""
        self._slots = slots
        self.resize(self.max_blocks)

    def remove_replica(self, slot: int) -> None:
        """Remove all of a replica that has left: the slot's next one starts without a feed."""
        self.drop(slot)
        self._stats.pop(slot, None)

    def resize(self, max_blocks: int) -> None:
        """Replace the bound on memory, and remove what exceeds it."""
        self.max_blocks = max_blocks
        for index in self._indexes.values():
            index.resize(self._share)

    @property
    def _share(self) -> int:
        return max(1, self.max_blocks // max(1, len(self._slots)))

    # -- reports

    def apply(
        self, slot: int, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> bool:
        """Apply events; return whether they say that the replica's cache was empty before the last of them."""
        feed = self._feed(slot, "events", model, block_tokens, now)
        feed.index.apply(slot, batch)
        cleared = any(isinstance(event, CacheCleared) for event in batch.events)
        if cleared:
            feed.cleared, feed.flushed = True, False
        complete = complete and not feed.flushed
        if complete != feed.complete:
            feed.complete = complete
            self._rows.clear()
        return cleared

    def replace(self, slot: int, snapshot: CacheSnapshot, *, now: float) -> None:
        """Replace the pushed blocks of a replica; ignored while it has events."""
        if self._has_events(slot, snapshot.model):
            return
        feed = self._feed(slot, "push", snapshot.model, snapshot.block_tokens, now)
        stats = self._stats_of(slot)
        stats.evicted += feed.index.pushed.replace(slot, snapshot.hashes, limit=feed.index.max_blocks_per_replica)
        feed.index.pushed.expire_confirmed(slot, before_s=now - SNAPSHOT_AGE_S)

    def evict(self, slot: int, evictions: CacheEvictions, *, now: float) -> None:
        """Remove pushed blocks of a replica; ignored without a snapshot that had them."""
        feed = self.pushed(slot, evictions.model, evictions.block_tokens)
        if feed is not None:
            feed.newest_s = now
            feed.index.pushed.remove(slot, evictions.hashes)

    def change(self, slot: int, changes: CacheChanges, *, now: float) -> None:
        """Apply a part of the difference to the last snapshot of a replica; ignored without one."""
        feed = self.pushed(slot, changes.model, changes.block_tokens)
        if feed is None:
            return
        feed.newest_s = now
        pushed, stats = feed.index.pushed, self._stats_of(slot)
        pushed.remove(slot, changes.removed)
        stats.evicted += pushed.add(slot, changes.added, limit=feed.index.max_blocks_per_replica)
        if changes.whole:
            pushed.expire_confirmed(slot, before_s=now - SNAPSHOT_AGE_S)

    def drop(self, slot: int, source: CacheSource | None = None) -> None:
        """Drop the feeds of a replica, or those of one source."""
        for feed in list(self._feeds.get(slot, {}).values()):
            if source is None or feed.source == source:
                self._drop(slot, feed)

    def flush(self, slot: int) -> None:
        """Forget the blocks of a replica. Its cache has them still: its events are incomplete until it is cleared."""
        self.drop(slot, "push")
        for feed in self._feeds.get(slot, {}).values():
            feed.index.clear_replica(slot)
            feed.complete, feed.flushed = False, True
        self._rows.clear()

    def restarted(self, slot: int) -> None:
        """Drop the feeds of an engine that has restarted, except where its events have said so already."""
        for feed in list(self._feeds.get(slot, {}).values()):
            if not feed.cleared:
                self._drop(slot, feed)

    def scraped(self, slot: int) -> None:
        """Record a scrape: a restart that the next one reveals was not before."""
        for feed in self._feeds.get(slot, {}).values():
            feed.cleared = False

    # -- reads

    def match(self, request: RouteRequest, matched: NDArray[np.float64]) -> NDArray[np.int8] | None:
        """Replace the cached tokens by the history with those of feeds, where a replica has one for this request.

        Return the source of each slot, an index into `SOURCES`; `None` where the history counts for all.
        """
        sources: NDArray[np.int8] | None = None
        for (model, block_tokens), index in self._indexes.items():
            hashes = request.kv_hashes.get(block_tokens)
            if hashes is None or not serves(model, request.model):
                continue
            if sources is None:
                sources = np.zeros(len(matched), dtype=np.int8)
            rows = self._rows_of((model, block_tokens))
            found = index.match(hashes, len(matched))[rows.slots]
            least = np.where(rows.partial | (sources[rows.slots] != HISTORY), matched[rows.slots], 0.0)
            better = found >= least
            slots = rows.slots[better]
            matched[slots], sources[slots] = found[better], rows.sources[better]
        return sources

    def block_sizes(self, slots: Iterable[int], model: str | None) -> frozenset[int]:
        """Return the block sizes of the feeds of some replicas for a model."""
        return frozenset(
            feed.index.block_tokens
            for slot in slots
            for feed in self._feeds.get(slot, {}).values()
            if feed.serves(model)
        )

    def pushed(self, slot: int, model: str | None, block_tokens: int) -> Feed | None:
        """Return the feed of a replica's pushes."""
        feed = self._feeds.get(slot, {}).get(model)
        if feed is None or feed.source != "push" or feed.index.block_tokens != block_tokens:
            return None
        return feed

    def newest(self, slot: int) -> Feed | None:
        """Return the feed of a replica with the newest report."""
        return max(self._feeds.get(slot, {}).values(), key=lambda feed: feed.newest_s, default=None)

    def blocks(self, slot: int) -> int:
        """Return the blocks that a replica reports, of all its models."""
        return sum(feed.index.blocks(slot) for feed in self._feeds.get(slot, {}).values())

    def event_stats(self, slot: int) -> KvEventStats:
        """Return what became of the blocks of a replica's events."""
        return self._stats.get(slot, KvEventStats())

    def check(self) -> None:
        """Assert every invariant; visits every block."""
        feeds = [(slot, feed) for slot, feeds in self._feeds.items() for feed in feeds.values()]
        assert all(0 < len(feeds) <= MAX_MODELS for feeds in self._feeds.values())
        assert self._feeds.keys() | self._stats.keys() <= set(self._slots), "a slot without a replica has nothing"
        assert {feed.index_key for _, feed in feeds} == self._indexes.keys(), "an index is dropped with its last feed"
        for slot, feed in feeds:
            assert feed.index is self._indexes[feed.index_key]
            assert feed.source == "push" or not feed.index.pushed.count(slot)
        for key, index in self._indexes.items():
            index.check()
            assert index.max_blocks_per_replica == self._share
            with_feed = {slot for slot, feed in feeds if feed.index_key == key}
            assert all(slot in with_feed or not index.blocks(slot) for slot in self._slots)

    # -- helpers

    def _has_events(self, slot: int, model: str | None) -> bool:
        feed = self._feeds.get(slot, {}).get(model)
        return feed is not None and feed.source == "events"

    def _stats_of(self, slot: int) -> KvEventStats:
        return self._stats.setdefault(slot, KvEventStats())

    def _feed(self, slot: int, source: CacheSource, model: str | None, block_tokens: int, now: float) -> Feed:
        """Return the feed of a replica for a model, made if missing."""
        assert slot in self._slots
        feeds = self._feeds.setdefault(slot, {})
        feed = feeds.get(model)
        if feed is not None and (feed.source != source or feed.index.block_tokens != block_tokens):
            self._drop(slot, feed)
            feeds, feed = self._feeds.setdefault(slot, {}), None
        if feed is None:
            if len(feeds) >= MAX_MODELS:
                self._drop(slot, min(feeds.values(), key=lambda other: other.newest_s))
            index = self._index(model, block_tokens)
            feed = feeds[model] = Feed(source, model, index, complete=True, newest_s=now, number=self.changes)
            feed.index.stats[slot] = self._stats_of(slot)
            self._on_change()
        feed.newest_s = now
        return feed

    def _on_change(self) -> None:
        self.changes += 1
        self._rows.clear()

    def _rows_of(self, key: FeedKey) -> FeedRows:
        rows = self._rows.get(key)
        if rows is None:
            found = [(slot, feeds.get(key[0])) for slot, feeds in self._feeds.items()]
            mine = [(slot, feed) for slot, feed in found if feed is not None and feed.index_key == key]
            rows = self._rows[key] = FeedRows.of(mine)
        return rows

    def _index(self, model: str | None, block_tokens: int) -> KvEventIndex:
        index = self._indexes.get((model, block_tokens))
        if index is None:
            index = KvEventIndex(block_tokens=block_tokens, max_blocks_per_replica=self._share)
            self._indexes[model, block_tokens] = index
        return index

    def _drop(self, slot: int, feed: Feed) -> None:
        feed.index.clear_replica(slot)
        feed.index.stats.pop(slot, None)
        self._on_change()
        feeds = self._feeds[slot]
        del feeds[feed.model]
        if not feeds:
            del self._feeds[slot]
        if not any(feed.index_key == other.index_key for others in self._feeds.values() for other in others.values()):
            del self._indexes[feed.index_key]
