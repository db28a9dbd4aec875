"""What a Router learns of its replicas' caches: KV events, pushed snapshots and evictions, and feeds that are lost.

Owns the step from a report to the feeds and the history (`core.prefix`). A report of a replica that has left is
ignored. None of them makes a request due.
"""

from __future__ import annotations

from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.prefix_updates import CacheAccuracy
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.messages.actions import Action
from gorgo.core.messages.decision import CacheSourceStats
from gorgo.core.messages.kv_events import CacheChanges, CacheEvictions, CacheSnapshot, KvEventBatch, PushedFeed
from gorgo.core.peers.group import PeerGroup
from gorgo.core.policy.interface import hashed_block_sizes
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds

#: Models with retained block sizes: clients choose names.
_MAX_MODELS = 64


class RouterCaches:
    """Reports of the caches of a Router's replicas.

    Parameters
    ----------
    fleet, feeds, index, peers:
        The Router's.
    accuracy:
        How right each source of cached tokens was.
    dispatcher:
        Has the policies, which may need hashes of blocks themselves.
    """

    def __init__(
        self,
        fleet: Fleet,
        feeds: KvFeeds,
        index: PrefixIndex,
        peers: PeerGroup,
        accuracy: CacheAccuracy,
        dispatcher: Dispatcher,
    ) -> None:
        self._fleet = fleet
        self._feeds = feeds
        self._index = index
        self._peers = peers
        self._accuracy = accuracy
        self._dispatcher = dispatcher
        #: Block sizes by model, until feeds or models change.
        self._sizes: dict[str | None, frozenset[int]] = {}
        self._sizes_changes = (0, 0)

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]:
        """Apply the KV events of a replica.

        `model` is `None` for the only one of its replica, adapters included. `complete` is false while the feed may
        lack blocks: it joined a cache in use. The better of it and the history then counts.
        """
        member = self._fleet.replicas.get(replica)
        if member is not None:
            feeds, slot = self._feeds, member.slot
            cleared = feeds.apply(slot, batch, model=model, block_tokens=block_tokens, complete=complete, now=now)
            if cleared:
                self._index.flush(slot)
        return []

    def on_kv_lost(self, replica: str, *, now: float) -> list[Action]:
        """Forget a replica's events: the feed is lost, or has a gap. The history counts until events come again."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.lose_events(member.slot)
        return []

    def forget_some(self, replica: str, *, blocks: int, now: float) -> bool:
        """Begin `on_kv_lost` with up to `blocks` of the replica's blocks; return whether there were any."""
        member = self._fleet.replicas.get(replica)
        return member is not None and self._feeds.flush_some(member.slot, blocks=blocks, source="events") > 0

    def clear_some(self, replica: str, *, model: str | None, rank: int, blocks: int, now: float) -> bool:
        """Begin to apply a `CacheCleared` of a rank with up to `blocks` blocks; return whether there were any."""
        member = self._fleet.replicas.get(replica)
        if member is None:
            return False
        removed, whole = self._feeds.clear_some(member.slot, model=model, rank=rank, blocks=blocks)
        if whole and not removed:
            removed = self._index.flush_some(member.slot, blocks=blocks)
        return removed > 0

    def flush(self, replica: str | None = None, *, now: float) -> None:
        """Forget what is known of the cache of one replica or of all. Raises `UnknownReplica`."""
        members = self._fleet.replicas.values() if replica is None else (self._fleet.member(replica),)
        for member in members:
            self._index.flush(member.slot)
            self._peers.flush(member.slot)
            self._feeds.flush(member.slot)

    def flush_some(self, replica: str, *, blocks: int, now: float) -> bool:
        """Begin `flush` with about `blocks` of the replica's blocks; return whether there were any."""
        member = self._fleet.replicas.get(replica)
        if member is None:
            return False
        removed = self._index.flush_some(member.slot, blocks=blocks)
        return removed + self._feeds.flush_some(member.slot, blocks=blocks) > 0

    def on_snapshot(self, replica: str, snapshot: CacheSnapshot, *, now: float) -> list[Action]:
        """Replace the pushed blocks of a replica; ignored while it sends events."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.replace(member.slot, snapshot, now=now)
        return []

    def on_evictions(self, replica: str, evictions: CacheEvictions, *, now: float) -> list[Action]:
        """Remove evicted blocks of a replica's snapshot; ignored without one."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.evict(member.slot, evictions, now=now)
        return []

    def on_changes(self, replica: str, changes: CacheChanges, *, now: float) -> list[Action]:
        """Apply a part of the difference to the last snapshot of a replica; ignored without one."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.change(member.slot, changes, now=now)
        return []

    def on_push_lost(self, replica: str, *, now: float) -> list[Action]:
        """Forget a replica's pushes: they have ended. The history counts until it pushes again."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.drop(member.slot, "push")
        return []

    def pushed_feed(self, replica: str, model: str | None, block_tokens: int) -> PushedFeed | None:
        """Return what a replica has pushed of a model; `None` if it has not, or its events count instead."""
        member = self._fleet.replicas.get(replica)
        feed = None if member is None else self._feeds.pushed(member.slot, model, block_tokens)
        if member is None or feed is None:
            return None
        return PushedFeed(feed.number, feed.index.pushed.reported(member.slot))

    def sources(self, *, now: float) -> dict[str, CacheSourceStats]:
        """Return the source of each replica's cached tokens, and how right it was."""
        return {
            name: self._accuracy.stats(replica.slot, self._feeds, now=now)
            for name, replica in self._fleet.replicas.items()
        }

    def block_sizes(self, model: str | None) -> frozenset[int]:
        """Return the block sizes for which a request for `model` needs hashes: of feeds and of policies."""
        feeds, eligibility = self._feeds, self._fleet.eligibility
        own = hashed_block_sizes(self._dispatcher.policy, self._dispatcher.shadow)
        if not feeds.changes:
            return own
        changes = feeds.changes, eligibility.models_changes
        if changes != self._sizes_changes or len(self._sizes) >= _MAX_MODELS:
            self._sizes, self._sizes_changes = {}, changes
        sizes = self._sizes.get(model)
        if sizes is None:
            sizes = self._sizes[model] = feeds.block_sizes(eligibility.slots_serving(model), model)
        return sizes | own if own else sizes
