"""Finished requests on their way to the log: a bounded queue, and one task that empties it.

Owns the promise that a request never waits for the log: what the disk cannot take in time is dropped, counted and said.
The form of a line and the files are `request_log_file`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from gorgo.proxy.logs import log
from gorgo.proxy.telemetry.request_log_file import BLOCKS_PER_HASH, Finished, RequestLogFile

#: Two seconds of more requests than one process can route; 1 MB of usual prompts, 32 MB of the longest.
MAX_WAITING = 2000
#: Written at once when so many wait, and otherwise once a second.
BATCH = 500
FLUSH_S = 1.0


class RequestLog:
    """The queue of one proxy.

    Parameters
    ----------
    file:
        Where lines go.
    count:
        Told (`written`, `dropped` or `failed`, number of lines).
    max_waiting:
        Lines held while the disk is busy.
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
        #: What was said last of drops and failures, so that each is said once until it is over.
        self._dropping = self._failing = False

    def add(
        self,
        *,
        received_s: float,
        model: str | None,
        input_tokens: int,
        output_tokens: int | None,
        text_bytes: int,
        status: int,
        blocks: bytes,
    ) -> None:
        """Take in one request; `blocks` is its fingerprint's. Never waits and never fails."""
        if len(self._waiting) >= self._max_waiting:
            self._dropped += 1
            return
        hashes = np.frombuffer(blocks, dtype="<u8")[BLOCKS_PER_HASH - 1 :: BLOCKS_PER_HASH].tobytes()
        self._waiting.append(Finished(received_s, model, input_tokens, output_tokens, text_bytes, status, hashes))
        if len(self._waiting) == BATCH:
            self._wake.set()

    async def run(self) -> None:
        """Write what comes, until `stop`; then what is left."""
        while not self._stopping:
            await self._rest()
            await self._flush()
        await self._flush()

    def stop(self) -> None:
        """Nothing more will come."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """After `run` has ended."""
        self._file.close()

    async def _rest(self) -> None:
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
        except (OSError, ValueError) as error:  # the second if something else lies there by now
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
                log("request_log_dropped", level=logging.WARNING, lines=dropped, reason="the disk does not keep up")
        self._dropping = dropped > 0

    def _log_failure(self, error: Exception) -> None:
        if not self._failing:
            reason = getattr(error, "strerror", None) or str(error)
            log("request_log_failed", level=logging.ERROR, file=str(self._file.path), reason=reason)
        self._failing = True
