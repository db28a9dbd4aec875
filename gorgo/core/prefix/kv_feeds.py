"""Feeds: what replicas report of their caches by KV events or pushes, and what of a prompt each of them has.

Owns the steps from a report and from a dispatched prompt to the indexes (`KvFeeds`), and the table of feeds with one
index per model and block size (`FeedTable`). Leaves the blocks to `kv_index`. Replicas without a feed for a request are
left to the history of requests (`index`).

Theory of operation. A replica has one feed per model: an engine with another block size has restarted. A feed without a
model is that of all models of its replica, whose adapters have roots of their own (`kv_source`). Events take precedence
over pushes, which are up to a push interval late. A complete feed alone counts; of a partial one, joined while the
cache had blocks already or cut at the bound, the better of it and the history. A dispatched prompt counts before any
report (speculation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.decision import CacheSource, KvEventStats
from gorgo.core.messages.kv_events import CacheChanges, CacheEvictions, CacheSnapshot, KvEventBatch, clears
from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.kv_index import KvEventIndex, Speculation, SpeculationQueue

# The table of feeds: which replica reports its cache for which model, and in which index.
#
# Owns one `KvEventIndex` per model and block size, made with its first feed and dropped with its last. See `KvFeeds`
# for the reports.


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
    >>> from gorgo.core.messages.kv_events import CacheSnapshot
    >>> feeds = KvFeeds(max_blocks=1000)
    >>> feeds.set_replicas([0, 1])
    >>> feeds.replace(1, CacheSnapshot("m", 16, [7, 8]), now=0.0)
    >>> request = RouteRequest("r", 0.0, 48, b"", 64.0, 0, model="m", kv_hashes={16: [7, 8, 9]})
    >>> matched = np.array([10.0, 0.0])  # by the history
    >>> feeds.match(request, matched, now=1.0)
    FeedMatch(sources=array([0, 2], dtype=int8), blocks=array([0., 2.]))
    >>> matched
    array([10., 32.])
    """

    def __init__(self, *, max_blocks: int, used: bool = True) -> None:
        self.used = used
        #: Replicas whose reports or capacity have changed since their fill was last read, one bit per slot.
        self.changed_slots = 0
        #: Tokens of each replica's KV pool, where known.
        self._capacity_tokens: dict[int, float] = {}
        self._table = FeedTable(max_blocks=max_blocks)
        self._speculations = SpeculationQueue()
        self._evicted_of_left = 0
        #: Replicas whose events were lost since the last scrape.
        self._lost: set[int] = set()
        #: Whether any replica has reported its cache; until then no decision is counted.
        self.reported = False
        #: Decisions by source, by slot.
        self._decided: dict[int, list[int]] = {}

    @property
    def changes(self) -> int:
        """The number of feeds made and dropped."""
        return self._table.changes

    @property
    def counted(self) -> bool:
        """Return whether decisions depend on a feed."""
        return self.used and bool(self._table)

    # -- replicas

    def set_replicas(self, slots: list[int]) -> None:
        """Share the bound among these replicas."""
        self._table.set_replicas(slots)

    def remove_replica(self, slot: int) -> None:
        """Remove all of a replica that has left: the slot's next one starts without a feed."""
        self.drop(slot)
        self._lost.discard(slot)
        self._capacity_tokens.pop(slot, None)
        self.changed_slots &= ~(1 << slot)
        self._decided.pop(slot, None)
        self._evicted_of_left += self._table.stats.pop(slot, KvEventStats()).evicted

    def set_max_blocks(self, max_blocks: int) -> None:
        """Replace the bound on memory, and remove what exceeds it."""
        self._table.set_max_blocks(max_blocks)

    def set_capacity(self, slot: int, capacity_tokens: float | None) -> None:
        """Record the size of a replica's KV pool; `None` if it is unknown."""
        self._capacity_tokens[slot] = capacity_tokens or 0.0
        self.changed_slots |= 1 << slot

    # -- reports

    def apply(
        self, slot: int, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> bool:
        """Apply events; return whether they say that all of the replica's cache was empty before the last of them."""
        self.reported = True
        feed = self._table.get_or_add(slot, "events", model, block_tokens, now=now)
        cleared = clears(batch.events)
        whole = cleared and feed.index.ranks(slot) <= {batch.rank}
        feed.cleared |= cleared
        stats = self._table.stats[slot]
        if whole:
            feed.flushed, feed.evicted = False, stats.evicted
        feed.index.apply(slot, batch)
        self.changed_slots |= 1 << slot
        self._table.set_complete(feed, complete and not feed.flushed and feed.evicted == stats.evicted)
        return whole

    def replace(self, slot: int, snapshot: CacheSnapshot, *, now: float) -> None:
        """Replace the pushed blocks of a replica; ignored while it has events."""
        feed = self._table.of(slot).get(snapshot.model)
        if feed is not None and feed.source == "events":
            return
        self.reported = True
        feed = self._table.get_or_add(slot, "push", snapshot.model, snapshot.block_tokens, now=now)
        pushed = feed.index.pushed
        excess = pushed.replace(slot, snapshot.hashes, limit=feed.index.max_blocks_per_replica)
        self._table.stats[slot].evicted += excess
        self._table.set_complete(feed, not excess)
        pushed.expire_confirmed(slot, before_s=now - SNAPSHOT_AGE_S)
        feed.index.speculated.confirm_all(slot, snapshot.hashes)
        self.changed_slots |= 1 << slot

    def evict(self, slot: int, evictions: CacheEvictions, *, now: float) -> None:
        """Remove pushed blocks of a replica; ignored without a snapshot that had them."""
        feed = self.pushed(slot, evictions.model, evictions.block_tokens)
        if feed is not None:
            feed.newest_s = now
            feed.index.pushed.remove(slot, evictions.hashes)
            self.changed_slots |= 1 << slot

    def change(self, slot: int, changes: CacheChanges, *, now: float) -> None:
        """Apply a part of the difference to the last snapshot of a replica; ignored without one."""
        feed = self.pushed(slot, changes.model, changes.block_tokens)
        if feed is None:
            return
        feed.newest_s = now
        pushed, stats = feed.index.pushed, self._table.stats[slot]
        pushed.remove(slot, changes.removed)
        self.changed_slots |= 1 << slot
        excess = pushed.add(slot, changes.added, limit=feed.index.max_blocks_per_replica)
        stats.evicted += excess
        self._table.set_complete(feed, feed.complete and not excess)
        feed.index.speculated.confirm_all(slot, changes.added)
        if changes.whole:
            pushed.expire_confirmed(slot, before_s=now - SNAPSHOT_AGE_S)

    def drop(self, slot: int, source: CacheSource | None = None) -> None:
        """Drop the feeds of a replica, or those of one source."""
        self.changed_slots |= 1 << slot
        for feed in list(self._table.of(slot).values()):
            if source is None or feed.source == source:
                self._table.drop(slot, feed)

    def lose_events(self, slot: int) -> None:
        """Drop the feeds of a replica's events: its subscription is broken, or begins anew."""
        self.drop(slot, "events")
        self._lost.add(slot)

    def flush(self, slot: int) -> None:
        """Forget the blocks of a replica. Its cache has them still: its events are incomplete until it is cleared."""
        self.drop(slot, "push")  # which says that its fill has changed
        for feed in self._table.of(slot).values():
            feed.index.clear_replica(slot)
            feed.flushed = True
            self._table.set_complete(feed, False)

    def flush_some(self, slot: int, *, blocks: int, source: CacheSource | None = None) -> int:
        """Begin to flush the feeds of a replica, or those of one source: remove up to `blocks`, and return how many.

        Until the flush or the drop that follows they are incomplete.
        """
        removed = 0
        self.changed_slots |= 1 << slot
        for feed in self._table.of(slot).values():
            if source is None or feed.source == source:
                feed.flushed = True
                self._table.set_complete(feed, False)
                removed += feed.index.remove_some(slot, blocks - removed)
        return removed

    def clear_some(self, slot: int, *, model: str | None, rank: int, blocks: int) -> tuple[int, bool]:
        """Begin to apply that a rank's cache is empty: remove up to `blocks`.

        Return how many, and whether only this rank has any.
        """
        feed = self._table.of(slot).get(model)
        if feed is None or feed.source != "events":
            return 0, False
        self.changed_slots |= 1 << slot
        removed = feed.index.remove_some(slot, blocks, rank=rank)
        return removed, feed.index.ranks(slot) <= {rank}

    def restarted(self, slot: int) -> None:
        """Drop the feeds of an engine that has restarted, except where its events have said so already.

        Events that began anew since the last scrape are those of the present process: the former one's broke off.
        """
        self.changed_slots |= 1 << slot
        for feed in list(self._table.of(slot).values()):
            if not feed.cleared and not (slot in self._lost and feed.source == "events"):
                self._table.drop(slot, feed)

    def scraped(self, slot: int) -> None:
        """Record a scrape: a restart that the next one reveals was not before."""
        self._lost.discard(slot)
        for feed in self._table.of(slot).values():
            feed.cleared = False

    # -- prompts

    def match(self, request: RouteRequest, matched: NDArray[np.float64], *, now: float) -> FeedMatch | None:
        """Replace the cached tokens by the history with those of feeds, where a replica has one for this request.

        Return `None` where the history counts for all.
        """
        self._speculations.expire(now=now)
        match = None
        tokens = complete = np.zeros(0)
        for key, index in self._table.indexes.items():
            hashes = request.kv_hashes.get(index.block_tokens)
            if hashes is None or not serves(key[0], request.model):
                continue
            if match is None:
                match = FeedMatch(np.full(len(matched), HISTORY, dtype=np.int8), np.zeros(len(matched)))
                tokens, complete = np.full(len(matched), -1.0), np.zeros(len(matched))
            rows, block_match = self._table.rows_of(key), index.match_blocks(hashes, len(matched))
            complete[rows.slots] += rows.complete
            better = block_match.tokens[rows.slots] > tokens[rows.slots]
            slots = rows.slots[better]
            tokens[slots], match.blocks[slots] = block_match.tokens[slots], block_match.blocks[slots]
            match.sources[slots] = rows.sources[better]
        if match is not None:
            reported = tokens >= np.where(complete, 0.0, matched)
            np.copyto(matched, tokens, where=reported)
            match.sources[~reported] = HISTORY
        return match

    def speculate(self, slot: int, request: RouteRequest, *, found_blocks: int, expires_s: float) -> Speculation | None:
        """Count a dispatched prompt on its replica until it is reported; `None` without a feed for it.

        `found_blocks` are its leading blocks there. They are reported, or speculated for an earlier prompt.
        """
        feed = self._feed_for(slot, request)
        if feed is None:
            return None
        hashes = request.kv_hashes[feed.index.block_tokens][found_blocks:]
        prompt = Speculation(feed.index.speculated, slot, hashes, expires_s)
        self._speculations.add(prompt)
        return prompt

    def record_decision(self, slot: int, source: int) -> None:
        """Count a decision for a replica by the source that it used, an index into `SOURCES`."""
        counts = self._decided.get(slot)
        if counts is None:
            counts = self._decided[slot] = [0] * len(SOURCES)
        counts[source] += 1

    def decisions(self, slot: int) -> dict[CacheSource, int]:
        """Return the decisions for a replica by the source that they used."""
        return dict(zip(SOURCES, self._decided.get(slot, [0] * len(SOURCES)), strict=True))

    def withdraw(self, prompt: Speculation) -> None:
        """Stop counting a dispatched prompt: its attempt ended without a first token."""
        self._speculations.withdraw(prompt)

    def confirm(self, slot: int, request: RouteRequest, *, now: float) -> None:
        """Record that a replica has prefilled a prompt: it counts until the next snapshot. Events say so themselves."""
        feed = self._feed_for(slot, request)
        if feed is not None and feed.source == "push":
            index, hashes = feed.index, request.kv_hashes[feed.index.block_tokens]
            index.pushed.confirm(slot, hashes, limit=index.max_blocks_per_replica, now=now)
            index.speculated.confirm_all(slot, hashes)

    # -- reads

    def pushed(self, slot: int, model: str | None, block_tokens: int) -> Feed | None:
        """Return the feed of a replica's pushes."""
        feed = self._table.of(slot).get(model)
        if feed is None or feed.source != "push" or feed.index.block_tokens != block_tokens:
            return None
        return feed

    def event_stats(self, slot: int) -> KvEventStats:
        """Return what became of the blocks of a replica's events."""
        return self._table.stats.get(slot, KvEventStats())

    @property
    def evicted(self) -> int:
        """The reported blocks that exceeded the bounds, those of replicas that have left included."""
        return self._evicted_of_left + sum(stats.evicted for stats in self._table.stats.values())

    def block_sizes(self, slots: Iterable[int], model: str | None) -> frozenset[int]:
        """Return the block sizes of the feeds of some replicas for a model."""
        return frozenset(
            feed.index.block_tokens
            for slot in slots
            for feed in self._table.of(slot).values()
            if serves(feed.model, model)
        )

    def newest(self, slot: int) -> Feed | None:
        """Return the feed of a replica with the newest report."""
        return max(self._table.of(slot).values(), key=lambda feed: feed.newest_s, default=None)

    def fill(self, slot: int) -> float | None:
        """Return the share of a replica's KV pool that it reports as cached on its GPUs; `None` without all reports."""
        capacity_tokens, feeds = self._capacity_tokens.get(slot), self._table.of(slot).values()
        if not capacity_tokens or not any(feed.complete for feed in feeds):
            return None
        tokens = sum(feed.index.gpu_blocks(slot) * feed.index.block_tokens for feed in feeds)
        return min(1.0, tokens / capacity_tokens)

    def blocks(self, slot: int) -> int:
        """Return the blocks that a replica reports, of all its models."""
        return sum(feed.index.blocks(slot) for feed in self._table.of(slot).values())

    def speculated_blocks(self, slot: int, *, now: float) -> int:
        """Return the blocks that count on a replica and have not been reported."""
        self._speculations.expire(now=now)
        return sum(feed.index.speculated.blocks_of(slot) for feed in self._table.of(slot).values())

    def check(self) -> None:
        """Assert every invariant; visits every block."""
        self._table.check()
        self._speculations.check()

    # -- helpers

    def _feed_for(self, slot: int, request: RouteRequest) -> Feed | None:
        """Return the feed of a replica that a request's blocks come under: that of its own model, else of all."""
        feeds = self._table.of(slot)
        feed = feeds.get(request.model) or feeds.get(None)
        return feed if feed is not None and feed.index.block_tokens in request.kv_hashes else None
