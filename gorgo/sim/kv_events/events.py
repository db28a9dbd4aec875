"""The events of one replica's cache from its publisher to the Router, with the subscriber's order and replays.

Owns the subscriber: what it does with gaps, doubles and restarts. `publisher` has the batches, `path` the way.

Theory of operation. Batches have numbers, so the subscriber drops doubles and sees gaps. In a gap it asks the engine
for a replay and queues what arrives meanwhile. If the engine has the missing batches no longer, or does not answer for
two minutes, the replica's blocks are forgotten and the feed goes on as a partial one. A router that starts asks for
all batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch
from gorgo.sim.engine.engines import CacheReporter, Engine
from gorgo.sim.kv_events.path import ReportPath
from gorgo.sim.kv_events.publisher import Publisher
from gorgo.sim.kv_events.tokens import BlockTokens

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
