"""Logs on stderr, by the standard library's logging: an object per line for programs, or aligned words for readers.

A line has ids, names, numbers and short words, never a prompt, a header or a key. An exception is logged by its type
and place, because its message may quote a client's bytes.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from gorgo.config.model import Config
from gorgo.config.replica_advice import url_warnings
from gorgo.engines.reports import MissingReport

LOGGER = logging.getLogger("gorgo")

#: Columns of a text line: the longest level, and nearly all events.
_LEVEL_WIDTH, _EVENT_WIDTH = 7, 24

#: Made once: `json.dumps` with an option makes one per call.
_ENCODER = json.JSONEncoder(default=str)


class JsonLines(logging.Formatter):
    """Formats a record as one object: `time`, `level`, `event`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        entry.update(_fields(record))
        return _ENCODER.encode(entry)


class TextLines(logging.Formatter):
    """Formats a record in columns: time (UTC), level, event, then `name=value`.

    Unknown fields are left out, the id of a request comes last, and a text of several lines is indented below. A
    control character cannot start a line of its own.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        fields = {name: value for name, value in _fields(record).items() if value is not None}
        if "request_id" in fields:
            fields["request_id"] = fields.pop("request_id")
        long = {name: value for name, value in fields.items() if isinstance(value, str) and "\n" in value}
        words = [f"{name}={_word(value)}" for name, value in fields.items() if name not in long]
        head = f"{at}Z {record.levelname.lower():{_LEVEL_WIDTH}} {record.getMessage():{_EVENT_WIDTH}}"
        below = [f"    {_printable(line)}" for text in long.values() for line in text.splitlines()]
        return "\n".join([" ".join([head, *words]).rstrip(), *below])


#: Formats of lines by name, as the command line offers them.
FORMATS: Mapping[str, type[logging.Formatter]] = {"json": JsonLines, "text": TextLines}


def set_up_logs(form: str = "json", level: str = "info") -> None:
    """Send GORGO's records of `level` and above to stderr; called once, by the command line."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[form]())
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
