"""One scrape of a replica: which of its routes are read, and the sample of both.

Theory of operation. An engine writes all its counters for `/metrics`, and few values for its route of loads. A short
interval of scrapes reads the loads each time, and `/metrics` at most every `METRICS_INTERVAL_S`. An engine without the
loads that policies need is read by `/metrics` each time.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gorgo.core.json_cost import is_quick
from gorgo.core.messages.request import EngineSample
from gorgo.engines.base import merged
from gorgo.live.clock import Clock
from gorgo.live.logs import log_missing
from gorgo.live.upstream.client import UpstreamError
from gorgo.live.upstream.target import Target

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
        log_missing(self._target.name, self._target.reports.on_scrape(status, sample))
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
