"""Asking replicas how far away and how busy they are, in the background, and keeping connections to them warm.

Owns the loops. What an answer means is the dialect's and the Router's; a failure is told as `None`, never raised.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from gorgo.config.constants import PROBE_TIMEOUT_S, WARM_CONNECTIONS, WARM_INTERVAL_S
from gorgo.core.messages.request import EngineSample, OpenConnection
from gorgo.engines.base import merged
from gorgo.proxy.http.headers import Header
from gorgo.proxy.logs import log, log_missing
from gorgo.proxy.state import RunningProxy
from gorgo.proxy.upstream.client import POOL_EXHAUSTED, UpstreamError
from gorgo.proxy.upstream.connection_state import NextConnectionState
from gorgo.proxy.upstream.target import Target

SCRAPE_TIMEOUT_S = 10.0
#: A replica that joins waits for its first answers so long at most, and everything else in its file with it; so does
#: a proxy that starts, which until then answers nobody.
FIRST_PROBE_TIMEOUT_S = 5.0
#: From a broken connection to a look at the engine's figures, and twice as long to each further one while it is silent.
AFTER_BREAK_S = 0.5
#: Loops are spread by up to this share of their interval, so that many proxies do not ask in step.
JITTER = 0.1


@dataclass(slots=True)
class ProbeResult:
    """What a replica answered before the Router knew it."""

    rtt_s: float | None = None
    sample: EngineSample | None = None


class ReplicaMonitor:
    """The background loops for one replica.

    Parameters
    ----------
    state:
        Whose Router is told.
    target:
        Whom to ask.
    spread:
        Draws a number in [0, 1); the only source of chance.
    """

    def __init__(self, state: RunningProxy, target: Target, spread: Callable[[], float] = random.random) -> None:
        self._state = state
        self._target = target
        self._spread = spread
        self._answers = True
        self._tells = True
        target.upstream.on_connection_change(self._report_connection)

    @property
    def target(self) -> Target:
        return self._target

    async def run(self) -> None:
        """All loops, until cancelled."""
        proxy = self._state.config.proxy
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._every(proxy.probe_interval_s, self.probe))
            loops.create_task(self._every(proxy.scrape_interval_s, self.scrape))
            loops.create_task(self._every(WARM_INTERVAL_S, self.warm))
            loops.create_task(self._probe_after_breaks())

    async def _probe_after_breaks(self) -> None:
        """What broke a connection may be an engine that starts again, empty: its figures tell, once it answers."""
        while True:
            await self._target.connection_lost.wait()
            # Also where figures are read so often that the loop below does nothing: this one would never wait again.
            self._target.connection_lost.clear()
            wait_s = AFTER_BREAK_S
            while wait_s < self._state.config.proxy.scrape_interval_s:  # after that they are read anyway
                await asyncio.sleep(wait_s)
                self._target.connection_lost.clear()
                await self.scrape()
                if self._tells:
                    break
                wait_s *= 2

    async def probe(self) -> None:
        """One round trip, told to the Router; of a replica that is back also its figures, for it may be empty."""
        was_silent = not self._answers
        try:
            rtt_s = await self._measure()
        except UpstreamError:
            return  # This process could not ask it, which says nothing of it.
        self._probed(rtt_s, self._state.clock())
        if was_silent and rtt_s is not None:
            await self.scrape()

    async def scrape(self) -> None:
        """The engine's own figures, told to the Router."""
        if self._has_figures:
            self._sampled(await self._read_figures(), self._state.clock())

    async def probe_once(self) -> ProbeResult:
        """Ask once and keep the answers: the Router does not know this replica yet, or another one by its name."""
        look = ProbeResult()

        async def measure() -> None:
            with suppress(UpstreamError):
                look.rtt_s = await self._measure()

        async def read() -> None:
            look.sample = await self._read_figures() if self._has_figures else None

        try:
            async with asyncio.timeout(FIRST_PROBE_TIMEOUT_S), asyncio.TaskGroup() as asking:
                asking.create_task(measure())
                asking.create_task(read())
        except TimeoutError:
            if look.rtt_s is None:
                self._unanswered("timeout")
        return look

    def publish(self, look: ProbeResult) -> None:
        """Pass on what was kept, now that the Router knows the replica."""
        now = self._state.clock()
        self._probed(look.rtt_s, now)
        self._sampled(look.sample, now)

    def _probed(self, rtt_s: float | None, now: float) -> None:
        self._state.gateway.apply(self._state.router.on_probe(self._target.name, rtt_s, now=now))
        self._state.probe_history.record(self._target.name, rtt_s, now=now)

    def _sampled(self, sample: EngineSample | None, now: float) -> None:
        self._state.gateway.apply(self._state.router.on_engine_sample(self._target.name, sample, now=now))

    @property
    def _has_figures(self) -> bool:
        return self._target.dialect.metrics_path is not None or self._target.dialect.loads_path is not None

    async def _measure(self) -> float | None:
        """The second of two pings, because the first may have had to connect; `None` where it does not answer.

        Raises `UpstreamError` if this process has no connection left to ask it.
        """
        try:
            await self._ping()
            rtt_s = await self._ping()
        except UpstreamError as failure:
            if failure.reason == POOL_EXHAUSTED:
                raise
            self._unanswered(failure.reason)
            return None
        self._changed(True, None)
        return rtt_s

    def _unanswered(self, reason: str) -> None:
        self._state.metrics.probe_failed(self._target.name, self._target.region)
        self._changed(False, reason)

    async def _read_figures(self) -> EngineSample | None:
        """The engine's metrics, completed by its loads route, either of which may be missing."""
        target = self._target
        found = [await self._read_metrics(), await self._read_loads()]
        samples = [sample for sample in found if sample is not None]
        if not samples:
            self._state.metrics.scrape_failed(target.name, target.region)
        if self._tells and not samples:
            log("scrape_failed", level=logging.WARNING, replica=target.name)
        self._tells = bool(samples)
        return merged(samples[0], samples[-1]) if samples else None

    def _report_connection(self, found: NextConnectionState | None) -> None:
        """To the Router, in its own time; unless another process has taken over the name."""
        if self._state.targets.get(self._target.name) is not self._target:
            return
        now = self._state.clock()
        connection = None if found is None else OpenConnection(found.windows, now - found.idle_s, found.pacing)
        self._state.router.on_connection(self._target.name, connection, now=now)

    async def warm(self) -> None:
        """Ping on several kept connections at once. Only where the replica answers: a dead one is left to the probe."""
        if not self._answers:
            return
        await asyncio.gather(*(self._ping_quietly() for _ in range(WARM_CONNECTIONS)))

    async def _ping_quietly(self) -> None:
        """The probe is what counts failures."""
        with suppress(UpstreamError):
            await self._ping()

    async def _ping(self) -> float:
        started = perf_counter()
        status, _ = await self._fetch(self._target.dialect.probe_path, PROBE_TIMEOUT_S)
        if status >= 500:
            raise UpstreamError(f"status_{status}")
        return perf_counter() - started

    async def _read_metrics(self) -> EngineSample | None:
        path = self._target.dialect.metrics_path
        if path is None:
            return None
        sample: EngineSample | None = None
        status: int | None = None
        # A failure leaves both unknown, which is what it tells.
        with suppress(UpstreamError):
            status, body = await self._fetch(path, SCRAPE_TIMEOUT_S)
            if status == 200:
                sample = self._target.dialect.read_metrics(body.decode("utf-8", "replace"))
        log_missing(self._target.name, self._target.reports.on_scrape(status, sample))
        return sample

    async def _read_loads(self) -> EngineSample | None:
        path = self._target.dialect.loads_path
        if path is None:
            return None
        try:
            status, body = await self._fetch(path, SCRAPE_TIMEOUT_S)
            return self._target.dialect.read_capacity(json.loads(body)) if status == 200 else None
        except (UpstreamError, ValueError, RecursionError):
            return None

    async def _fetch(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        headers: list[Header] = []
        if self._target.api_key is not None:
            headers.append((b"authorization", b"Bearer " + self._target.api_key.encode("ascii")))
        return await self._target.upstream.fetch(path, headers, timeout_s=timeout_s)

    def _changed(self, answers: bool, reason: str | None) -> None:
        """Log transitions only: a replica that stays down says so once."""
        if answers == self._answers:
            return
        self._answers = answers
        event = "replica_answers" if answers else "replica_does_not_answer"
        log(event, level=logging.WARNING, replica=self._target.name, reason=reason)

    async def _every(self, interval_s: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_s * (1 + JITTER * (self._spread() - 0.5)))
            await action()
