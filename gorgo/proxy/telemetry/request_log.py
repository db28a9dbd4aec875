"""The queue of finished requests for the request log: bounded, and emptied by one task.

A request never waits for the log. Lines beyond the bound are dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gorgo.proxy.logs import log
from gorgo.proxy.telemetry.request_log_file import Finished, RequestLogFile

#: Two seconds at the highest rate of one process; 1 MB with usual prompts, 32 MB with the longest.
MAX_WAITING = 2000
#: Lines that start a write; otherwise one write per `FLUSH_S`.
BATCH = 500
FLUSH_S = 1.0


class RequestLog:
    """The queue of one proxy.

    Parameters
    ----------
    count:
        Called with `written`, `dropped` or `failed` and the number of lines.
    max_waiting:
        Queued lines at most.
    """

    def __init__(
        self, file: RequestLogFile, *, count: Callable[[str, int], None], max_waiting: int = MAX_WAITING
    ) -> None:
        self._file = file
        self._count = count
        self._max_waiting = max_waiting
        self._waiting: list[Finished] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._dropped = 0
        #: Drops and failures are logged once until they end.
        self._dropping = self._failing = False

    def add(self, request: Finished) -> None:
        """Queue one line. Never waits and never fails."""
        if len(self._waiting) >= self._max_waiting:
            self._dropped += 1
            return
        self._waiting.append(request)
        if len(self._waiting) == BATCH:
            self._wake.set()

    async def run(self) -> None:
        """Write queued lines until `stop`, then the rest."""
        while not self._stopping:
            await self._wait_for_batch()
            await self._flush()
        await self._flush()

    def stop(self) -> None:
        """End `run` after the queued lines."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Close the file, after `run` has ended."""
        self._file.close()

    async def _wait_for_batch(self) -> None:
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _flush(self) -> None:
        self._log_drops()
        lines, self._waiting = self._waiting, []
        if not lines:
            return
        try:
            await asyncio.to_thread(self._file.write, lines)
        except (OSError, ValueError) as error:  # ValueError: the path is not a regular file any more
            self._count("failed", len(lines))
            self._log_failure(error)
            return
        self._count("written", len(lines))
        if self._failing:
            self._failing = False
            log("request_log_resumed", file=str(self._file.path))

    def _log_drops(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self._count("dropped", dropped)
            if not self._dropping:
                log("request_log_dropped", level=logging.WARNING, lines=dropped, reason="the disk is too slow")
        self._dropping = dropped > 0

    def _log_failure(self, error: Exception) -> None:
        if not self._failing:
            reason = getattr(error, "strerror", None) or str(error)
            log("request_log_failed", level=logging.ERROR, file=str(self._file.path), reason=reason)
        self._failing = True
