"""Logs as JSON lines on stderr, by the standard library's logging.

A line has ids, names, numbers and short words, never a prompt, a header or a key. An exception is logged by its type
and place, because its message may quote a client's bytes.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

from gorgo.engines.reports import MissingReport

LOGGER = logging.getLogger("gorgo")


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
        fields = getattr(record, "fields", None)
        if fields:
            entry.update(fields)
        if record.exc_info and record.exc_info[1] is not None:
            entry.update(_place(record.exc_info[1]))
        return _ENCODER.encode(entry)


def set_up_logs(level: int = logging.INFO) -> None:
    """Send GORGO's records to stderr as JSON lines; called once, by the command line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level)
    LOGGER.propagate = False


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one record, unless its level is off."""
    if LOGGER.isEnabledFor(level):
        # `LOGGER.log` would search the stack for a caller that no line shows.
        record = LOGGER.makeRecord(LOGGER.name, level, "", 0, event, (), None, extra={"fields": fields})
        LOGGER.handle(record)


def log_failure(event: str, failure: BaseException, **fields: Any) -> None:
    """Log a fault of the proxy itself."""
    LOGGER.error(event, extra={"fields": {**fields, **_place(failure)}})


def log_missing(replica: str, missing: MissingReport | None) -> None:
    """Log a report that a replica's engine does not make, if any."""
    if missing is not None:
        log(
            "report_missing", level=logging.WARNING, replica=replica, report=missing.report.value, advice=missing.advice
        )


def _place(failure: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(failure.__traceback__)[-3:]
    where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return {"error": type(failure).__name__, "where": where}
