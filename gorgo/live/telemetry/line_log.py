"""A log of lines, as the request log: a bounded queue that one task empties, and a bounded set of files.

Owns the queue (`LineLog`) and the files (`LineFile`). Leaves the content of a line to its caller.

A request never waits for the log. Lines beyond the bound are dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gorgo.errors import ConfigError
from gorgo.live.logs import log

# A log on disk: JSON lines in a bounded set of files.
#
# `FILE` is rotated to `FILE.1`, `FILE.2` and so on; the oldest is removed. Each file, and each run within it, begins
# with a header. A truncated line (`kill -9`, full disk) is followed by a header or by nothing. A file that another
# program (logrotate) has moved, removed or truncated is followed before the next write, without a signal.


#: Readable for the owner alone: lengths and times are private.
_MODE = 0o600


class Line(Protocol):
    """An entry of a log."""

    def as_line(self) -> str:
        """Return the JSON line, with its end."""


class LineFile:
    """Appends lines; every call blocks until the disk is done.

    Parameters
    ----------
    path:
        The file may be missing; its folder must exist.
    header:
        First line of each file and each run.
    kind:
        Names the log in errors, as `a request log`.
    max_bytes, max_files:
        Bounds of rotation.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, kind: str, max_bytes: int, max_files: int) -> None:
        self.path = path
        self._header = json.dumps(header).encode() + b"\n"
        self._kind = kind
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> None:
        """Open the file at the start. Raises `ConfigError` for a wrong path."""
        try:
            self._open()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            expected = "expected a file, or a new name in an existing folder"
            raise ConfigError(f"{self.path}: cannot write {self._kind}: {reason}; {expected}") from error

    def write(self, lines: Iterable[Line]) -> None:
        """Append the lines. Raises `OSError`; then some lines may be written, the last one truncated."""
        text = "".join([line.as_line() for line in lines]).encode()
        self._follow_rotation()
        if self._descriptor is not None and self._size + len(text) > self._max_bytes and self._size > len(self._header):
            self._rotate()
        if self._descriptor is None:
            self._open()
        try:
            self._append(text)
        except OSError:
            self.close()  # the next write begins with a header, after a possible half line
            raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        # Nonblocking: a pipe would block until a reader comes.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, _MODE)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("not a regular file")
            complete = found.st_size == 0 or os.pread(descriptor, 1, found.st_size - 1) == b"\n"
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        self._descriptor, self._size = descriptor, found.st_size
        try:
            self._append(self._header if complete else b"\n" + self._header)
        except OSError:
            self.close()
            raise

    def _follow_rotation(self) -> None:
        """Begin a new file if another program moved or removed this one; write a header if it was truncated."""
        if self._descriptor is None:
            return
        ours = os.fstat(self._descriptor)
        try:
            there = os.lstat(self.path)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(ours, there):
            self.close()
        elif ours.st_size < self._size:
            self.close()  # opened again, it begins with a header

    def _append(self, text: bytes) -> None:
        assert self._descriptor is not None
        rest = memoryview(text)
        while rest:
            written = os.write(self._descriptor, rest)
            self._size += written
            rest = rest[written:]

    def _rotate(self) -> None:
        self.close()
        for number in range(self._max_files - 2, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        if self._max_files > 1:
            os.replace(self.path, self._numbered(1))
        else:
            os.unlink(self.path)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


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
