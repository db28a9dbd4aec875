"""The KV events of one replica: where they come from, a subscription per rank, and the published `KvFeedStats`.

Owns the sources by configuration and by what the engine announces (`KvSources`), and the restart of subscriptions after
a reload or at another address. See `applier` for the way into the Router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from gorgo.config.fleet import KvEventsConfig
from gorgo.core.messages.actions import Action
from gorgo.engines.kv_sources import FLAGS, SGLANG_PATHS, VLLM_PATH, KvEventSource, read_sglang, read_vllm
from gorgo.live.event_loop import Clock
from gorgo.live.kv_events.applier import KvEventRouter, KvEventsApplier, KvSubscriptions
from gorgo.live.kv_events.subscription import Subscription
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
        found = await self.announced()
        if found is None:
            return None
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

    async def announced(self) -> tuple[KvEventSource, ...] | None:
        """Return the sources that the engine announces, none of an engine without events."""
        match self._target.dialect.name:
            case "sglang":
                for path in SGLANG_PATHS:
                    found = read_sglang(await self._answer(path), host=self._target.upstream.checked_host)
                    if found is not None:
                        return found
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
                found = await self._sources.announced()
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
