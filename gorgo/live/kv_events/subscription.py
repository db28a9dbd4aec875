"""The subscription to one publisher: sockets, connection and replays of a `PublisherFeed`, whose actions it takes.

Owns the tasks and the order of actions: one input of the feed is handled at a time, its actions included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Protocol

from gorgo.core.messages.kv_events import KvEventBatch, clears
from gorgo.engines.kv_events import decode_message
from gorgo.engines.kv_sources import KvEventSource
from gorgo.live.clock import Clock
from gorgo.live.kv_events.actions import Apply, FeedAction, Forget, Replay
from gorgo.live.kv_events.feed import PublisherFeed
from gorgo.live.kv_events.frames import read_message
from gorgo.live.kv_events.receiver import Receiver
from gorgo.live.kv_events.replay import replay
from gorgo.live.kv_events.sockets import KvSockets
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats
from gorgo.live.logs import log

#: Between two attempts to open a socket; interval of the feed's timer.
REOPEN_S = 5.0
TICK_S = 1.0
#: Longest message that is decoded in one step and applied in another, each of half a millisecond: 1,800 removals or 200
#: blocks. A request waits for at most one of them.
QUICK_BYTES = 16 * 1024


class FeedSink(Protocol):
    """The Router, for one publisher."""

    def apply_batch(self, batch: KvEventBatch, era: int, subscription: Subscription) -> None:
        """Pass the events of a short message."""

    async def apply_message(self, action: Apply, subscription: Subscription) -> None: ...

    async def forget_blocks(self, subscription: Subscription, *, restarted: bool) -> None: ...

    def changed(self) -> None:
        """Note that the state of a feed may be another."""


class Subscription:
    """One publisher's messages, from its sockets to the Router.

    Parameters
    ----------
    slots:
        Bounds the replays of all subscriptions that run at once.
    """

    def __init__(
        self,
        replica: str,
        source: KvEventSource,
        sockets: KvSockets,
        slots: asyncio.Semaphore,
        sink: FeedSink,
        stats: KvFeedStats,
        clock: Clock,
    ) -> None:
        self.source = source
        self.feed = PublisherFeed(replays=source.replay is not None, stats=stats)
        self._replica = replica
        self._sockets = sockets
        self._slots = slots
        self._sink = sink
        self._stats = stats
        self._clock = clock
        self._lock = asyncio.Lock()
        #: Inputs being handled, those that wait for it included.
        self._inputs = 0
        #: A short message that is decoded and not applied yet: payload, events, era.
        self._decoded: tuple[bytes, KvEventBatch, int] | None = None
        self._wanted: Replay | None = None
        self._requested = asyncio.Event()

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            try:
                await self._receive_all()
            except self._sockets.zmq.ZMQError as error:
                fields = {"replica": self._replica, "endpoint": self.source.endpoint, "error": str(error)}
                log("kv_events_no_socket", level=logging.WARNING, **fields)
            await asyncio.sleep(REOPEN_S)

    async def _receive_all(self) -> None:
        with self._sockets.subscribed(self.source, taker=self) as (receiver, monitor):
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._receive(receiver))
                    tasks.create_task(self._watch(monitor))
                    tasks.create_task(self._replay_all())
                    tasks.create_task(self._tick())
            finally:
                self.finish_message()

    async def _receive(self, receiver: Receiver) -> None:
        while True:
            frames = await receiver.next_message()
            message = read_message(frames)
            if message is None:
                self._stats.rejected_messages += 1
                continue
            number, payload = message
            self._count(payload)
            await self._handle(lambda: self.feed.received(number, payload, now=self._clock()))  # noqa: B023 - awaited

    def take_message(self, frames: list[bytes]) -> bool:
        """Decode a short message that only continues the last one; return whether it does. Most do."""
        message = read_message(frames)
        if message is None or self._inputs:
            return False
        number, payload = message
        if len(payload) > QUICK_BYTES or not self.feed.continues(number):
            return False
        try:
            batch = decode_message(payload)
        except ValueError:
            return False
        if clears(batch.events):
            return False
        self._decoded = payload, batch, self.feed.continued(number, payload, now=self._clock())
        return True

    def finish_message(self) -> bool:
        """Apply the message that was decoded; return whether there was one."""
        if self._decoded is None:
            return False
        payload, batch, era = self._decoded
        self._decoded = None
        self._count(payload)
        self._sink.apply_batch(batch, era, self)
        if self._stats.state != FeedState.LIVE or not self.feed.known.complete:
            self._sink.changed()
        return True

    async def _watch(self, monitor: Any) -> None:
        zmq = self._sockets.zmq
        while True:
            event = await zmq.utils.monitor.recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await self._handle(lambda: self.feed.connected(now=self._clock()))
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                await self._handle(lambda: self.feed.disconnected(now=self._clock()))

    async def _replay_all(self) -> None:
        while True:
            await self._requested.wait()
            self._requested.clear()
            assert self._wanted is not None
            async with self._slots:
                await self._replay(self._wanted)

    async def _replay(self, wanted: Replay) -> None:
        assert self.source.replay is not None, "the feed requests none without"
        generation = wanted.generation
        try:
            async with aclosing(replay(self._sockets, self.source.replay, wanted.start)) as messages:
                async for number, payload in messages:
                    if self._requested.is_set():
                        return  # another replay is wanted by now
                    self._count(payload)
                    await self._handle(lambda: self.feed.replayed(generation, number, payload))  # noqa: B023 - awaited
        except (TimeoutError, self._sockets.zmq.ZMQError) as error:
            reason = str(error) or "no answer in time"
            fields = {"replica": self._replica, "endpoint": self.source.replay, "reason": reason}
            log("kv_events_replay_failed", level=logging.WARNING, **fields)
            await self._handle(lambda: self.feed.replay_failed(generation, now=self._clock()))
            return
        await self._handle(lambda: self.feed.replay_ended(generation, now=self._clock()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._handle(lambda: self.feed.tick(now=self._clock()))

    def _count(self, payload: bytes) -> None:
        self._stats.messages += 1
        self._stats.bytes += len(payload)

    async def _handle(self, decide: Callable[[], list[FeedAction]]) -> None:
        self._inputs += 1
        try:
            self.finish_message()
            async with self._lock:
                for action in decide():
                    match action:
                        case Apply():
                            await self._sink.apply_message(action, self)
                        case Forget():
                            await self._sink.forget_blocks(self, restarted=action.restarted)
                        case Replay():
                            self._wanted = action
                            self._requested.set()
                self._sink.changed()
        finally:
            self._inputs -= 1
