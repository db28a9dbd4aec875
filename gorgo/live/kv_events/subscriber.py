"""The KV events of one replica: where they come from, a subscription per rank, and their way into the Router.

Owns discovery, the restart of subscriptions after a reload, and the published `KvFeedStats`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Protocol

from gorgo.config.model import KvEventsConfig
from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import BlocksStored, CacheCleared, KvEventBatch
from gorgo.engines.kv_events import decode_message
from gorgo.engines.kv_sources import FLAGS, SGLANG_PATHS, VLLM_PATH, KvEventSource, read_sglang, read_vllm
from gorgo.live.clock import Clock
from gorgo.live.kv_events.actions import Apply
from gorgo.live.kv_events.decoding import LOOP_BYTES
from gorgo.live.kv_events.feeds import KvSubscriptions
from gorgo.live.kv_events.pieces import PIECE_BLOCKS, pieces, until_cleared
from gorgo.live.kv_events.stats import FeedState, KvFeedStats, worst
from gorgo.live.kv_events.subscription import Subscription
from gorgo.live.logs import log, log_failure
from gorgo.live.upstream.target import Target

#: Pause before an engine without an answer is asked again for its sources, and one without events.
RETRY_S = 5.0
RETRY_SILENT_S = 30.0
#: A replica is silent after so many requests without an event, and so long after the first of them. A few may have
#: prompts shorter than a block.
SILENT_REQUESTS = 10
SILENT_AFTER_S = 30.0
TICK_S = 1.0
#: Longest message that is applied in one step, of a millisecond at most: 1,800 removals or 200 blocks.
QUICK_BYTES = 16 * 1024


class KvEventRouter(Protocol):
    """The Router, for events."""

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]: ...

    def forget_some(self, replica: str, *, blocks: int, now: float) -> bool: ...

    def clear_some(self, replica: str, *, model: str | None, rank: int, blocks: int, now: float) -> bool: ...

    def on_kv_lost(self, replica: str, *, now: float) -> list[Action]: ...


class KvSubscriber:
    """The subscriptions to one replica.

    Parameters
    ----------
    answer:
        Returns the JSON of a route of the engine, `None` without one.
    is_current:
        Whether the target is in the fleet: another process may have its name now.
    deliver:
        Takes the actions of the Router.
    """

    def __init__(
        self,
        feeds: KvSubscriptions,
        target: Target,
        router: KvEventRouter,
        clock: Clock,
        *,
        answer: Callable[[str], Awaitable[object]],
        is_current: Callable[[], bool],
        deliver: Callable[[Iterable[Action]], None],
    ) -> None:
        self._feeds = feeds
        self._target = target
        self._router = router
        self._clock = clock
        self._answer = answer
        self._is_current = is_current
        self._deliver = deliver
        self._turn = asyncio.Lock()
        self._stats = KvFeedStats()
        self._subscriptions: list[Subscription] = []
        self._block_tokens: int | None = None
        #: Whether the advice of this silence is in the log.
        self._advised = False

    async def run(self) -> None:
        """Subscribe until cancelled, anew after each change of the configuration."""
        # A monitor that restarts its loops does not wait for the end of the former run.
        async with self._turn:
            try:
                while True:
                    await self._forget_all()
                    self._reset()
                    self._target.kv_events_changed.clear()
                    config = self._target.kv_events
                    async with asyncio.TaskGroup() as tasks:
                        subscribing = None if config is None else tasks.create_task(self._guarded(config))
                        await self._target.kv_events_changed.wait()
                        if subscribing is not None:
                            subscribing.cancel()
            finally:
                if self._feeds.stats.get(self._target.name) is self._stats:
                    del self._feeds.stats[self._target.name]

    def _reset(self) -> None:
        """Forget all counts."""
        self._stats = self._feeds.stats[self._target.name] = KvFeedStats()
        self._advised = False

    async def _guarded(self, config: KvEventsConfig) -> None:
        while True:
            try:
                await self._subscribe(config)
            except Exception as failure:  # noqa: BLE001 - without events requests are routed by history
                log_failure("kv_events_failed", failure, replica=self._target.name)
                await self._forget_all()
            await asyncio.sleep(RETRY_S)

    async def _subscribe(self, config: KvEventsConfig) -> None:
        while True:
            sources = await self._sources(config)
            if not sources:
                await asyncio.sleep(RETRY_S if sources is None else RETRY_SILENT_S)
                continue
            self._stats.endpoints = tuple(source.endpoint for source in sources)
            self._block_tokens = sources[0].block_tokens
            log("kv_events_subscribed", replica=self._target.name, endpoints=list(self._stats.endpoints))
            self._subscriptions = [
                Subscription(
                    self._target.name,
                    source,
                    self._feeds.sockets,
                    self._feeds.replay_slots,
                    self,
                    self._stats,
                    self._clock,
                )
                for source in sources
            ]
            try:
                async with asyncio.TaskGroup() as tasks:
                    running = [tasks.create_task(each.run()) for each in self._subscriptions]
                    await self._until_moved(config, sources)
                    for task in running:
                        task.cancel()
            finally:
                self._subscriptions = []
            await self._forget_all()

    # -- sources

    async def _sources(self, config: KvEventsConfig) -> tuple[KvEventSource, ...] | None:
        """Return the sources of the configuration or of the engine; `None` if it did not answer."""
        if config.endpoint is not None:
            return (KvEventSource(config.endpoint, config.replay, config.topic or "", config.mode),)
        host = self._target.upstream.host
        found = await self._announced(host)
        if found is None:
            return None
        if not found:
            self._be_silent()
            return ()
        return tuple(
            KvEventSource(
                source.endpoint,
                source.replay,
                source.topic if config.topic is None else config.topic,
                rank=source.rank,
                block_tokens=source.block_tokens,
            )
            for source in found
        )

    async def _announced(self, host: str) -> tuple[KvEventSource, ...] | None:
        match self._target.dialect.name:
            case "sglang":
                for path in SGLANG_PATHS:
                    found = read_sglang(await self._answer(path), host=host)
                    if found is not None:
                        return found
                return None
            case "vllm":
                return read_vllm(await self._answer(VLLM_PATH), host=host)
        return None if self._target.detects_engine and self._target.found_engine is None else ()

    async def _until_moved(self, config: KvEventsConfig, sources: tuple[KvEventSource, ...]) -> None:
        """Return when the engine announces other sources than those subscribed to, after a cut of all."""
        requests, since_s = self._target.attempts, self._clock()
        requested_s = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            states = {each.feed.state for each in self._subscriptions}
            if self._stats.last_message_s is not None or FeedState.CUT in states or self._target.attempts == requests:
                requests, since_s = self._target.attempts, now
            elif self._target.attempts - requests >= SILENT_REQUESTS and now - since_s >= SILENT_AFTER_S:
                for each in self._subscriptions:
                    each.feed.silent = True
                self._be_silent()
            if states == {FeedState.CUT} and config.endpoint is None and now - requested_s >= RETRY_S:
                requested_s = now
                found = await self._announced(self._target.upstream.host)
                if found and tuple(each.endpoint for each in found) != tuple(each.endpoint for each in sources):
                    return

    def _be_silent(self) -> None:
        """Log once what is missing."""
        name = self._target.dialect.name
        flag = FLAGS.get(name)
        if flag is None:
            advice = f"an engine of the kind {name} publishes no KV events: remove kv_events"
        else:
            advice = f"start the engine with {flag}; for another topic or address set replicas[].kv_events"
        self._stats.advice = advice
        self._stats.state, self._stats.complete = FeedState.SILENT, False
        if not self._advised:
            self._advised = True
            log("kv_events_silent", level=logging.WARNING, replica=self._target.name, advice=advice)

    # -- as a FeedSink

    def apply_quickly(self, action: Apply, subscription: Subscription) -> bool:
        """Decode and pass a short message at once, if this turn of the event loop has time for it."""
        if len(action.payload) > QUICK_BYTES or not self._feeds.turn.begin_step():
            return False
        try:
            batch = decode_message(action.payload)
            if any(isinstance(event, CacheCleared) for event in batch.events):
                return False
            self._pass_piece(batch, action, subscription)
        except ValueError as error:
            self._rejected_message(error, action, subscription)
        return True

    async def apply_message(self, action: Apply, subscription: Subscription) -> None:
        """Decode a message and pass its events to the Router, in pieces."""
        try:
            turn = self._feeds.turn
            if len(action.payload) <= LOOP_BYTES:
                await turn.pause()
                for piece in pieces(decode_message(action.payload)):
                    await self._pass_slowly(piece, action, subscription)
                return
            async with aclosing(self._feeds.decoder.decode(action.payload)) as found:
                async for piece in found:
                    await self._pass_slowly(piece, action, subscription)
        except ValueError as error:
            self._rejected_message(error, action, subscription)

    async def _pass_slowly(self, piece: KvEventBatch, action: Apply, subscription: Subscription) -> None:
        """Pass a piece; what the first `CacheCleared` removes goes before it, in slices."""
        for part, clears in until_cleared(piece):
            if clears:
                await self._clear_slowly(part.rank)
            await self._feeds.turn.pause()
            self._pass_piece(part, action, subscription)

    async def _clear_slowly(self, rank: int) -> None:
        await self._feeds.turn.pause()
        while self._is_current() and self._router.clear_some(
            self._target.name, model=None, rank=rank, blocks=PIECE_BLOCKS, now=self._clock()
        ):
            await self._feeds.turn.pause()

    def _pass_piece(self, piece: KvEventBatch, action: Apply, subscription: Subscription) -> None:
        self._stats.events += piece.sent_events
        if piece.rejected:
            self._rejected(piece.error or "", subscription, action)
            self._stats.rejected_events += piece.rejected
        if any(isinstance(event, CacheCleared) for event in piece.events):
            subscription.feed.emptied(action.era)
        self._pass(piece)

    async def forget_blocks(self, subscription: Subscription, *, restarted: bool) -> None:
        """Forget the blocks of a rank, or of the replica if it has one alone."""
        several = len(self._subscriptions) > 1
        if not several:
            await self._forget_all()
        if several or restarted:
            # An empty cache is also news for the history of requests.
            rank = subscription.source.rank or 0
            await self._clear_slowly(rank)
            self._pass(KvEventBatch(None, rank, (CacheCleared(),)))
        if restarted:
            # The next process may have another size.
            self._block_tokens = None

    def changed(self) -> None:
        """Publish the state, and log another one."""
        state = worst(each.feed.state for each in self._subscriptions)
        self._stats.complete = all(each.feed.complete for each in self._subscriptions)
        if state == self._stats.state:
            return
        was, self._stats.state = self._stats.state, state
        if state == FeedState.LIVE:
            self._stats.advice, self._advised = None, False
        level = logging.WARNING if state in (FeedState.CUT, FeedState.PARTIAL) else logging.INFO
        log("kv_events_state", level=level, replica=self._target.name, state=state.value, was=was.value)

    def _rejected_message(self, error: ValueError, action: Apply, subscription: Subscription) -> None:
        self._rejected(str(error), subscription, action)
        self._stats.rejected_messages += 1

    def _rejected(self, error: str, subscription: Subscription, action: Apply) -> None:
        subscription.feed.spoiled(action.era)
        if not self._stats.rejected_events + self._stats.rejected_messages:
            log("kv_events_rejected", level=logging.WARNING, replica=self._target.name, error=error)

    def _pass(self, batch: KvEventBatch) -> None:
        if self._block_tokens is None:
            sizes = (event.block_tokens for event in batch.events if isinstance(event, BlocksStored))
            self._block_tokens = next((size for size in sizes if size is not None), None)
        # Before the first block there is nothing to remove.
        if self._block_tokens is None or not self._is_current():
            return
        actions = self._router.on_kv_events(
            self._target.name,
            batch,
            model=None,
            block_tokens=self._block_tokens,
            complete=all(each.feed.complete for each in self._subscriptions),
            now=self._clock(),
        )
        self._deliver(actions)

    async def _forget_all(self) -> None:
        """Forget all blocks, in slices."""
        turn = self._feeds.turn
        await turn.pause()
        while self._is_current() and self._router.forget_some(
            self._target.name, blocks=PIECE_BLOCKS, now=self._clock()
        ):
            await turn.pause()
        if self._is_current():
            self._deliver(self._router.on_kv_lost(self._target.name, now=self._clock()))
