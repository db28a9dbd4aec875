"""Probes, scrapes and warm connections of one replica, in the background. A failure is reported as `None`.

Owns the loops (`ReplicaMonitor`), and what one scrape reads (`Scraper`). Leaves paths and readers to `gorgo.engines`,
and what follows from a failure to the Router.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gorgo.config.replica_advice import several_addresses
from gorgo.config.values import PROBE_TIMEOUT_S, WARM_CONNECTIONS, WARM_INTERVAL_S
from gorgo.core.backoff import backoff_s
from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.core.messages.request import REFUSALS, EngineSample, OpenConnection
from gorgo.core.numeric import is_quick
from gorgo.engines.base import is_well, merged, probe_paths
from gorgo.live.event_loop import Clock
from gorgo.live.http.headers import Header
from gorgo.live.logs import log
from gorgo.live.monitor.discovery import Discovered, Discovery
from gorgo.live.state import LiveState
from gorgo.live.upstream.address import RESOLVE_INTERVAL_S
from gorgo.live.upstream.client import POOL_EXHAUSTED, UpstreamError
from gorgo.live.upstream.connection import NextConnectionState
from gorgo.live.upstream.target import Target

if TYPE_CHECKING:
    from gorgo.live.kv_events.subscriber import KvEventRouter, KvSubscriber
    from gorgo.live.workers.link import WorkerLink


# One scrape of a replica: which of its routes are read, and the sample of both.
#
# Theory of operation. An engine writes all its counters for `/metrics`, and few values for its route of loads. A short
# interval of scrapes reads the loads each time, and `/metrics` at most every `METRICS_INTERVAL_S`. An engine without
# the loads that policies need is read by `/metrics` each time.


SCRAPE_TIMEOUT_S = 10.0
#: What only `/metrics` has are counters, which nothing needs more often.
METRICS_INTERVAL_S = 5.0

Fetch = Callable[[str, float], Awaitable[tuple[int, bytes]]]


class Scraper:
    """The scrapes of one replica.

    Parameters
    ----------
    fetch:
        Returns status and body of a path, within a time.
    """

    def __init__(self, target: Target, fetch: Fetch, clock: Clock) -> None:
        self._target = target
        self._fetch = fetch
        self._clock = clock
        #: When `/metrics` was read last.
        self._read_s = float("-inf")
        #: Whether the last loads had all that policies need.
        self._loads_suffice = False

    async def read(self) -> EngineSample | None:
        """Return the sample of the routes that are due; `None` if none answered."""
        metrics = None
        if not self._loads_suffice or self._clock() - self._read_s >= METRICS_INTERVAL_S:
            self._read_s = self._clock()
            metrics = await self._read_metrics()
        loads = await self._read_loads()
        self._loads_suffice = loads is not None and None not in (
            loads.running_requests,
            loads.queued_requests,
            loads.used_tokens,
        )
        if metrics is None or loads is None:
            return metrics or loads
        return merged(metrics, loads)

    async def _read_metrics(self) -> EngineSample | None:
        path = self._target.dialect.metrics_path
        if path is None:
            return None
        sample: EngineSample | None = None
        status: int | None = None
        # A failure leaves both None.
        with suppress(UpstreamError):
            status, body = await self._fetch(path, SCRAPE_TIMEOUT_S)
            if status == 200:
                sample = self._target.dialect.read_metrics(body.decode("utf-8", "replace"))
        self._target.check_metrics(status, sample)
        return sample

    async def _read_loads(self) -> EngineSample | None:
        path = self._target.dialect.loads_path
        if path is None:
            return None
        try:
            status, body = await self._fetch(path, SCRAPE_TIMEOUT_S)
            readable = status == 200 and is_quick(body)
            return self._target.dialect.read_capacity(json.loads(body)) if readable else None
        except (UpstreamError, ValueError, RecursionError):
            return None


#: Longest delay of a reload by a new replica's first probe, and of a start: the proxy serves no request before.
FIRST_PROBE_TIMEOUT_S = 5.0
#: Delay of the scrape after a broken connection; doubles while the engine does not answer.
AFTER_BREAK_S = 0.5
#: Shortest interval of reading the models, which change far less often than the load.
DISCOVERY_INTERVAL_S = 1.0
#: Longest sleep before an interval is read again, s.
RECHECK_S = 5.0
#: First interval of the probes of a replica that joins, s. It doubles as long as there is no answer, up to the
#: configured one; while no replica of the fleet has answered it stays, because the first that does makes it ready.
FIRST_INTERVAL_S = 1.0
#: Answers at that interval: of one probe the way may have been slow, and its time counts until the next.
FIRST_ANSWERS = 3
#: Jitter of an interval, as a share of it: many proxies do not probe in step.
JITTER = 0.1


#: Reasons of failed pings: refusals, with their status, and a path that the replica does not have.
_REFUSALS = {f"status_{status}": status for status in REFUSALS}
_NO_PATH = ("status_404", "status_405")


@dataclass(slots=True)
class ProbeResult:
    """The first answers of a replica that is not in the fleet yet."""

    rtt_s: float | None = None
    sample: EngineSample | None = None
    discovered: Discovered = field(default_factory=Discovered)


class ReplicaMonitor:
    """The background loops for one replica.

    Parameters
    ----------
    spread:
        Draws a number in [0, 1) for the jitter.
    """

    def __init__(self, state: LiveState, target: Target, spread: Callable[[], float] = random.random) -> None:
        self._state = state
        self._target = target
        self._spread = spread
        self._answers = True
        #: Which of the two paths of a probe answers.
        self._second_path = False
        #: Status of 4xx of the last probe, `None` for any other end.
        self._refusal: int | None = None
        self._reports_metrics = True
        #: Answers to probes that are still sought at the first interval, and how often there was none.
        self._sought, self._unanswered_first = 0, 0
        self._discovery = Discovery(state.routing, state.replicas, target, self._fetch)
        self._scraper = Scraper(target, self._fetch, state.routing.clock)
        self._kv_events: KvSubscriber | None = None
        #: Of a name with several addresses; `None` for one.
        self._addresses_advice: str | None = None
        #: The last answer of each kind, as the leader of several workers passes it on.
        self.learned: dict[str, tuple[object, ...]] = {}
        target.upstream.on_replaced(self._replaced)
        target.upstream.on_connection_change(self._report_connection, state.routing.gateway.stale_connections.append)

    @property
    def target(self) -> Target:
        return self._target

    async def run(self) -> None:
        """Run all loops until cancelled."""
        proxy = self._state.config.proxy

        def discovery_s() -> float:
            return max(self._state.scrape_interval_s, DISCOVERY_INTERVAL_S)

        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._probe_in_turn(proxy.probe_interval_s))
            loops.create_task(self._every(lambda: self._state.scrape_interval_s, self.scrape, once=True))
            loops.create_task(self._every(discovery_s, self.discover, once=True))
            loops.create_task(self._every(lambda: WARM_INTERVAL_S, self.warm))
            if self._target.upstream.has_name:
                loops.create_task(self._every(lambda: RESOLVE_INTERVAL_S, self.resolve_name))
            loops.create_task(self._probe_after_breaks())
            loops.create_task(self._follow_kv_events())

    async def _probe_in_turn(self, interval_s: float) -> None:
        while True:
            await self._pause(lambda: min(interval_s, self._first_interval_s()))
            if self._state.leads:
                await self.probe()

    def _first_interval_s(self) -> float:
        """Return the time until the next probe of a replica that has just joined; infinite for any other one."""
        if not self._sought:
            return inf
        if not self._unanswered_first or not self._state.routing.router.replicas.any_answers:
            return FIRST_INTERVAL_S
        return backoff_s(self._unanswered_first, first_s=FIRST_INTERVAL_S, longest_s=inf)

    async def _follow_kv_events(self) -> None:
        """Subscribe to the replica's KV events until cancelled, from when it has some on."""
        target = self._target
        if self._state.link is not None:
            await self._state.link.leads_now.wait()
        while self._kv_events is None:
            if target.kv_events is not None:
                self._kv_events = await _subscriber(self._state, target, self._discovery)
            else:
                await target.kv_events_changed.wait()
                target.kv_events_changed.clear()
        await self._kv_events.run()

    async def _probe_after_breaks(self) -> None:
        """Probe and scrape after a broken connection: the engine is down, or has restarted with an empty cache."""
        while True:
            await self._target.connection_lost.wait()
            # Cleared here too: with a short scrape interval the loop below does not run.
            self._target.connection_lost.clear()
            await self.probe()
            for scrapes in count(1):
                wait_s = backoff_s(scrapes, first_s=AFTER_BREAK_S, longest_s=inf)
                if wait_s >= self._state.scrape_interval_s:  # the periodic scrape is due by then
                    break
                await asyncio.sleep(wait_s)
                self._target.connection_lost.clear()
                self._discovery.expect_another_process()
                await self.discover()
                await self.scrape()
                if self._reports_metrics:
                    break

    async def probe(self) -> None:
        """Measure one round trip. Scrape a replica that answers again: it may be another process."""
        was_silent = not self._answers
        try:
            rtt_s = await self._measure()
        except UpstreamError:
            return  # No free connection in this process: no fact about the replica.
        self._publish("probe", rtt_s, self._refusal, self._target.last_failure)
        self._probed(rtt_s, self._state.routing.clock())
        if was_silent and rtt_s is not None:
            self._discovery.expect_another_process()
            await self.discover()
            await self.scrape()

    async def scrape(self) -> None:
        """Read the engine's metrics and pass them to the Router."""
        if self._has_metrics:
            sample = await self._read_sample()
            self._publish("scrape", sample)
            self._sampled(sample, self._state.routing.clock())

    async def discover(self) -> None:
        """Read the list of models, and find the kind of engine where it is not known."""
        discovered = await self._discovery.request()
        self._publish("models", discovered)
        if self._discovery.publish(discovered):
            await self.scrape()
        self._state.log_unused(self._target)

    # -- what the worker that leads has learned of the replica

    def take_answer(self, kind: str, *answer: Any) -> None:
        """Take an answer that the worker that leads has got."""
        self.learned[kind] = answer
        now = self._state.routing.clock()
        match kind:
            case "probe":
                rtt_s, self._refusal, self._target.last_failure = answer
                self._probed(rtt_s, now)
            case "scrape":
                self._sampled(answer[0], now)
            case _:
                self._discovery.publish(*answer)

    def _publish(self, kind: str, *answer: object) -> None:
        """Let the other workers take what this one has learned, if it leads."""
        self.learned[kind] = answer
        link = self._state.link
        if link is not None and link.leads:
            link.publish("replica", self._target.name, kind, *answer)

    async def probe_once(self) -> ProbeResult:
        """Probe and scrape once, for a replica that is not in the fleet yet."""
        result = ProbeResult()

        async def measure() -> None:
            with suppress(UpstreamError):
                result.rtt_s = await self._measure()

        async def discover() -> None:
            result.discovered = await self._discovery.request()
            self._discovery.apply_engine(result.discovered)

        async def read() -> None:
            if self._target.detects_engine:
                await discovery  # the routes to read depend on it
            result.sample = await self._read_sample() if self._has_metrics else None

        try:
            async with asyncio.timeout(FIRST_PROBE_TIMEOUT_S), asyncio.TaskGroup() as tasks:
                discovery = tasks.create_task(discover())
                tasks.create_task(measure())
                tasks.create_task(read())
        except TimeoutError:
            if result.rtt_s is None:
                self._unanswered(UpstreamError("timeout"))
        return result

    def publish(self, result: ProbeResult) -> None:
        """Pass the first answers to the Router, after the replica has joined."""
        now = self._state.routing.clock()
        self.learned["models"] = (result.discovered,)
        self.learned["probe"] = result.rtt_s, self._refusal, self._target.last_failure
        self.learned["scrape"] = (result.sample,)
        self._discovery.publish(result.discovered)
        self._state.log_unused(self._target)
        self._sought = FIRST_ANSWERS
        self._probed(result.rtt_s, now)
        self._sampled(result.sample, now)

    def _probed(self, rtt_s: float | None, now: float) -> None:
        if self._sought:
            self._sought -= rtt_s is not None
            self._unanswered_first = 0 if rtt_s is not None else self._unanswered_first + 1
        replicas = self._state.routing.router.replicas
        cause = self._target.last_failure if rtt_s is None else None
        actions = replicas.on_probe(self._target.name, rtt_s, now=now, refusal=self._refusal, cause=cause)
        self._state.routing.gateway.apply(actions)
        self._state.telemetry.probe_history.record(self._target.name, rtt_s, now=now)

    def _sampled(self, sample: EngineSample | None, now: float) -> None:
        self._state.routing.gateway.apply(
            self._state.routing.router.replicas.on_engine_sample(self._target.name, sample, now=now)
        )

    @property
    def _has_metrics(self) -> bool:
        return self._target.dialect.metrics_path is not None or self._target.dialect.loads_path is not None

    async def _measure(self) -> float | None:
        """Return the time of one ping on an open connection; `None` without an answer.

        Where there is none, a first ping opens it: warm connections make that rare.

        Raises `UpstreamError` if this process has no free connection.
        """
        self._refusal = None
        try:
            is_warm = self._target.upstream.has_idle
            rtt_s = await self._find_path()
            if not is_warm:
                rtt_s = await self._ping()
        except UpstreamError as failure:
            if failure.reason == POOL_EXHAUSTED:
                raise
            self._refusal = _REFUSALS.get(failure.reason)
            self._unanswered(failure)
            return None
        self._target.last_failure = None
        self._changed(None)
        return rtt_s

    async def _find_path(self) -> float:
        """Ping, and return its time; try the other path if the replica does not have this one."""
        try:
            return await self._ping()
        except UpstreamError as failure:
            if failure.reason not in _NO_PATH:
                raise
            self._second_path = not self._second_path
            try:
                return await self._ping()
            except UpstreamError as other:
                self._second_path = not self._second_path
                # A wrong key on the second path says more than the absence of the first.
                raise other if other.reason in _REFUSALS or other.reason == POOL_EXHAUSTED else failure from None

    def _unanswered(self, failure: UpstreamError) -> None:
        self._state.telemetry.metrics.probe_failed(self._target.name, self._target.region)
        self._target.last_failure = failure.cause or failure.reason
        self._changed(failure)

    async def _read_sample(self) -> EngineSample | None:
        """Read the engine's reports, and log and count a failure."""
        target = self._target
        sample = await self._scraper.read()
        if sample is None:
            self._state.telemetry.metrics.scrape_failed(target.name, target.region)
        if self._reports_metrics and sample is None:
            log("scrape_failed", level=logging.WARNING, replica=target.name)
        self._reports_metrics = sample is not None
        return sample

    def _report_connection(self, next_connection: NextConnectionState | None) -> None:
        """Report the next connection to the Router, unless another process has this name now."""
        if self._state.replicas.targets.get(self._target.name) is not self._target:
            return
        now = self._state.routing.clock()
        connection = (
            None
            if next_connection is None
            else OpenConnection(next_connection.windows, now - next_connection.idle_s, next_connection.pacing)
        )
        self._state.routing.router.replicas.on_connection(self._target.name, connection, now=now)

    async def resolve_name(self) -> None:
        """Look up the name of the replica, which may have moved; warn of one with several addresses."""
        try:
            addresses = await self._target.upstream.resolve_name()
        except OSError:
            return  # What is known stays: a connection that fails says why.
        advice = several_addresses(addresses)
        if advice is not None and self._addresses_advice is None:
            log("replica_has_several_addresses", level=logging.WARNING, replica=self._target.name, advice=advice)
        self._addresses_advice = advice

    def _replaced(self, before: str, now_at: str) -> None:
        """Another process answers at the replica's name: its cache, models and kind are read anew."""
        target, routing = self._target, self._state.routing
        if self._state.replicas.targets.get(target.name) is not target:
            return
        log("replica_moved", replica=target.name, before=before, now=now_at)
        self._discovery.expect_another_process()
        routing.gateway.apply(routing.router.replicas.on_replaced(target.name, now=routing.clock()))
        target.connection_lost.set()

    async def warm(self) -> None:
        """Ping on several connections at once, unless the replica is known to be silent."""
        if not self._answers and (self._target.unreachable or not self._target.unconnected_pings):
            return
        await asyncio.gather(*(self._ping_quietly() for _ in range(WARM_CONNECTIONS)))

    async def _ping_quietly(self) -> None:
        """Ping; ignore a failure, which the probe counts."""
        with suppress(UpstreamError):
            await self._ping()

    async def _ping(self) -> float:
        started = perf_counter()
        path = probe_paths(self._target.dialect)[self._second_path]
        try:
            status, _ = await self._fetch(path, PROBE_TIMEOUT_S)
        except UpstreamError as failure:
            self._target.unconnected_pings += failure.cause is not None
            raise
        self._target.unconnected_pings = 0
        if not is_well(status):
            raise UpstreamError(f"status_{status}")
        return perf_counter() - started

    async def _fetch(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        headers: list[Header] = []
        if self._target.api_key is not None:
            headers.append((b"authorization", b"Bearer " + self._target.api_key.encode("ascii")))
        return await self._target.upstream.fetch(path, headers, timeout_s=timeout_s)

    def _changed(self, failure: UpstreamError | None) -> None:
        """Log transitions only."""
        if self._answers == (failure is None):
            return
        self._answers = failure is None
        name = self._target.name
        if failure is None:
            log("replica_answers", replica=name)
        else:
            cause = {} if failure.cause is None else {"cause": failure.cause}
            log("replica_does_not_answer", level=logging.WARNING, replica=name, reason=failure.reason, **cause)

    async def _every(
        self, interval_s: Callable[[], float], action: Callable[[], Awaitable[None]], *, once: bool = False
    ) -> None:
        """Act at each interval; one that becomes shorter meanwhile, by another policy, counts within `RECHECK_S`.

        `once`: of several workers the one that leads acts for all.
        """
        while True:
            await self._pause(interval_s)
            if not once or self._state.leads:
                await action()

    async def _pause(self, interval_s: Callable[[], float]) -> None:
        """Sleep for an interval; one that becomes shorter meanwhile counts within `RECHECK_S`."""
        spread, slept_s = 1 + JITTER * (self._spread() - 0.5), 0.0
        while (left_s := interval_s() * spread - slept_s) > 0.0:
            step_s = min(left_s, RECHECK_S)
            await asyncio.sleep(step_s)
            slept_s += step_s


async def _subscriber(state: LiveState, target: Target, discovery: Discovery) -> KvSubscriber:
    """Return the subscriber of a replica; the first one loads what all of them need, while streams go on."""
    await asyncio.to_thread(import_module, "gorgo.live.kv_events.subscriber")
    from gorgo.live.kv_events.subscriber import KvSubscriber, KvSubscriptions

    if state.replicas.kv_feeds is None:
        state.replicas.kv_feeds = KvSubscriptions(state.replicas.kv_feed_stats)
    caches: KvEventRouter = state.routing.router.caches
    return KvSubscriber(
        state.replicas.kv_feeds,
        target,
        caches if state.link is None else PublishedCaches(caches, state.link),
        state.routing.clock,
        answer=discovery.answer,
        is_current=lambda: state.replicas.targets.get(target.name) is target,
        deliver=state.routing.gateway.apply,
    )


# Events of caches that the worker that leads passes on: it subscribes for all.


class PublishedCaches:
    """The caches of this Router and of those of the other workers, for events."""

    def __init__(self, caches: KvEventRouter, link: WorkerLink) -> None:
        self._caches = caches
        self._link = link

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]:
        self._link.publish("kv_events", replica, batch, model, block_tokens, complete)
        return self._caches.on_kv_events(
            replica, batch, model=model, block_tokens=block_tokens, complete=complete, now=now
        )

    def forget_some(self, replica: str, *, blocks: int, now: float) -> bool:
        return self._caches.forget_some(replica, blocks=blocks, now=now)

    def clear_some(self, replica: str, *, model: str | None, rank: int, blocks: int, now: float) -> bool:
        # The event that it begins is published.
        return self._caches.clear_some(replica, model=model, rank=rank, blocks=blocks, now=now)

    def on_kv_lost(self, replica: str, *, now: float) -> list[Action]:
        self._link.publish("kv_lost", replica)
        return self._caches.on_kv_lost(replica, now=now)
