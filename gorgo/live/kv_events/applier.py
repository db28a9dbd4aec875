"""The way of a replica's KV events into the Router, in steps that each hold the event loop for a short time.

Owns the decoding of large messages in a process beside the event loop (`KvDecoder`), what the subscribers of one proxy
share (`KvSubscriptions`), and the application of events (`KvEventsApplier`). Leaves the order of messages to `feed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import BlocksStored, CacheCleared, KvEventBatch, clears
from gorgo.engines.kv_events import decode_message
from gorgo.live.event_loop import Clock
from gorgo.live.helper_process import HelperFailed, HelperProcess
from gorgo.live.kv_events.feed import Apply
from gorgo.live.kv_events.pieces import PIECE_BLOCKS, pieces, until_cleared
from gorgo.live.kv_events.sockets import KvSockets, Turn, import_zmq
from gorgo.live.kv_events.subscription import Subscription
from gorgo.live.kv_feed_stats import KvFeedStats
from gorgo.live.logs import log

# Decoding of large messages, in a process beside the event loop.
#
# A thread would not do: decoding a field of a million tokens holds Python's lock for tens of milliseconds.


#: Longest message that the event loop decodes itself, in about a millisecond: the events of a prompt of 10,000 tokens.
LOOP_BYTES = 64 * 1024
#: For one answer, a start of the process included; the largest message takes some tenths of a second.
TIMEOUT_S = 30.0
#: Added to the proxy's own: where processors are few, the event loop goes first.
NICENESS = 10


class KvDecoder:
    """Decodes the large messages of all replicas; the process starts with the first one."""

    def __init__(self) -> None:
        self._helper = HelperProcess("gorgo.live.kv_events.worker", niceness=NICENESS, timeout_s=TIMEOUT_S)

    async def decode(self, message: bytes) -> AsyncGenerator[KvEventBatch, None]:
        """Yield the events of a message in pieces. Raises `ValueError`, also if two processes failed at it."""
        refusal: str | None = None
        try:
            async with aclosing(self._helper.answers(message)) as answers:
                async for answer in answers:
                    if isinstance(answer, str):
                        refusal = answer
                    else:
                        yield answer
        except HelperFailed as failure:
            raise ValueError(f"the process that decodes it {failure}") from None
        if refusal is not None:
            raise ValueError(refusal)

    async def aclose(self) -> None:
        """End the process."""
        await self._helper.aclose()


# What the subscribers of one proxy share.


#: Replays of all replicas that run at once: after a restart of the proxy each replica has one.
MAX_REPLAYS_AT_ONCE = 8


class KvSubscriptions:
    """Sockets, slots of replays, turns of the event loop, and the published states by replica."""

    def __init__(self, stats: dict[str, KvFeedStats] | None = None) -> None:
        self.stats: dict[str, KvFeedStats] = {} if stats is None else stats
        self.replay_slots = asyncio.Semaphore(MAX_REPLAYS_AT_ONCE)
        self.decoder = KvDecoder()
        self.turn = Turn()
        self._sockets: KvSockets | None = None

    @property
    def sockets(self) -> KvSockets:
        """Return the sockets. Raises `MissingExtra`."""
        if self._sockets is None:
            self._sockets = KvSockets(import_zmq(), self.turn)
        return self._sockets

    async def aclose(self) -> None:
        await self.decoder.aclose()
        if self._sockets is not None:
            self._sockets.close()


class KvEventRouter(Protocol):
    """The Router, for events."""

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]: ...

    def forget_some(self, replica: str, *, blocks: int, now: float) -> bool: ...

    def clear_some(self, replica: str, *, model: str | None, rank: int, blocks: int, now: float) -> bool: ...

    def on_kv_lost(self, replica: str, *, now: float) -> list[Action]: ...


class KvEventsApplier:
    """Applies what the feeds of one replica want done, as their `FeedSink`.

    Parameters
    ----------
    subscriptions:
        Returns those that run.
    is_current:
        Whether the target is in the fleet: another process may have its name now.
    deliver:
        Takes the actions of the Router.
    changed:
        Notes that the state of a feed may be another.
    """

    def __init__(
        self,
        replica: str,
        router: KvEventRouter,
        clock: Clock,
        feeds: KvSubscriptions,
        *,
        subscriptions: Callable[[], Sequence[Subscription]],
        is_current: Callable[[], bool],
        deliver: Callable[[Iterable[Action]], None],
        changed: Callable[[], None],
    ) -> None:
        self._replica = replica
        self._router = router
        self._clock = clock
        self._turn, self._decoder = feeds.turn, feeds.decoder
        self._subscriptions = subscriptions
        self._is_current = is_current
        self._deliver = deliver
        self.changed = changed
        self.stats = KvFeedStats()
        #: Tokens of a block; `None` until the engine or an event says so.
        self.block_tokens: int | None = None

    def apply_batch(self, batch: KvEventBatch, era: int, subscription: Subscription) -> None:
        """Pass the events of a short message."""
        self._pass_piece(batch, era, subscription)

    async def apply_message(self, action: Apply, subscription: Subscription) -> None:
        """Decode a message and pass its events to the Router, in pieces."""
        try:
            if len(action.payload) <= LOOP_BYTES:
                await self._turn.pause()
                for piece in pieces(decode_message(action.payload)):
                    await self._pass_slowly(piece, action.era, subscription)
                return
            async with aclosing(self._decoder.decode(action.payload)) as found:
                async for piece in found:
                    await self._pass_slowly(piece, action.era, subscription)
        except ValueError as error:
            self._rejected_message(error, action, subscription)

    async def _pass_slowly(self, piece: KvEventBatch, era: int, subscription: Subscription) -> None:
        """Pass a piece; what the first `CacheCleared` removes goes before it, in slices."""
        for part, is_clearing in until_cleared(piece):
            if is_clearing:
                await self._clear_slowly(part.rank)
            await self._turn.pause()
            self._pass_piece(part, era, subscription)

    async def _clear_slowly(self, rank: int) -> None:
        await self._turn.pause()
        while self._is_current() and self._router.clear_some(
            self._replica, model=None, rank=rank, blocks=PIECE_BLOCKS, now=self._clock()
        ):
            await self._turn.pause()

    def _pass_piece(self, piece: KvEventBatch, era: int, subscription: Subscription) -> None:
        self.stats.events += piece.sent_events
        if piece.rejected:
            self._rejected(piece.error or "", subscription, era)
            self.stats.rejected_events += piece.rejected
        if clears(piece.events):
            subscription.feed.known.emptied(era)
        self._pass(piece)

    async def forget_blocks(self, subscription: Subscription, *, restarted: bool) -> None:
        """Forget the blocks of a rank, or of the replica if it has one alone."""
        several = len(self._subscriptions()) > 1
        if not several:
            await self.forget_all()
        if several or restarted:
            # An empty cache is also news for the history of requests.
            rank = subscription.source.rank or 0
            await self._clear_slowly(rank)
            self._pass(KvEventBatch(None, rank, (CacheCleared(),)))
        if restarted:
            # The next process may have another size.
            self.block_tokens = None

    def _rejected_message(self, error: ValueError, action: Apply, subscription: Subscription) -> None:
        self._rejected(str(error), subscription, action.era)
        self.stats.rejected_messages += 1

    def _rejected(self, error: str, subscription: Subscription, era: int) -> None:
        subscription.feed.known.spoiled(era)
        if not self.stats.rejected_events + self.stats.rejected_messages:
            log("kv_events_rejected", level=logging.WARNING, replica=self._replica, error=error)

    def _pass(self, batch: KvEventBatch) -> None:
        if self.block_tokens is None:
            sizes = (event.block_tokens for event in batch.events if isinstance(event, BlocksStored))
            self.block_tokens = next((size for size in sizes if size is not None), None)
        # Before the first block there is nothing to remove.
        if self.block_tokens is None or not self._is_current():
            return
        actions = self._router.on_kv_events(
            self._replica,
            batch,
            model=None,
            block_tokens=self.block_tokens,
            complete=all(each.feed.known.complete for each in self._subscriptions()),
            now=self._clock(),
        )
        self._deliver(actions)

    async def forget_all(self) -> None:
        """Forget all blocks, in slices; at once where there are none."""
        blocks = 1
        while self._is_current() and self._router.forget_some(self._replica, blocks=blocks, now=self._clock()):
            await self._turn.pause()
            blocks = PIECE_BLOCKS
        if self._is_current():
            self._deliver(self._router.on_kv_lost(self._replica, now=self._clock()))
