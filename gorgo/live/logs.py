"""Logs: on stderr by the standard library's logging, and files of JSON lines, of which the request log is one.

On stderr a line is an object for programs, or aligned words for readers.

A line has ids, names, numbers and short words, never a prompt, a header or a key. An exception is logged by its type
and place, because its message may quote a client's bytes.

Lines of requests wait a moment and are written together: a write of its own takes as long as the rest of the line. Any
other line is written at once, after those that wait, so lines stay in order; the end of the process writes the rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii
from math import isfinite
from pathlib import Path
from time import time
from typing import Any, Protocol, TextIO

import msgspec
import numpy as np

from gorgo.config.model import Config
from gorgo.config.replica_advice import url_warnings
from gorgo.core.latency.ttft import PARTS
from gorgo.core.record import record
from gorgo.errors import ConfigError

LOGGER = logging.getLogger("gorgo")

#: Fields that may have lines of their own in a text line: messages of this program. What a client, an engine or a
#: source sends is in one word, so it begins no line.
LONG_FIELDS = frozenset({"error", "hint", "problem", "traceback"})

#: Columns of a text line: the longest level, and nearly all events.
_LEVEL_WIDTH, _EVENT_WIDTH = 7, 24

#: Made once: `json.dumps` with an option makes one per call. msgspec's takes a tenth of the time.
_ENCODER = json.JSONEncoder(default=str)
_ENCODE = msgspec.json.Encoder(enc_hook=str).encode

#: Lines that wait at most: 40 kB, which a pipe takes at once. And the longest wait, s.
MAX_WAITING_LINES = 128
MAX_WAIT_S = 0.1


class Lines(logging.Formatter):
    """Formats an event and its fields as a line."""

    def format(self, record: logging.LogRecord) -> str:
        return self.line(record.created, record.levelname.lower(), record.getMessage(), _fields(record))

    def line(self, created_s: float, level: str, event: str, fields: Mapping[str, Any]) -> str:
        raise NotImplementedError


class JsonLines(Lines):
    """Formats an event as one object: `time`, `level`, `event`, then the fields."""

    def __init__(self) -> None:
        super().__init__()
        #: The last line's second, and its date and time.
        self._second = -1
        self._at = ""

    def line(self, created_s: float, level: str, event: str, fields: Mapping[str, Any]) -> str:
        second, microseconds = divmod(round(created_s * 1e6), 1_000_000)
        if second != self._second:
            self._second, self._at = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        at = f"{self._at}.{microseconds // 1000:03}+00:00"
        words = f", {_object(fields)[1:]}" if fields else "}"
        return f'{{"time": "{at}", "level": "{level}", "event": {_ENCODER.encode(event)}{words}'


class TextLines(Lines):
    """Formats an event in columns: time (UTC), level, event, then `name=value`.

    Unknown fields are left out, the id of a request comes last, and a message of several lines (`LONG_FIELDS`) is
    indented below. No other field can begin a line.
    """

    def line(self, created_s: float, level: str, event: str, fields: Mapping[str, Any]) -> str:
        at = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        fields = {name: value for name, value in fields.items() if value is not None}
        if "request_id" in fields:
            fields["request_id"] = fields.pop("request_id")
        long = {
            name: value
            for name, value in fields.items()
            if name in LONG_FIELDS and isinstance(value, str) and "\n" in value
        }
        words = [f"{name}={_word(value)}" for name, value in fields.items() if name not in long]
        head = f"{at}Z {level:{_LEVEL_WIDTH}} {event:{_EVENT_WIDTH}}"
        below = [f"    {_printable(line)}" for text in long.values() for line in text.splitlines()]
        return "\n".join([" ".join([head, *words]).rstrip(), *below])


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines to stderr: records at once, requests in batches."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self.setFormatter(lines)
        self._lines = lines
        self._waiting: list[tuple[float, str, Mapping[str, Any]]] = []

    def add(self, event: str, fields: Mapping[str, Any]) -> None:
        """Let a line of level info wait for others. Needs a running loop."""
        assert self.lock is not None, "handlers have one"
        with self.lock:
            self._waiting.append((time(), event, fields))
            waiting = len(self._waiting)
        if waiting == 1:
            asyncio.get_running_loop().call_later(MAX_WAIT_S, self.flush)
        elif waiting >= MAX_WAITING_LINES:
            self.flush()

    def emit(self, record: logging.LogRecord) -> None:
        self._write_waiting()
        super().emit(record)

    def flush(self) -> None:
        """Write what waits. The end of the process calls this too."""
        self.acquire()
        try:
            self._write_waiting()
            super().flush()
        finally:
            self.release()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        line = self._lines.line
        try:
            self.stream.write("".join([f"{line(at, 'info', event, fields)}\n" for at, event, fields in waiting]))
        except OSError:  # as for a record: a log that cannot be written ends no request
            self.handleError(LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, waiting[-1][1], (), None))


#: Formats of lines by name, as the command line offers them.
FORMATS: Mapping[str, type[Lines]] = {"json": JsonLines, "text": TextLines}


def set_up_logs(form: str = "json", level: str = "info") -> None:
    """Send GORGO's records of `level` and above to stderr; called once, by the command line."""
    handler = LineHandler(FORMATS[form]())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False
    # No line shows them, and each record would look them up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one record, unless its level is off."""
    if LOGGER.isEnabledFor(level):
        # `LOGGER.log` would search the stack for a caller that no line shows.
        record = LOGGER.makeRecord(LOGGER.name, level, "", 0, event, (), None, extra={"fields": fields})
        LOGGER.handle(record)


def log_request(fields: Mapping[str, Any]) -> None:
    """Log the end of a request. On the proxy's own handler the line waits for others."""
    handlers = LOGGER.handlers
    if len(handlers) != 1 or not isinstance(handler := handlers[0], LineHandler) or LOGGER.propagate:
        log("request", **fields)
    elif LOGGER.isEnabledFor(logging.INFO):
        handler.add("request", fields)


def flush_logs() -> None:
    """Write the lines that wait."""
    for handler in LOGGER.handlers:
        handler.flush()


def log_failure(event: str, failure: BaseException, **fields: Any) -> None:
    """Log a fault of the proxy itself."""
    LOGGER.error(event, extra={"fields": {**fields, **_place(failure)}})


def log_config_warnings(config: Config) -> None:
    """Log what is valid in the configuration and rarely meant, as `gorgo check` shows it."""
    for warning in url_warnings(config.replicas):
        log("config_warning", level=logging.WARNING, warning=warning)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", None) or {}
    if record.exc_info and record.exc_info[1] is not None:
        return {**fields, **_place(record.exc_info[1])}
    return fields


def _object(fields: Mapping[str, Any]) -> str:
    """Return fields as `json.dumps` writes them; but NaN, which is no JSON, as null."""
    try:
        text = msgspec.json.format(_ENCODE(fields), indent=0).decode("ascii")
        if "\x7f" not in text:
            return text
    except (msgspec.MsgspecError, ValueError, OverflowError):  # what is not ASCII; half a pair; numbers of 65 bits
        pass
    return _ENCODER.encode(_finite(fields))


def _finite(value: Any) -> Any:
    """Return `value` with None in place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _word(value: object) -> str:
    """Return a value as one word; a text with blanks is quoted, a list or mapping is JSON."""
    if isinstance(value, str):
        return _ENCODER.encode(value) if " " in value or '"' in value or not value else _printable(value)
    return _ENCODER.encode(value)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _place(failure: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(failure.__traceback__)[-3:]
    where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return {"error": type(failure).__name__, "where": where}


# A log of lines, as the request log: a bounded queue that one task empties, and a bounded set of files.
# A request never waits for the log. Lines beyond the bound are dropped, counted and logged.


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


class LineOutput(Protocol):
    """What a log writes to."""

    @property
    def path(self) -> Path: ...

    def write(self, lines: Iterable[Line]) -> None:
        """Append the lines; called in a thread. Raises `OSError`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WrittenLine:
    """A line of another worker, in its form."""

    text: str

    def as_line(self) -> str:
        return self.text


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
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            complete = status.st_size == 0 or os.pread(descriptor, 1, status.st_size - 1) == b"\n"
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        self._descriptor, self._size = descriptor, status.st_size
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
        file: LineOutput,
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

    def write_to(self, file: LineOutput, *, count: Callable[[str, int], None]) -> None:
        """Write the next lines to another file, and count them there."""
        self._file, self._count = file, count

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


# The request log on disk: one JSON line per finished request, in a bounded set of files. No prompt, no key.
#
# `LineLog` and `LineFile` own the writing and the rotation; `gorgo.lab.request_log` reads the files.
#
# Theory of operation: `received_s` is wall-clock time, so lines of several files and runs are in one order. Block
# hashes are every eighth of the prefix index; each covers the whole prefix up to its end. The fingerprint's key is
# drawn per run, so hashes of two runs do not compare. Each file, and each run within it, therefore begins with a
# header that has the run's `boot_id`. A truncated line (`kill -9`, full disk) is followed by a header or by nothing.


SCHEMA = 1
#: Blocks of the prefix index per hash in the log: 512 tokens of 4 bytes, as in Mooncake's traces.
BLOCKS_PER_HASH = 8
#: One day of five requests a second with prompts of 2,000 tokens.
MAX_FILE_BYTES = 64 << 20
MAX_FILES = 5
_ENCODE_REQUEST = msgspec.json.Encoder().encode
#: All at once, in a third of the time.
_PARTS = f"[{', '.join(['%.4f'] * len(PARTS))}]"


@record
class Finished:
    """One finished request, with any result.

    Parameters
    ----------
    received_s:
        Wall-clock time, seconds since the epoch.
    model:
        `None` if the request names none, or a name that is too long.
    input_tokens:
        The engine's count, or an estimate.
    output_tokens:
        The engine's count; `None` without a report.
    text_bytes:
        Bytes of the prompt: with `input_tokens` they place a hash among the tokens.
    status:
        HTTP status; 499 if the client disconnected.
    hashes:
        8 bytes per hash, little-endian.
    client:
        Name of its key; `None` while clients need none.
    replica, cached_tokens, attempts:
        Of the last attempt; `None` where unknown. One attempt is a request without retry and hedge.
    boundaries:
        Tokens at the end of each message, of the `input_tokens`.
    queued_s, ttft_s, e2e_s:
        From `received_s` to the dispatch, the first token, the end; `None` without.
    ttft_parts_s:
        What `ttft_s` consists of (`core.latency.ttft.PARTS`); `None` without a first token.
    """

    received_s: float
    model: str | None
    input_tokens: int
    output_tokens: int | None
    text_bytes: int
    status: int
    hashes: bytes
    client: str | None = None
    replica: str | None = None
    cached_tokens: int | None = None
    attempts: int = 0
    queued_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    boundaries: Sequence[int] = ()
    ttft_parts_s: tuple[float, ...] | None = None

    def as_line(self) -> str:
        """Return the JSON line."""
        hashes = "[]"
        if self.hashes:  # all at once: one by one they take most of the time
            words = np.frombuffer(self.hashes, dtype="<u8").byteswap().tobytes().hex("-", 8).replace("-", '", "')
            hashes = f'["{words}"]'
        boundaries = (
            _ENCODE_REQUEST(self.boundaries).decode().replace(",", ", ")
        )  # by `repr` it takes half of the line's time
        parts = "null" if self.ttft_parts_s is None else _PARTS % self.ttft_parts_s
        return (
            f'{{"received_s": {self.received_s:.4f}, "model": {_text(self.model)}, "client": {_text(self.client)},'
            f' "input_tokens": {self.input_tokens}, "output_tokens": {_number(self.output_tokens)},'
            f' "text_bytes": {self.text_bytes}, "status": {self.status}, "replica": {_text(self.replica)},'
            f' "cached_tokens": {_number(self.cached_tokens)}, "attempts": {self.attempts},'
            f' "queued_s": {_seconds(self.queued_s)}, "ttft_s": {_seconds(self.ttft_s)},'
            f' "e2e_s": {_seconds(self.e2e_s)}, "ttft_parts_s": {parts}, "boundaries": {boundaries},'
            f' "block_hashes": {hashes}}}\n'
        )


class RequestLogFile(LineFile):
    """The files of the request log.

    Parameters
    ----------
    boot_id:
        Of this run.
    clock:
        Wall-clock seconds, for the header.
    block_bytes:
        Text per hash.
    """

    def __init__(
        self,
        path: Path,
        *,
        boot_id: str,
        clock: Callable[[], float],
        block_bytes: int,
        max_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
    ) -> None:
        header = {
            "gorgo_request_log": SCHEMA,
            "boot_id": boot_id,
            "started_s": round(clock(), 4),
            "block_bytes": block_bytes,
        }
        super().__init__(path, header, kind="a request log", max_bytes=max_bytes, max_files=max_files)


def logged_hashes(blocks: bytes) -> bytes:
    """Return the hashes of a fingerprint that a line has: every eighth.

    >>> len(logged_hashes(bytes(8 * 20)))
    16
    """
    if len(blocks) < 8 * BLOCKS_PER_HASH:
        return b""
    return np.frombuffer(blocks, dtype="<u8")[BLOCKS_PER_HASH - 1 :: BLOCKS_PER_HASH].tobytes()


def _text(text: str | None) -> str:
    return "null" if text is None else encode_basestring_ascii(text)


def _number(count: int | None) -> str:
    return "null" if count is None else str(count)


def _seconds(seconds: float | None) -> str:
    return "null" if seconds is None else f"{seconds:.4f}"
