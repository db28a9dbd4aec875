"""The queue of a log of lines, as the request log: bounded, and emptied by one task.

A request never waits for the log. Lines beyond the bound are dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gorgo.live.logs import log
from gorgo.live.telemetry.line_file import Line, LineFile

#: Two seconds at the highest rate of one process; 1 MB with usual prompts, 32 MB with the longest.
MAX_WAITING = 2000
#: Lines that start a write; otherwise one write per `FLUSH_S`.
BATCH = 500
FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class LineLogEvents:
    """Names of a log's events: lines dropped, a failed write, and the first good one after it."""

    dropped: str
    failed: str
    resumed: str


REQUEST_LOG = LineLogEvents("request_log_dropped", "request_log_failed", "request_log_resumed")
OUTCOME_LOG = LineLogEvents("outcome_log_dropped", "outcome_log_failed", "outcome_log_resumed")


class LineLog:
    """The queue of one log.

    Parameters
    ----------
    events:
        Names of its log events.
    count:
        Called with `written`, `dropped` or `failed` and the number of lines.
    max_waiting:
        Queued lines at most.
    """

    def __init__(
        self,
        file: LineFile,
        *,
        count: Callable[[str, int], None],
        events: LineLogEvents = REQUEST_LOG,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._file = file
        self._events = events
        self._count = count
        self._max_waiting = max_waiting
        self._waiting: list[Line] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._dropped = 0
        #: Drops and failures are logged once until they end.
        self._dropping = self._failing = False

    def add(self, line: Line) -> None:
        """Queue one line. Never waits and never fails."""
        if len(self._waiting) >= self._max_waiting:
            self._dropped += 1
            return
        self._waiting.append(line)
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
            log(self._events.resumed, file=str(self._file.path))

    def _log_drops(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self._count("dropped", dropped)
            if not self._dropping:
                log(self._events.dropped, level=logging.WARNING, lines=dropped, reason="the disk is too slow")
        self._dropping = dropped > 0

    def _log_failure(self, error: Exception) -> None:
        if not self._failing:
            reason = getattr(error, "strerror", None) or str(error)
            log(self._events.failed, level=logging.ERROR, file=str(self._file.path), reason=reason)
        self._failing = True
