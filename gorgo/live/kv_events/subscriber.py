"""The KV events of one replica: where they come from, a subscription per rank, and their way into the Router.

Owns the sources by configuration and by what the engine announces (`KvSources`), the restart of subscriptions after a
reload or at another address, and the published `KvFeedStats`; the decoding of large messages in a process beside the
event loop (`KvDecoder`), what the subscribers of one proxy share (`KvSubscriptions`), and the application of events in
steps that each hold the event loop for a short time (`KvEventsApplier`). Leaves the order of messages to `feed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from gorgo.config.fleet import KvEventsConfig
from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import BlocksStored, CacheCleared, KvEventBatch, clears
from gorgo.engines.kv_events import decode_message
from gorgo.engines.kv_sources import FLAGS, SGLANG_PATHS, VLLM_PATH, KvEventSource, read_sglang, read_vllm
from gorgo.live.event_loop import Clock
from gorgo.live.helper_process import HelperFailed, HelperProcess
from gorgo.live.kv_events.feed import Apply
from gorgo.live.kv_events.sockets import KvSockets, Turn, import_zmq
from gorgo.live.kv_events.subscription import Subscription
from gorgo.live.kv_events.worker import PIECE_BLOCKS, pieces, until_cleared
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats, worst
from gorgo.live.logs import log, log_failure
from gorgo.live.upstream.target import Target


class KvSources:
    """The sources of one replica.

    Parameters
    ----------
    answer:
        Returns the JSON of a route of the engine, `None` without one.
    """

    def __init__(self, target: Target, answer: Callable[[str], Awaitable[object]]) -> None:
        self._target = target
        self._answer = answer

    async def of_config(self, config: KvEventsConfig) -> tuple[KvEventSource, ...] | None:
        """Return the sources of the configuration or of the engine; `None` if it did not answer."""
        if config.endpoint is not None:
            return (KvEventSource(config.endpoint, config.replay, config.topic or "", config.mode),)
        announced = await self.announced()
        if announced is None:
            return None
        return tuple(
            KvEventSource(
                source.endpoint,
                source.replay,
                source.topic if config.topic is None else config.topic,
                rank=source.rank,
                block_tokens=source.block_tokens,
            )
            for source in announced
        )

    async def announced(self) -> tuple[KvEventSource, ...] | None:
        """Return the sources that the engine announces, none of an engine without events."""
        match self._target.dialect.name:
            case "sglang":
                for path in SGLANG_PATHS:
                    sources = read_sglang(await self._answer(path), host=self._target.upstream.checked_host)
                    if sources is not None:
                        return sources
                return None
            case "vllm":
                return read_vllm(await self._answer(VLLM_PATH), host=self._target.upstream.checked_host)
        return None if self._target.detects_engine and self._target.found_engine is None else ()


#: Pause before an engine without an answer is asked again for its sources, and one without events.
RETRY_S = 5.0
RETRY_SILENT_S = 30.0
#: A replica is silent after so many requests without an event, and so long after the first of them. A few may have
#: prompts shorter than a block.
SILENT_REQUESTS = 10
SILENT_AFTER_S = 30.0
TICK_S = 1.0


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
        self._clock = clock
        self._sources = KvSources(target, answer)
        self._running = asyncio.Lock()
        self._stats = KvFeedStats()
        self._subscriptions: list[Subscription] = []
        self._applier = KvEventsApplier(
            target.name,
            router,
            clock,
            feeds,
            subscriptions=lambda: self._subscriptions,
            is_current=is_current,
            deliver=deliver,
            changed=self._changed,
        )
        #: Whether the advice of this silence is in the log.
        self._advised = False

    async def run(self) -> None:
        """Subscribe until cancelled, anew after each change of the configuration."""
        # A monitor that restarts its loops does not wait for the end of the former run.
        async with self._running:
            try:
                while True:
                    self._reset()
                    await self._applier.forget_all()
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
        self._stats = self._applier.stats = self._feeds.stats[self._target.name] = KvFeedStats()
        self._advised = False

    async def _guarded(self, config: KvEventsConfig) -> None:
        while True:
            try:
                await self._subscribe(config)
            except Exception as failure:  # noqa: BLE001 - without events requests are routed by history
                log_failure("kv_events_failed", failure, replica=self._target.name)
                await self._applier.forget_all()
            await asyncio.sleep(RETRY_S)

    async def _subscribe(self, config: KvEventsConfig) -> None:
        while True:
            sources = await self._sources.of_config(config)
            if sources == ():
                self._be_silent()
            if not sources:
                await asyncio.sleep(RETRY_S if sources is None else RETRY_SILENT_S)
                continue
            self._stats.endpoints = tuple(source.endpoint for source in sources)
            self._applier.block_tokens = sources[0].block_tokens
            log("kv_events_subscribed", replica=self._target.name, endpoints=list(self._stats.endpoints))
            self._subscriptions = [
                Subscription(
                    self._target.name,
                    source,
                    self._feeds.sockets,
                    self._feeds.replay_slots,
                    self._applier,
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
            await self._applier.forget_all()

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
                announced = await self._sources.announced()
                if announced and tuple(each.endpoint for each in announced) != tuple(each.endpoint for each in sources):
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

    def _changed(self) -> None:
        """Publish the state, and log another one."""
        state = worst(each.feed.state for each in self._subscriptions)
        self._stats.complete = all(each.feed.known.complete for each in self._subscriptions)
        if state == self._stats.state:
            return
        was, self._stats.state = self._stats.state, state
        if state == FeedState.LIVE:
            self._stats.advice, self._advised = None, False
        level = logging.WARNING if state in (FeedState.CUT, FeedState.PARTIAL) else logging.INFO
        log("kv_events_state", level=level, replica=self._target.name, state=state.value, was=was.value)


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
