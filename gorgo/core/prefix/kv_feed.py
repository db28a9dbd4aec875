"""The table of feeds: which replica reports its cache for which model, and in which index.

Owns one `KvEventIndex` per model and block size, made with its first feed and dropped with its last. See `kv_feeds` for
the reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.cache_source import CacheSource, KvEventStats
from gorgo.core.prefix.kv_index import KvEventIndex

#: Models of one replica with a feed each: names come from the wire. One more replaces the feed silent for longest.
MAX_MODELS = 8
#: Codes of sources in arrays by slot.
SOURCES: tuple[CacheSource, ...] = ("history", "events", "push")
HISTORY = 0

FeedKey = tuple[str | None, int]

_NO_FEEDS: Mapping[str | None, Feed] = {}


@dataclass(slots=True)
class Feed:
    """What one replica reports of one model.

    `number`: another one for each feed. `cleared`: it reported an empty cache since the last scrape. Until the cache is
    cleared it lacks blocks if the operator emptied it (`flushed`), or if more than `evicted` blocks of the replica have
    exceeded the bound.
    """

    source: CacheSource
    model: str | None
    index: KvEventIndex
    complete: bool
    newest_s: float
    number: int
    cleared: bool = False
    flushed: bool = False
    evicted: int = 0

    @property
    def index_key(self) -> FeedKey:
        return self.model, self.index.block_tokens

    def serves(self, model: str | None) -> bool:
        """Return whether a request for `model` may find its blocks here."""
        return serves(self.model, model)


class FeedRows(NamedTuple):
    """The replicas with a feed in one index, as columns: slot, source, and whether the feed is complete."""

    slots: NDArray[np.intp]
    sources: NDArray[np.int8]
    complete: NDArray[np.bool_]

    @classmethod
    def of(cls, feeds: Sequence[tuple[int, Feed]]) -> FeedRows:
        """Return the rows of feeds with their slots."""
        return cls(
            np.array([slot for slot, _ in feeds], dtype=np.intp),
            np.array([SOURCES.index(feed.source) for _, feed in feeds], dtype=np.int8),
            np.array([feed.complete for _, feed in feeds], dtype=np.bool_),
        )


class FeedMatch(NamedTuple):
    """What feeds say of a prompt, by slot: the source that counts (an index into `SOURCES`), and the leading blocks."""

    sources: NDArray[np.int8]
    blocks: NDArray[np.float64]


def serves(feed_model: str | None, model: str | None) -> bool:
    """Return whether a request for `model` may find its blocks in the index of `feed_model`."""
    return feed_model is None or model is None or feed_model == model


class FeedTable:
    """Feeds of all replicas by model, and their indexes.

    Parameters
    ----------
    max_blocks:
        As in `KvFeeds`.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.indexes: dict[FeedKey, KvEventIndex] = {}
        #: What became of the blocks of events, by slot.
        self.stats: dict[int, KvEventStats] = {}
        #: Counts feeds made and dropped.
        self.changes = 0
        self._slots: list[int] = []
        self._feeds: dict[int, dict[str | None, Feed]] = {}
        #: By index, until a feed changes.
        self._rows: dict[FeedKey, FeedRows] = {}

    def __bool__(self) -> bool:
        """Return whether any replica has a feed."""
        return bool(self._feeds)

    def of(self, slot: int) -> Mapping[str | None, Feed]:
        """Return the feeds of a replica by model. Not to be changed."""
        return self._feeds.get(slot, _NO_FEEDS)

    def set_replicas(self, slots: list[int]) -> None:
        """Share the bound among these replicas."""
        self._slots = slots
        self.set_max_blocks(self.max_blocks)

    def set_max_blocks(self, max_blocks: int) -> None:
        """Replace the bound on memory, and remove what exceeds it."""
        self.max_blocks = max_blocks
        for index in self.indexes.values():
            index.set_max_blocks(self._share)

    def get_or_add(self, slot: int, source: CacheSource, model: str | None, block_tokens: int, *, now: float) -> Feed:
        """Return the feed of a replica for a model that reports `now`; one of another kind is replaced."""
        feed = self.of(slot).get(model)
        if feed is not None and (feed.source, feed.index.block_tokens) != (source, block_tokens):
            self.drop(slot, feed)
            feed = None
        if feed is None:
            feed = self._add(slot, source, model, block_tokens, now)
        feed.newest_s = now
        return feed

    def drop(self, slot: int, feed: Feed) -> None:
        """Drop a feed with its blocks, and its index if that was the last one."""
        feed.index.clear_replica(slot)
        feed.index.stats.pop(slot, None)
        del self._feeds[slot][feed.model]
        if not self._feeds[slot]:
            del self._feeds[slot]
        if not any(feed.index is other.index for _, other in self._all()):
            del self.indexes[feed.index_key]
        self._on_change()

    def set_complete(self, feed: Feed, complete: bool) -> None:
        """Record whether a feed has all blocks."""
        if complete != feed.complete:
            feed.complete = complete
            self._rows.clear()

    def rows_of(self, key: FeedKey) -> FeedRows:
        """Return the replicas with a feed in one index."""
        rows = self._rows.get(key)
        if rows is None:
            rows = FeedRows.of([(slot, feed) for slot, feed in self._all() if feed.index_key == key])
            self._rows[key] = rows
        return rows

    def check(self) -> None:
        """Assert every invariant; visits every block."""
        feeds = list(self._all())
        assert all(0 < len(by_model) <= MAX_MODELS for by_model in self._feeds.values())
        assert self._feeds.keys() | self.stats.keys() <= set(self._slots), "a slot without a replica has nothing"
        assert {feed.index_key for _, feed in feeds} == self.indexes.keys(), "an index is dropped with its last feed"
        for slot, feed in feeds:
            assert feed.index is self.indexes[feed.index_key]
            assert feed.source == "push" or not feed.index.pushed.blocks_of(slot)
        for key, index in self.indexes.items():
            index.check()
            assert index.max_blocks_per_replica == self._share
            slots = {slot for slot, feed in feeds if feed.index_key == key}
            assert index.stats.keys() == slots
            assert all(slot in slots or not index.blocks(slot) for slot in self._slots)

    # -- helpers

    @property
    def _share(self) -> int:
        return max(1, self.max_blocks // max(1, len(self._slots)))

    def _all(self) -> Iterator[tuple[int, Feed]]:
        return ((slot, feed) for slot, by_model in self._feeds.items() for feed in by_model.values())

    def _add(self, slot: int, source: CacheSource, model: str | None, block_tokens: int, now: float) -> Feed:
        assert slot in self._slots
        feeds = self.of(slot)
        if len(feeds) >= MAX_MODELS:
            self.drop(slot, min(feeds.values(), key=lambda other: other.newest_s))
        index = self.indexes.get((model, block_tokens))
        if index is None:
            index = KvEventIndex(block_tokens=block_tokens, max_blocks_per_replica=self._share)
            self.indexes[model, block_tokens] = index
        stats = self.stats.setdefault(slot, KvEventStats())
        feed = Feed(source, model, index, True, newest_s=now, number=self.changes, evicted=stats.evicted)
        self._feeds.setdefault(slot, {})[model] = feed
        index.stats[slot] = stats
        self._on_change()
        return feed

    def _on_change(self) -> None:
        self.changes += 1
        self._rows.clear()
