"""What the engines of a run report of their caches to the Router, by the kind chosen.

Owns the feeds of all replicas, the own hashes of requests, and a report's way: one trip each, in order, and what can go
wrong on it. Its parts, in the order of the file:

- `ReportPath`: delivery times and faults of the way;
- `BlockTokens`: token ids and own hashes of simulated prompts;
- `PushFeed`: pushes of one replica's cache;
- `Publisher` and `EventFeed`: KV events of one replica, and the router's subscriber to them;
- `CacheReporting`: the feeds of a run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvictions,
    CacheSnapshot,
    KvEvent,
    KvEventBatch,
    KvTier,
)
from gorgo.core.messages.request import Outcome
from gorgo.core.prefix.kv_source import TOKEN_BYTES, next_hash
from gorgo.core.router import Router
from gorgo.lab.sim.engine.engines import CacheReporter, Engine
from gorgo.lab.sim.engine.kv_cache import KvObserver
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import RandomTable, TripDelays
from gorgo.lab.sim.port import Reachable
from gorgo.lab.sim.remote_replica import RemoteReplica


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFaults:
    """What happens to messages that are sent from now on.

    Parameters
    ----------
    lost, doubled, reordered:
        Shares of messages that never arrive, arrive twice, or arrive `reordered_s` later than those behind them.
    late_s:
        Added to each trip.
    cut:
        No message arrives, in either direction. Requests are served.
    """

    lost: float = 0.0
    doubled: float = 0.0
    reordered: float = 0.0
    reordered_s: float = 0.5
    late_s: float = 0.0
    cut: bool = False


@dataclass(slots=True)
class PathTotals:
    """Messages sent, and what they carried."""

    messages: int = 0
    hashes: int = 0
    tokens: int = 0
    #: Time from each eviction to its application, s.
    eviction_delays_s: list[float] = field(default_factory=list)


class ReportPath:
    """Carries messages of one replica to the router.

    Parameters
    ----------
    kernel, replica, trips:
        Event queue, the other end, and delays of these trips.
    instant:
        Whether a message arrives in the moment in which it is sent, for full knowledge.
    """

    def __init__(self, kernel: EventQueue, replica: Reachable, trips: TripDelays, *, instant: bool = False) -> None:
        self._kernel = kernel
        self._replica = replica
        self._trips = trips
        self._instant = instant
        self._last_arrival_s = 0.0
        self.faults = PathFaults()
        self.totals = PathTotals()

    @property
    def now(self) -> float:
        return self._kernel.now

    @property
    def is_open(self) -> bool:
        """Whether messages pass."""
        return self._replica.alive and not self.faults.cut

    def carry(self, deliver: Callable[[], None]) -> None:
        """Carry a message, unless it is lost."""
        faults = self.faults
        if not self.is_open or self._happens(faults.lost):
            return
        copies = 2 if self._happens(faults.doubled) else 1
        arrival_s = max(self._last_arrival_s, self._kernel.now + self.trip_s())
        if self._happens(faults.reordered):
            arrival_s += faults.reordered_s
        else:
            self._last_arrival_s = arrival_s
        for _ in range(copies):
            self._kernel.at(arrival_s, deliver)

    def request(
        self, answer: Callable[[], Callable[[], None]], unanswered: Callable[[], None], *, give_up_s: float
    ) -> None:
        """Carry a request to the replica and its answer back; call `unanswered` after `give_up_s` if the way is cut."""
        if not self.is_open:
            self._kernel.at(self._kernel.now + give_up_s, unanswered)
            return
        self._kernel.at(self._kernel.now + self.trip_s(), partial(self._answer, answer, unanswered, give_up_s))

    def trip_s(self) -> float:
        """Return the time of the next trip."""
        return 0.0 if self._instant else self._trips.one_way_s(self._replica.link) + self.faults.late_s

    def after(self, seconds: float, handler: Callable[[], None]) -> None:
        self._kernel.at(self._kernel.now + seconds, handler)

    def _answer(
        self, answer: Callable[[], Callable[[], None]], unanswered: Callable[[], None], give_up_s: float
    ) -> None:
        if self.is_open:
            self._kernel.at(max(self._last_arrival_s, self._kernel.now + self.trip_s()), answer())
        else:
            self._kernel.at(self._kernel.now + give_up_s, unanswered)

    def _happens(self, share: float) -> bool:
        return share > 0.0 and self._trips.uniform() < share


# Token ids and own hashes of simulated prompts, whose cache items stand for many tokens.
#
# Requests and events expand an item to the same tokens, so their own hashes are equal where their items are, as those
# of a served engine are where tokens are equal.


#: Hashes in memory, about 200 bytes each: more than the distinct blocks of a run.
_MAX_HASHES = 1_000_000


class BlockTokens:
    """Tokens of blocks: an item's bytes again and again, four for each of its tokens.

    Parameters
    ----------
    item_bytes, item_tokens:
        Of one cache item.
    block_tokens:
        Tokens of a block, a whole number of items.

    Example
    -------
    >>> from gorgo.core.prefix.kv_source import chain_hashes
    >>> tokens = BlockTokens(item_bytes=8, item_tokens=512, block_tokens=512)
    >>> expanded = tokens.expand(b"item---1item---2")
    >>> len(expanded), tokens.hashes(b"item---1item---2") == chain_hashes(expanded, block_tokens=512)
    (4096, True)
    """

    def __init__(self, *, item_bytes: int, item_tokens: int, block_tokens: int) -> None:
        assert block_tokens % item_tokens == 0, "a block has whole items"
        self.block_tokens = block_tokens
        self._item_bytes = item_bytes
        self._token_bytes = item_tokens * TOKEN_BYTES
        self._repeats = -(-self._token_bytes // item_bytes)
        self._block_bytes = block_tokens // item_tokens * item_bytes
        #: (own hash of the block before, items) -> own hash.
        self._hashes: dict[tuple[int, bytes], int] = {}

    def expand(self, items: bytes) -> bytes:
        """Return the packed token ids of whole items."""
        size = self._item_bytes
        pieces = (items[start : start + size] for start in range(0, len(items), size))
        return b"".join([(piece * self._repeats)[: self._token_bytes] for piece in pieces])

    def hashes(self, items: bytes, root: int = 0) -> list[int]:
        """Return the own hash of each full block behind `root`."""
        size, hashes = self._block_bytes, []
        for end in range(size, len(items) + 1, size):
            piece = items[end - size : end]
            own_hash = self._hashes.get((root, piece))
            if own_hash is None:
                own_hash = self._remember(root, piece)
            hashes.append(own_hash)
            root = own_hash
        return hashes

    def _remember(self, root: int, piece: bytes) -> int:
        if len(self._hashes) >= _MAX_HASHES:
            self._hashes.clear()
        own_hash = self._hashes[root, piece] = next_hash(root, self.expand(piece))
        return own_hash


# Pushes of one replica's cache: its full set of blocks each five seconds, and evictions in batches of 100 ms.
#
# Nothing is numbered and nothing is repeated: what a lost push said is known with the next full set.


#: Between two full sets, and between the first eviction of a batch and its push, s.
SNAPSHOT_S, EVICTIONS_S = 5.0, 0.1


class PushSink(Protocol):
    """Receiver of pushes."""

    def on_cache_snapshot(self, replica: str, snapshot: CacheSnapshot) -> None: ...

    def on_cache_evictions(self, replica: str, evictions: CacheEvictions) -> None: ...


class PushFeed(CacheReporter, KvObserver):
    """The reporter of one replica; parameters as in `EventFeed`. `first_s` is the time of its first full set."""

    def __init__(self, name: str, path: ReportPath, tokens: BlockTokens, sink: PushSink, *, first_s: float) -> None:
        self._name = name
        self.path = path
        self._tokens = tokens
        self._sink = sink
        #: Engine's hash -> own hash, and copies of each own one, of the engine that runs.
        self._own: dict[int, int] = {}
        self._copies: Counter[int] = Counter()
        #: Evicted since the last push: own hash and time.
        self._evicted: dict[int, float] = {}
        self.path.after(first_s, self._push_snapshot)

    def attach(self, model: Engine[Any]) -> None:
        """Report the cache of an engine that starts."""
        self._forget()
        model.cache.report_to(self)

    def started(self) -> None:
        """Push the empty cache of an engine that is back."""
        self._send_snapshot()

    def rejoin(self) -> None:
        """Change nothing: the reporter does not know."""

    # -- the observer of the cache

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        root = 0 if parent is None else self._own[parent]
        for engine_hash, own_hash in zip(hashes, self._tokens.hashes(items, root), strict=True):
            self._own[engine_hash] = own_hash
            self._copies[own_hash] += 1
            self._evicted.pop(own_hash, None)

    def removed(self, hashes: Sequence[int]) -> None:
        for engine_hash in hashes:
            own_hash = self._own[engine_hash]
            self._copies[own_hash] -= 1
            if not self._copies[own_hash]:
                del self._copies[own_hash], self._own[engine_hash]
                if not self._evicted:
                    self.path.after(EVICTIONS_S, self._push_evictions)
                self._evicted[own_hash] = self.path.now

    def cleared(self) -> None:
        self._forget()

    # -- pushes

    def _forget(self) -> None:
        self._own.clear()
        self._copies.clear()
        self._evicted.clear()

    def _push_snapshot(self) -> None:
        self._send_snapshot()
        self.path.after(SNAPSHOT_S, self._push_snapshot)

    def _send_snapshot(self) -> None:
        snapshot = CacheSnapshot(model=None, block_tokens=self._tokens.block_tokens, hashes=tuple(self._copies))
        self._count(len(snapshot.hashes))
        self.path.carry(partial(self._sink.on_cache_snapshot, self._name, snapshot))

    def _push_evictions(self) -> None:
        if not self._evicted:
            return  # Cleared or stored again meanwhile.
        evicted, self._evicted = self._evicted, {}
        self._count(len(evicted))
        self.path.carry(partial(self._receive_evictions, evicted))

    def _receive_evictions(self, evicted: dict[int, float]) -> None:
        self.path.totals.eviction_delays_s.extend(self.path.now - at_s for at_s in evicted.values())
        self._sink.on_cache_evictions(
            self._name, CacheEvictions(model=None, block_tokens=self._tokens.block_tokens, hashes=tuple(evicted))
        )

    def _count(self, hashes: int) -> None:
        self.path.totals.messages += 1
        self.path.totals.hashes += hashes


# The publisher of one engine's KV events: a numbered batch per moment, and the newest batches for replays. An engine
# that starts has a new publisher, whose numbers begin at 0.


#: Batches that an engine can replay: vLLM's and SGLang's default.
BUFFERED_BATCHES = 10_000
_MASK = (1 << 64) - 1


class Publisher(KvObserver):
    """Observes a cache and numbers its batches.

    Parameters
    ----------
    tokens:
        Expansion of the items.
    pending:
        Called with it at the first event since the last batch.
    """

    def __init__(self, tokens: BlockTokens, pending: Callable[[Publisher], None]) -> None:
        self._tokens = tokens
        self._pending = pending
        self._events: list[KvEvent] = []
        self._buffer: deque[KvEventBatch] = deque(maxlen=BUFFERED_BATCHES)
        #: Number of the next batch.
        self.next_number = 0

    # -- the observer of the cache

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        self._add(
            BlocksStored(
                hashes=tuple([one & _MASK for one in hashes]),
                parent=None if parent is None else parent & _MASK,
                tokens=self._tokens.expand(items),
                block_tokens=self._tokens.block_tokens,
                tier=KvTier.GPU,
            )
        )

    def removed(self, hashes: Sequence[int]) -> None:
        self._add(BlocksRemoved(hashes=tuple([one & _MASK for one in hashes]), tier=KvTier.GPU))

    def cleared(self) -> None:
        self._add(CacheCleared())

    # -- batches

    def take_batch(self, *, now: float) -> tuple[int, KvEventBatch]:
        """Return the events since the last batch, with their number."""
        batch = KvEventBatch(sent_s=now, rank=0, events=tuple(self._events))
        self._events.clear()
        self._buffer.append(batch)
        self.next_number += 1
        return self.next_number - 1, batch

    def replay(self, first: int) -> tuple[int, list[KvEventBatch]]:
        """Return the batches from number `first` on, or the oldest there is, with the number of the first one."""
        oldest = self.next_number - len(self._buffer)
        begins = max(first, oldest)
        return begins, list(self._buffer)[begins - oldest :]

    def _add(self, event: KvEvent) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._pending(self)


# The events of one replica's cache from its publisher to the Router, with the subscriber's order and replays.
#
# Theory of operation. Batches have numbers, so the subscriber drops doubles and sees gaps. In a gap it asks the engine
# for a replay and queues what arrives meanwhile. If the engine has the missing batches no longer, or does not answer
# for two minutes, the replica's blocks are forgotten and the feed goes on as a partial one. A router that starts asks
# for all batches.


#: Between two attempts at a replay, and until it is given up, s.
RETRY_S, GIVE_UP_S = 5.0, 120.0


class EventSink(Protocol):
    """Receiver of what the subscriber applies."""

    def on_kv_events(self, replica: str, batch: KvEventBatch, *, block_tokens: int, complete: bool) -> None: ...

    def on_kv_lost(self, replica: str) -> None: ...


class EventFeed(CacheReporter):
    """Publisher and subscriber of one replica.

    Parameters
    ----------
    name, path, tokens, sink:
        The replica, the way to it, the expansion of its items, and the Router.
    """

    def __init__(self, name: str, path: ReportPath, tokens: BlockTokens, sink: EventSink) -> None:
        self._name = name
        self.path = path
        self._tokens = tokens
        self._sink = sink
        self._publisher = Publisher(tokens, self._pending)
        self._attached = False
        #: The publisher followed, the number of its next batch, and whether all its batches so far were applied.
        self._followed, self._expected, self._complete = self._publisher, 0, True
        #: Batches that wait for a replay; `None`: none is under way.
        self._queued: dict[int, KvEventBatch] | None = None
        #: Batches applied for the first time; a router that restarts gets some again.
        self._applied = 0
        self._requested_s = 0.0

    def attach(self, model: Engine[Any]) -> None:
        """Publish the events of an engine that starts."""
        if self._attached:
            self._publisher = Publisher(self._tokens, self._pending)
        self._attached, self._applied = True, 0
        model.cache.report_to(self._publisher)

    def started(self) -> None:
        """Publish the first batch of an engine that is back: its cache is empty."""
        self._publisher.cleared()

    def rejoin(self) -> None:
        """Join again, without any block."""
        self._sink.on_kv_lost(self._name)
        self._follow(self._publisher)
        self._request_replay()

    # -- the publisher's side

    def _pending(self, publisher: Publisher) -> None:
        """Send what this moment brings as one batch, as an engine does after each step."""
        self.path.after(0.0, partial(self._publish, publisher))

    def _publish(self, publisher: Publisher) -> None:
        if publisher is not self._publisher:
            return  # Its engine died.
        number, batch = publisher.take_batch(now=self.path.now)
        totals = self.path.totals
        totals.messages += 1
        for event in batch.events:
            if not isinstance(event, CacheCleared):
                totals.hashes += len(event.hashes)
            if isinstance(event, BlocksStored):
                totals.tokens += len(event.hashes) * self._tokens.block_tokens
        self.path.carry(partial(self._receive, publisher, number, batch))

    # -- the subscriber's side

    def _receive(self, publisher: Publisher, number: int, batch: KvEventBatch) -> None:
        if publisher is not self._followed:
            if publisher is not self._publisher:
                return  # Of an engine that died.
            self._follow(publisher)
            self._apply(KvEventBatch(sent_s=None, rank=0, events=(CacheCleared(),)))
        if self._queued is not None:
            self._queued[number] = batch
        elif number == self._expected:
            self._expected += 1
            self._apply(batch)
        elif number > self._expected:
            self._request_replay()
            self._queued = {number: batch}

    def _follow(self, publisher: Publisher) -> None:
        self._followed, self._expected, self._complete, self._queued = publisher, 0, True, None

    def _request_replay(self) -> None:
        self._queued = {}
        self._requested_s = self.path.now
        self._request()

    def _request(self) -> None:
        self.path.request(
            partial(self._replayed, self._followed, self._expected),
            partial(self._unanswered, self._followed),
            give_up_s=RETRY_S,
        )

    def _replayed(self, publisher: Publisher, first: int) -> Any:
        """Read the replay at the engine; return what the subscriber does with it."""
        begins, batches = publisher.replay(first)
        return partial(self._catch_up, publisher, begins, batches)

    def _catch_up(self, publisher: Publisher, begins: int, batches: list[KvEventBatch]) -> None:
        if publisher is not self._followed or self._queued is None:
            return
        if begins > self._expected:
            self._lose(begins)
        for number, batch in enumerate(batches, begins):
            if number == self._expected:
                self._expected += 1
                self._apply(batch)
        self._drain()

    def _unanswered(self, publisher: Publisher) -> None:
        if publisher is not self._followed or self._queued is None:
            return
        if self.path.now - self._requested_s < GIVE_UP_S:
            self._request()
        else:
            self._lose(min(self._queued, default=self._expected))
            self._drain()

    def _lose(self, following: int) -> None:
        """Forget the blocks: the batches before `following` are gone."""
        self._expected, self._complete = following, False
        self._sink.on_kv_lost(self._name)

    def _drain(self) -> None:
        """Apply what was queued; a further gap starts a further replay."""
        queued: Mapping[int, KvEventBatch] = self._queued or {}
        self._queued = None
        for number in sorted(queued):
            self._receive(self._followed, number, queued[number])

    def _apply(self, batch: KvEventBatch) -> None:
        if batch.sent_s is not None and self._expected > self._applied:
            self._applied = self._expected
            delay_s = self.path.now - batch.sent_s
            removals = sum(isinstance(event, BlocksRemoved) for event in batch.events)
            self.path.totals.eviction_delays_s.extend([delay_s] * removals)
        self._sink.on_kv_events(self._name, batch, block_tokens=self._tokens.block_tokens, complete=self._complete)


#: `none`: nothing. `usage`: the cached tokens of each completed request. The others add to that: `push` full sets and
#: evictions, `events` KV events, `exact` KV events without any delay.
CacheReports = Literal["none", "usage", "push", "events", "exact"]
#: First row of the random table for reports; those of requests and probes are below.
_REPORTS_KEY = 1 << 41
_ITEM_BYTES = 8


class KvFeed(Protocol):
    """Reports of one replica."""

    path: ReportPath

    def rejoin(self) -> None:
        """Report to a router that has started again."""


class CacheReporting:
    """The feeds of a run.

    Parameters
    ----------
    kind:
        What is reported.
    kernel, router, carry_out:
        Event queue, receiver, and what does the Router's actions.
    sites:
        The replicas; their engines have not started.
    draws, item_tokens:
        As in `RemoteReplica`.
    """

    def __init__(
        self,
        kind: CacheReports,
        kernel: EventQueue,
        router: Router,
        carry_out: Callable[[Sequence[Action]], None],
        sites: Sequence[RemoteReplica],
        *,
        draws: RandomTable,
        item_tokens: int,
    ) -> None:
        self._kind = kind
        self._kernel = kernel
        self._router = router
        self._carry_out = carry_out
        self.feeds: dict[str, KvFeed] = {}
        self._tokens: dict[int, BlockTokens] = {}
        for number, site in enumerate(sites if kind in ("push", "events", "exact") else ()):
            block_tokens = site.model.cache.event_tokens
            tokens = self._tokens.setdefault(
                block_tokens, BlockTokens(item_bytes=_ITEM_BYTES, item_tokens=item_tokens, block_tokens=block_tokens)
            )
            path = ReportPath(kernel, site, TripDelays(draws, _REPORTS_KEY + number), instant=kind == "exact")
            feed: EventFeed | PushFeed
            if kind == "push":
                # Reporters start apart from one another.
                feed = PushFeed(site.name, path, tokens, self, first_s=SNAPSHOT_S * number / len(sites))
            else:
                feed = EventFeed(site.name, path, tokens, self)
            site.report_to(feed)
            self.feeds[site.name] = feed

    def hashes(self, blocks: bytes) -> Mapping[int, Sequence[int]]:
        """Return the own hashes of a prompt by the block sizes in use; none without events and pushes."""
        return {size: tokens.hashes(blocks) for size, tokens in self._tokens.items()}

    def reported(self, outcome: Outcome) -> Outcome:
        """Return an outcome as the Router receives it."""
        return replace(outcome, cached_tokens=None) if self._kind == "none" else outcome

    def restart_router(self) -> None:
        """Empty the Router's index of every replica, as after a restart; requests go on."""
        self._router.caches.flush(now=self._kernel.now)
        for feed in self.feeds.values():
            feed.rejoin()

    # -- what arrives

    def on_kv_events(self, replica: str, batch: KvEventBatch, *, block_tokens: int, complete: bool) -> None:
        self._carry_out(
            self._router.caches.on_kv_events(
                replica, batch, model=None, block_tokens=block_tokens, complete=complete, now=self._kernel.now
            )
        )

    def on_kv_lost(self, replica: str) -> None:
        self._carry_out(self._router.caches.on_kv_lost(replica, now=self._kernel.now))

    def on_cache_snapshot(self, replica: str, snapshot: CacheSnapshot) -> None:
        self._carry_out(self._router.caches.on_snapshot(replica, snapshot, now=self._kernel.now))

    def on_cache_evictions(self, replica: str, evictions: CacheEvictions) -> None:
        self._carry_out(self._router.caches.on_evictions(replica, evictions, now=self._kernel.now))
