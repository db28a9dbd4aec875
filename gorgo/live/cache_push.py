"""Pushes into the Router: in the order of each engine, in steps that do not hold the event loop.

Owns the reading of a push, the order and rate of each source (`PushSource`), its last snapshot, and its silence
(`PushService`). Leaves the routes to `admin.routes`, and the blocks to the Router.

Theory of operation. Engines push their whole cache each few seconds, and little of it has changed. The difference to
the last snapshot is computed in a thread, and the Router gets it in slices, with other events in between. The Router
may have dropped the feed meanwhile (a restart, an operator's flush, events); then the whole snapshot is applied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.kv_events import CacheChanges, CacheEvictions, CacheSnapshot
from gorgo.core.router import Router
from gorgo.live.event_loop import Clock, RouterGateway
from gorgo.live.http.errors import HttpError
from gorgo.live.logs import log

# What one engine has pushed: its run, the order of its pushes, its rate, and whether it is silent. Pure.
#
# Theory of operation. A push has the engine's run (`epoch`) and its place in that run (`sequence`). A push of an
# earlier run, or one that is overtaken, changes nothing: a later one has been applied. A place that is skipped is a
# lost push, which the next snapshot repairs. A source without a snapshot for `SILENT_S` is forgotten with its run, so
# that an engine whose clock went back is accepted again; no body takes as long to arrive.


#: Three snapshots, at one each 5 s.
SILENT_S = 15.0
#: Hashes of one push: a cache of 16 million tokens in blocks of 16.
MAX_HASHES = 1 << 20
#: Hashes per second of one engine: the largest snapshot each 5 s, and evictions. Each is a change of the index.
HASHES_PER_S = 1 << 18
#: Least cost of a push, in hashes: 256 pushes per second.
LEAST_HASHES = 1 << 10
#: An engine that starts, and one that repeats its snapshot after a lost push.
BURST_HASHES = 2 * MAX_HASHES


@dataclass(frozen=True, slots=True, eq=False)
class CachePush:
    """One push of an engine.

    Parameters
    ----------
    replica:
        Name of the engine's replica.
    model:
        `None` for all models of the replica, whose adapters have hashes of their own.
    block_tokens:
        Tokens per block.
    epoch:
        Run of the engine; a later run has a greater one.
    sequence:
        Place in the run, from 0 on by one.
    hashes:
        Own hashes (`core.prefix.kv_source`), in any order.
    """

    replica: str
    model: str | None
    block_tokens: int
    epoch: int
    sequence: int
    hashes: NDArray[np.uint64]


class Order(Enum):
    """Place of a push among those before it."""

    NEXT = "next"
    #: Of a new run: what the earlier one pushed is void.
    NEW_RUN = "new_run"
    #: Overtaken, or of an earlier run.
    STALE = "stale"


@dataclass(slots=True)
class PushStats:
    """Pushes of one replica since it joined."""

    snapshots: int = 0
    evictions: int = 0
    #: Overtaken or of an earlier run; skipped places; beyond the rate; times without a snapshot for long.
    stale: int = 0
    lost: int = 0
    limited: int = 0
    silences: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class PushSource:
    """The pushes of one replica.

    Example
    -------
    >>> source = PushSource()
    >>> [source.order(1, place, now=0.0).value for place in (0, 2, 1)]
    ['new_run', 'next', 'stale']
    >>> source.stats.lost, source.stats.stale, source.needs_snapshot
    (1, 1, True)
    """

    #: `None` before the first push and after a silence.
    epoch: int | None = None
    sequence: int = -1
    #: Time of the last snapshot, or of the first push of a run without one.
    synced_s: float = 0.0
    #: Whether evictions may lack blocks to remove, or have been lost: a snapshot at once is worth its bytes.
    needs_snapshot: bool = True
    stats: PushStats = field(default_factory=PushStats)
    _allowance: float = BURST_HASHES
    _filled_s: float = 0.0

    def order(self, epoch: int, sequence: int, *, now: float) -> Order:
        """Record the place of a push."""
        if self.epoch is None or epoch > self.epoch:
            self.epoch, self.sequence, self.synced_s, self.needs_snapshot = epoch, sequence, now, True
            return Order.NEW_RUN
        if epoch < self.epoch or sequence <= self.sequence:
            self.stats.stale += 1
            return Order.STALE
        lost = sequence - self.sequence - 1
        if lost:
            self.stats.lost += lost
            self.needs_snapshot = True
        self.sequence = sequence
        return Order.NEXT

    def snapshot_applied(self, *, now: float) -> None:
        """Record a snapshot."""
        self.stats.snapshots += 1
        self.synced_s, self.needs_snapshot = now, False

    def charge(self, hashes: int, *, now: float) -> float:
        """Charge a push; return how long it has to wait, 0 for one within the rate."""
        self._allowance = min(BURST_HASHES, self._allowance + (now - self._filled_s) * HASHES_PER_S)
        self._filled_s = now
        cost = max(LEAST_HASHES, hashes)
        if cost > self._allowance:
            self.stats.limited += 1
            return (cost - self._allowance) / HASHES_PER_S
        self._allowance -= cost
        return 0.0

    def expire(self, *, now: float) -> bool:
        """Forget the run of a silent engine; return whether it has become silent."""
        if self.epoch is None or now - self.synced_s < SILENT_S:
            return False
        self.epoch, self.sequence, self.needs_snapshot = None, -1, True
        self.stats.silences += 1
        return True


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


# Bodies of pushes: JSON, or packed hashes with the other fields in the query.
#
# A snapshot of a million hashes takes 8 MB packed, which needs no parsing, and 20 MB as JSON, which would hold the
# event loop for a quarter of a second. JSON is therefore for small pushes.


#: Media type of packed hashes: unsigned 64-bit integers, little-endian.
PACKED = "application/octet-stream"
HASH_BYTES = 8
MAX_PACKED_BYTES = MAX_HASHES * HASH_BYTES
#: Version of the protocol.
VERSION = 1
#: Tokens of the largest block of an engine, with room.
MAX_BLOCK_TOKENS = 65_536
MAX_NAME = 256
_MAX_NUMBER = (1 << 63) - 1

#: Keys of a JSON body, and of the query beside a packed one but for the hashes.
FIELDS = ("version", "worker_id", "model", "block_tokens", "epoch", "sequence")
KEYS = (*FIELDS, "hashes")


def from_json(body: Mapping[str, Any]) -> CachePush:
    """Return the push of a JSON body. Raises `HttpError` (400) for the first wrong key."""
    for key in body:
        if key not in KEYS:
            raise _refused(f"{key[:60]!r}: unknown key; expected {', '.join(KEYS)}")
    return _push(body, _listed(body.get("hashes")))


def from_query(query: Iterable[tuple[str, str]]) -> CachePush:
    """Return the push that a query describes, without hashes. Raises `HttpError` (400)."""
    fields: dict[str, Any] = {}
    for name, text in query:
        if name not in FIELDS or name in fields:
            raise _refused(f"{name[:60]!r}: unknown or repeated; expected in the query {', '.join(FIELDS)}, each once")
        is_text = name in ("worker_id", "model")
        fields[name] = text if is_text else _number(name, text)
    return _push(fields, np.empty(0, dtype=np.uint64))


def unpacked(body: bytes | bytearray) -> NDArray[np.uint64]:
    """Return the hashes of a packed body. Raises `HttpError` (400)."""
    if len(body) % HASH_BYTES:
        raise _refused(f"the body has {len(body)} bytes; expected 8 per hash")
    return np.frombuffer(body, dtype="<u8").astype(np.uint64, copy=False)


def _push(fields: Mapping[str, Any], hashes: NDArray[np.uint64]) -> CachePush:
    if fields.get("version", VERSION) != VERSION:
        raise HttpError(400, "unsupported_version", f"version: expected {VERSION}, the only one")
    model = fields.get("model")
    return CachePush(
        replica=_text("worker_id", fields.get("worker_id"), "the name of the engine's replica"),
        model=None if model is None else _text("model", model, "the name of a model, or none for all of the replica"),
        block_tokens=_count("block_tokens", fields.get("block_tokens"), 1, MAX_BLOCK_TOKENS),
        epoch=_count("epoch", fields.get("epoch"), 0, _MAX_NUMBER),
        sequence=_count("sequence", fields.get("sequence"), 0, _MAX_NUMBER),
        hashes=hashes,
    )


def _listed(value: object) -> NDArray[np.uint64]:
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 1 << 64 for each in value):
        raise _refused("hashes: expected a list of whole numbers from 0 to 2^64 - 1")
    return np.array(value, dtype=np.uint64)


def _text(name: str, value: object, expected: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise _refused(f"{name}: expected {expected}")
    return value


def _count(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _refused(f"{name}: expected a whole number from {low} to {high}")
    return value


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise _refused(f"{name}: expected a whole number")
    return int(text)


def _refused(message: str) -> HttpError:
    return HttpError(400, "invalid_request", message)
