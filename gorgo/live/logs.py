"""Logs on stderr, by the standard library's logging: an object per line for programs, or aligned words for readers.

A line has ids, names, numbers and short words, never a prompt, a header or a key. An exception is logged by its type
and place, because its message may quote a client's bytes.

Lines of requests wait a moment and are written together: a write of its own takes as long as the rest of the line. Any
other line is written at once, after those that wait, so lines stay in order; the end of the process writes the rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite
from time import time
from typing import Any, TextIO

import msgspec

from gorgo.config.model import Config
from gorgo.config.replica_advice import url_warnings
from gorgo.engines.base import MissingReport

LOGGER = logging.getLogger("gorgo")

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

    Unknown fields are left out, the id of a request comes last, and a text of several lines is indented below. A
    control character cannot start a line of its own.
    """

    def line(self, created_s: float, level: str, event: str, fields: Mapping[str, Any]) -> str:
        at = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        fields = {name: value for name, value in fields.items() if value is not None}
        if "request_id" in fields:
            fields["request_id"] = fields.pop("request_id")
        long = {name: value for name, value in fields.items() if isinstance(value, str) and "\n" in value}
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


def log_missing(replica: str, missing: MissingReport | None) -> None:
    """Log a report that a replica's engine does not make, if any."""
    if missing is not None:
        log(
            "report_missing", level=logging.WARNING, replica=replica, report=missing.report.value, advice=missing.advice
        )


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
