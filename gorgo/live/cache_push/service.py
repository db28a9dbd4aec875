"""Pushes into the Router: in the order of each engine, in steps that do not hold the event loop.

Owns the last snapshot of each source, and silence. See `source` for order and rate.

Theory of operation. Engines push their whole cache each few seconds, and little of it has changed. The difference to
the last snapshot is computed in a thread, and the Router gets it in slices, with other events in between. The Router
may have dropped the feed meanwhile (a restart, an operator's flush, events); then the whole snapshot is applied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.kv_events import CacheChanges, CacheEvictions, CacheSnapshot
from gorgo.core.router import Router
from gorgo.live.cache_push.source import CachePush, Order, PushSource
from gorgo.live.clock import Clock
from gorgo.live.http.errors import HttpError
from gorgo.live.logs import log
from gorgo.live.router_gateway import RouterGateway

Hashes = NDArray[np.uint64]

#: Hashes applied in one step of the event loop: half a millisecond, or one and a half while tables grow.
SLICE = 256
#: Smaller snapshots are compared in the event loop: about 1 ms.
INLINE = 8192
#: Between two searches for silent sources, s.
EXPIRY_S = 1.0


@dataclass(slots=True, eq=False)
class _Base:
    """What the Router has of a source: the feed's number there, the last snapshot sorted, and evictions since.

    `bound` are the blocks that the Router took of a snapshot with more, `None` if it took all.
    """

    feed: int
    snapshot: Hashes
    bound: int | None = None
    evicted: list[Hashes] = field(default_factory=list)

    def current(self) -> Hashes:
        if self.evicted:
            self.snapshot = self.snapshot[~np.isin(self.snapshot, np.concatenate(self.evicted))]
            self.evicted.clear()
        return self.snapshot


@dataclass(slots=True, eq=False)
class _Feed:
    """One replica's pushes on their way into the Router: one at a time, by model and block size."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    bases: dict[tuple[str | None, int], _Base] = field(default_factory=dict)


class PushService:
    """The pushes of all replicas.

    Parameters
    ----------
    router, gateway, clock:
        Of the running proxy.
    """

    def __init__(self, router: Router, gateway: RouterGateway, clock: Clock) -> None:
        self._router = router
        self._gateway = gateway
        self._clock = clock
        self._feeds: WeakKeyDictionary[PushSource, _Feed] = WeakKeyDictionary()

    async def sync(self, source: PushSource, push: CachePush) -> None:
        """Replace what the replica's cache has. Raises `HttpError` for a push that changes nothing."""
        async with self._feed(source).turn:
            await self._in_order(source, push)
            if not await self._replace(source, push):
                source.needs_snapshot = True
                message = "the replica reports its cache by KV events, which count instead of pushes"
                raise HttpError(409, "events_in_use", message)
            source.snapshot_applied(now=self._clock())

    async def evict(self, source: PushSource, push: CachePush) -> None:
        """Remove what the replica's cache has evicted. Raises as `sync`."""
        async with self._feed(source).turn:
            await self._in_order(source, push)
            source.stats.evictions += 1
            base = self._base(source, push)
            if base is None:
                source.needs_snapshot = True
                return
            base.evicted.append(push.hashes)
            for part in _slices(push.hashes):
                evictions = CacheEvictions(push.model, push.block_tokens, part.tolist())
                self._gateway.apply(self._router.caches.on_evictions(push.replica, evictions, now=self._clock()))
                await asyncio.sleep(0)

    async def expire(self, sources: Mapping[str, PushSource]) -> None:
        """Return to the history of requests for each replica whose pushes have ended."""
        for replica, source in list(sources.items()):
            turn = self._feed(source).turn
            # With a push on its way an engine is not silent.
            if not turn.locked() and source.expire(now=self._clock()):
                async with turn:
                    await self._forget(source, replica)
                log("cache_push_silent", level=logging.WARNING, replica=replica, in_use="the history of requests")

    async def run(self, sources: Callable[[], Mapping[str, PushSource]]) -> None:
        """Search for silent sources until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_S)
            await self.expire(sources())

    # -- helpers

    def _feed(self, source: PushSource) -> _Feed:
        feed = self._feeds.get(source)
        if feed is None:
            feed = self._feeds[source] = _Feed()
        return feed

    async def _in_order(self, source: PushSource, push: CachePush) -> None:
        order = source.order(push.epoch, push.sequence, now=self._clock())
        if order is Order.STALE:
            details = {"epoch": source.epoch, "sequence": source.sequence}
            raise HttpError(
                409, "stale_push", "a later push has been applied; this one changed nothing", details=details
            )
        if order is Order.NEW_RUN:
            await self._forget(source, push.replica)

    async def _forget(self, source: PushSource, replica: str) -> None:
        """Drop the pushes of a replica, most of their blocks in slices."""
        bases = self._feed(source).bases
        for (model, block_tokens), base in bases.items():
            for part in _slices(base.snapshot):
                changes = CacheChanges(model, block_tokens, added=(), removed=part.tolist())
                self._gateway.apply(self._router.caches.on_changes(replica, changes, now=self._clock()))
                await asyncio.sleep(0)
        bases.clear()
        self._gateway.apply(self._router.caches.on_push_lost(replica, now=self._clock()))

    def _base(self, source: PushSource, push: CachePush) -> _Base | None:
        """Return what the Router still has of this source; others that it has dropped are forgotten."""
        for (model, block_tokens), base in list(self._feed(source).bases.items()):
            feed = self._router.caches.pushed_feed(push.replica, model, block_tokens)
            if feed is None or feed.number != base.feed:
                del self._feed(source).bases[model, block_tokens]
        return self._feed(source).bases.get((push.model, push.block_tokens))

    async def _replace(self, source: PushSource, push: CachePush) -> bool:
        """Apply a snapshot; return whether the Router has a feed of it."""
        base = self._base(source, push)
        if base is not None and base.bound is not None and len(push.hashes) <= base.bound:
            # What was left out before may be in this one.
            await self._forget(source, push.replica)
            base = None
        snapshot, added, removed = await _compared(push.hashes, base)
        if base is None or self._base(source, push) is not base:
            added, removed = snapshot, snapshot[:0]
            first = CacheSnapshot(push.model, push.block_tokens, [])
            self._gateway.apply(self._router.caches.on_snapshot(push.replica, first, now=self._clock()))
        feed = self._router.caches.pushed_feed(push.replica, push.model, push.block_tokens)
        if feed is None:
            return False
        number = feed.number
        for changes in _changes(push, added, removed):
            self._gateway.apply(self._router.caches.on_changes(push.replica, changes, now=self._clock()))
            await asyncio.sleep(0)
            feed = self._router.caches.pushed_feed(push.replica, push.model, push.block_tokens)
            if feed is None or feed.number != number:
                return feed is not None
        bound = feed.reported_blocks if feed.reported_blocks < len(snapshot) else None
        self._feed(source).bases[push.model, push.block_tokens] = _Base(number, snapshot, bound)
        return True


async def _compared(hashes: Hashes, base: _Base | None) -> tuple[Hashes, Hashes, Hashes]:
    """Return the snapshot sorted, and what of it is new and what has left since the last one."""
    if len(hashes) + (0 if base is None else len(base.snapshot)) <= INLINE:
        return _difference(hashes, base)
    return await asyncio.to_thread(_difference, hashes, base)


def _difference(hashes: Hashes, base: _Base | None) -> tuple[Hashes, Hashes, Hashes]:
    # `np.unique` takes ten times as long, most of it with Python's lock.
    ordered = np.sort(hashes)
    snapshot = ordered[np.diff(ordered, prepend=ordered[:1] ^ 1) != 0]
    if base is None:
        return snapshot, snapshot, snapshot[:0]
    before = base.current()
    added = np.setdiff1d(snapshot, before, assume_unique=True)
    return snapshot, added, np.setdiff1d(before, snapshot, assume_unique=True)


def _changes(push: CachePush, added: Hashes, removed: Hashes) -> Iterator[CacheChanges]:
    """Yield the changes in slices, removals first; one without changes for an unchanged cache."""
    model, block_tokens = push.model, push.block_tokens
    for part in _slices(removed):
        yield CacheChanges(model, block_tokens, added=(), removed=part.tolist())
    for part in _slices(added):
        yield CacheChanges(model, block_tokens, added=part.tolist(), removed=())
    yield CacheChanges(model, block_tokens, added=(), removed=(), whole=True)


def _slices(hashes: Hashes) -> Iterator[Hashes]:
    for start in range(0, len(hashes), SLICE):
        yield hashes[start : start + SLICE]
