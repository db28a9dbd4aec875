"""Reports of replicas' caches, by KV events or pushes, and what they change in the indexes.

Owns the step from a report to the indexes (`kv_feed`, `kv_index`). See `kv_feeds` for prompts.

Theory of operation. A replica has one feed per model: an engine with another block size has restarted. A feed without a
model is that of all models of its replica, whose adapters have roots of their own (`kv_chain`). Events take precedence
over pushes, which are up to a push interval late.
"""

from __future__ import annotations

from gorgo.core.messages.cache_source import CacheSource, KvEventStats
from gorgo.core.messages.kv_events import CacheChanges, CacheEvictions, CacheSnapshot, KvEventBatch, clears
from gorgo.core.prefix.kv_feed import Feed, FeedTable

#: Age of a snapshot at its arrival, with room: a trip and its body. Blocks confirmed later are not in it.
SNAPSHOT_AGE_S = 1.0


class KvReports:
    """Feeds of all replicas, as far as reports go.

    Parameters
    ----------
    max_blocks:
        As in `KvFeeds`.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._table = FeedTable(max_blocks=max_blocks)
        self._evicted_of_left = 0
        #: Replicas whose events were lost since the last scrape.
        self._lost: set[int] = set()

    @property
    def changes(self) -> int:
        """The number of feeds made and dropped."""
        return self._table.changes

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
