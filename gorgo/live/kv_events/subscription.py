"""The subscription to one publisher: sockets, connection and replays of a `PublisherFeed`, whose actions it takes.

Owns the frames of messages, the tasks and the order of actions: one input of the feed is handled at a time, its actions
included. Leaves decisions to `feed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import ModuleType
from typing import Any, Protocol

from gorgo.core.messages.kv_events import KvEventBatch, clears
from gorgo.engines.kv_events import decode_message
from gorgo.engines.kv_sources import KvEventSource
from gorgo.live.event_loop import Clock
from gorgo.live.kv_events.feed import Apply, FeedAction, Forget, PublisherFeed, Replay
from gorgo.live.kv_events.sockets import (
    Backlog,
    KvSockets,
    MessageRefusedError,
    Receiver,
    next_change,
    with_rest,
)
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats
from gorgo.live.logs import log

# The frames of a publisher's messages, of a request for a replay and of its answers.
#
# A message has a topic, a number and a payload. An answer begins with an empty frame, and older engines leave its
# topic out: the frames are counted from the end.


_NUMBER_BYTES = 8
#: Number of the answer that ends a replay: -1.
END = (1 << 64) - 1


def read_message(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return number and payload; `None` for frames of another form.

    >>> read_message([b"topic", b"\\0" * 7 + b"\\5", b"payload"])
    (5, b'payload')
    """
    if not 2 <= len(frames) <= 4 or len(frames[-2]) != _NUMBER_BYTES:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


def replay_request(start: int) -> list[bytes]:
    """Return the frames that request the messages from number `start` on."""
    return [b"", start.to_bytes(_NUMBER_BYTES, "big")]


def is_end(frames: Sequence[bytes]) -> bool:
    """Return whether an answer ends a replay; the first vLLM releases with replays end with empty frames."""
    message = read_message(frames)
    return not any(frames) if message is None else message[0] == END


# One replay: the messages that a publisher retains, from a number on.


#: Longest replay, and the longest pause in one: 10,000 messages take seconds.
REPLAY_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 2.0


async def replay(sockets: KvSockets, endpoint: str, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the messages from number `start` on.

    Raises `TimeoutError`, `MessageRefusedError`, and `zmq.ZMQError` for a bad address.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + REPLAY_TIMEOUT_S
    zmq = sockets.zmq
    with sockets.requesting(endpoint) as (socket, monitor, backlog):
        direct = zmq.Socket.shadow(socket.underlying)
        watching = asyncio.ensure_future(_watch_replay(zmq, monitor, backlog))
        try:
            # The request waits in the socket for the connection; without an end where ZeroMQ gave the connection up
            # before.
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await socket.send_multipart(replay_request(start))
            while True:
                first = await _before(watching, socket.recv(), min(deadline - loop.time(), IDLE_TIMEOUT_S))
                frames = with_rest(first, direct, zmq.NOBLOCK, zmq.RCVMORE)
                backlog.count_delivered(frames)
                if is_end(frames):
                    return
                message = read_message(frames)
                if message is not None:
                    yield message
        finally:
            watching.cancel()
            await asyncio.wait((watching,))


async def _watch_replay(zmq: ModuleType, monitor: Any, backlog: Backlog) -> None:
    """Look at what waits, until too much does. Raises `MessageRefusedError`."""

    async def follow() -> None:
        while True:
            await next_change(zmq, monitor, backlog)

    following = asyncio.ensure_future(follow())
    try:
        await backlog.watch()
    finally:
        following.cancel()
        await asyncio.wait((following,))


async def _before(watching: asyncio.Future[None], received: Awaitable[bytes], timeout_s: float) -> bytes:
    """Return what is received; raises `TimeoutError`, or the error of `watching` if that ends first."""
    future = asyncio.ensure_future(received)
    try:
        await asyncio.wait((watching, future), timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        if not future.done():
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


#: Between two attempts to open a socket; interval of the feed's timer.
REOPEN_S = 5.0
#: Time without a connection after which another socket is opened: ZeroMQ gives up a peer that once broke its protocol,
#: as a program does that has the port while an engine starts anew. Several times the longest pause between its trials.
RECONNECT_S = 20.0
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


class _NotConnected(Exception):  # noqa: N818 - what happened, as CancelledError
    """There was no connection for `RECONNECT_S`."""


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
            except* self._sockets.zmq.ZMQError as failed:
                self._log_end("kv_events_no_socket", failed)
            except* _NotConnected:
                pass  # another socket, below
            except* MessageRefusedError as refused:
                # A new socket has nothing of what the old one has received.
                self._log_end("kv_events_refused", refused)
                self._stats.rejected_messages += 1
                await self._handle(lambda: self.feed.disconnected(now=self._clock()))
            await asyncio.sleep(REOPEN_S)

    def _log_end(self, event: str, errors: BaseExceptionGroup[Exception]) -> None:
        fields = {"replica": self._replica, "endpoint": self.source.endpoint, "error": str(errors.exceptions[0])}
        log(event, level=logging.WARNING, **fields)

    async def _receive_all(self) -> None:
        with self._sockets.subscribed(self.source, taker=self) as (receiver, monitor, backlog):
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._receive(receiver))
                    tasks.create_task(self._watch(monitor, backlog))
                    tasks.create_task(backlog.watch())
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

    async def _watch(self, monitor: Any, backlog: Backlog) -> None:
        zmq, loop = self._sockets.zmq, asyncio.get_running_loop()
        retries = self.source.mode == "connect"
        due_s = loop.time() + RECONNECT_S if retries else None
        while True:
            try:
                async with asyncio.timeout_at(due_s):
                    event = await next_change(zmq, monitor, backlog)
            except TimeoutError:
                raise _NotConnected from None
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                due_s = None
                await self._handle(lambda: self.feed.connected(now=self._clock()))
            elif event == zmq.EVENT_DISCONNECTED:
                due_s = loop.time() + RECONNECT_S if retries else None
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
        except (TimeoutError, MessageRefusedError, self._sockets.zmq.ZMQError) as error:
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
