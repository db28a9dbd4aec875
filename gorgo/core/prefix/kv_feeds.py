"""Feeds: what replicas report of their caches by KV events or pushes, and what of a prompt each of them has.

Owns the steps from a report and from a dispatched prompt to the indexes (`kv_feed`, `kv_index`). Replicas without a
feed for a request are left to the history of requests (`index`).

Theory of operation. A replica has one feed per model: an engine with another block size has restarted. A feed without a
model is that of all models of its replica, whose adapters have roots of their own (`kv_chain`). Events take precedence
over pushes, which are up to a push interval late. A complete feed alone counts; of a partial one, joined while the
cache had blocks already or cut at the bound, the better of it and the history. A dispatched prompt counts before any
report (speculation).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.cache_source import CacheSource, KvEventStats
from gorgo.core.messages.kv_events import CacheChanges, CacheEvictions, CacheSnapshot, KvEventBatch, clears
from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.kv_feed import HISTORY, Feed, FeedMatch, FeedTable, serves
from gorgo.core.prefix.kv_speculation import Speculation, SpeculationQueue

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
        self._table = FeedTable(max_blocks=max_blocks)
        self._speculations = SpeculationQueue()
        self._evicted_of_left = 0
        #: Replicas whose events were lost since the last scrape.
        self._lost: set[int] = set()

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
        self._evicted_of_left += self._table.stats.pop(slot, KvEventStats()).evicted

    def set_max_blocks(self, max_blocks: int) -> None:
        """Replace the bound on memory, and remove what exceeds it."""
        self._table.set_max_blocks(max_blocks)

    # -- reports

    def apply(
        self, slot: int, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> bool:
        """Apply events; return whether they say that all of the replica's cache was empty before the last of them."""
        feed = self._table.get_or_add(slot, "events", model, block_tokens, now=now)
        cleared = clears(batch.events)
        whole = cleared and feed.index.ranks(slot) <= {batch.rank}
        feed.cleared |= cleared
        stats = self._table.stats[slot]
        if whole:
            feed.flushed, feed.evicted = False, stats.evicted
        feed.index.apply(slot, batch)
        self._table.set_complete(feed, complete and not feed.flushed and feed.evicted == stats.evicted)
        return whole

    def replace(self, slot: int, snapshot: CacheSnapshot, *, now: float) -> None:
        """Replace the pushed blocks of a replica; ignored while it has events."""
        feed = self._table.of(slot).get(snapshot.model)
        if feed is not None and feed.source == "events":
            return
        feed = self._table.get_or_add(slot, "push", snapshot.model, snapshot.block_tokens, now=now)
        pushed = feed.index.pushed
        excess = pushed.replace(slot, snapshot.hashes, limit=feed.index.max_blocks_per_replica)
        self._table.stats[slot].evicted += excess
        self._table.set_complete(feed, not excess)
        pushed.expire_confirmed(slot, before_s=now - SNAPSHOT_AGE_S)
        feed.index.speculated.confirm_all(slot, snapshot.hashes)

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
        pushed, stats = feed.index.pushed, self._table.stats[slot]
        pushed.remove(slot, changes.removed)
        excess = pushed.add(slot, changes.added, limit=feed.index.max_blocks_per_replica)
        stats.evicted += excess
        self._table.set_complete(feed, feed.complete and not excess)
        feed.index.speculated.confirm_all(slot, changes.added)
        if changes.whole:
            pushed.expire_confirmed(slot, before_s=now - SNAPSHOT_AGE_S)

    def drop(self, slot: int, source: CacheSource | None = None) -> None:
        """Drop the feeds of a replica, or those of one source."""
        for feed in list(self._table.of(slot).values()):
            if source is None or feed.source == source:
                self._table.drop(slot, feed)

    def lose_events(self, slot: int) -> None:
        """Drop the feeds of a replica's events: its subscription is broken, or begins anew."""
        self.drop(slot, "events")
        self._lost.add(slot)

    def flush(self, slot: int) -> None:
        """Forget the blocks of a replica. Its cache has them still: its events are incomplete until it is cleared."""
        self.drop(slot, "push")
        for feed in self._table.of(slot).values():
            feed.index.clear_replica(slot)
            feed.flushed = True
            self._table.set_complete(feed, False)

    def flush_some(self, slot: int, *, blocks: int, source: CacheSource | None = None) -> int:
        """Begin to flush the feeds of a replica, or those of one source: remove up to `blocks`, and return how many.

        Until the flush or the drop that follows they are incomplete.
        """
        removed = 0
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
        removed = feed.index.remove_some(slot, blocks, rank=rank)
        return removed, feed.index.ranks(slot) <= {rank}

    def restarted(self, slot: int) -> None:
        """Drop the feeds of an engine that has restarted, except where its events have said so already.

        Events that began anew since the last scrape are those of the present process: the former one's broke off.
        """
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
            rows, found = self._table.rows_of(key), index.match_blocks(hashes, len(matched))
            complete[rows.slots] += rows.complete
            better = found.tokens[rows.slots] > tokens[rows.slots]
            slots = rows.slots[better]
            tokens[slots], match.blocks[slots] = found.tokens[slots], found.blocks[slots]
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
