"""Logs as JSON lines on stderr, by the standard library's logging.

Owns the form and what may be in it: ids, names, numbers and short words. Never a prompt, a header or a key; an
exception is logged by its type and place, because its message may quote what a client sent.
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
    """One object per record: `time`, `level`, `event`, then the fields."""

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
    """Send GORGO's own records to stderr as JSON lines; call once, from the command line's edge."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(level)
    LOGGER.propagate = False


def log(event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """One record. Skipped cheaply when nobody listens at that level."""
    if LOGGER.isEnabledFor(level):
        # Not through `LOGGER.log`, which would walk the stack to find a caller that no line shows.
        record = LOGGER.makeRecord(LOGGER.name, level, "", 0, event, (), None, extra={"fields": fields})
        LOGGER.handle(record)


def log_failure(event: str, failure: BaseException, **fields: Any) -> None:
    """A fault of the proxy itself."""
    LOGGER.error(event, extra={"fields": {**fields, **_place(failure)}})


def log_missing(replica: str, missing: MissingReport | None) -> None:
    """What a replica turned out not to report, if anything."""
    if missing is not None:
        log(
            "report_missing", level=logging.WARNING, replica=replica, report=missing.report.value, advice=missing.advice
        )


def _place(failure: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(failure.__traceback__)[-3:]
    where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return {"error": type(failure).__name__, "where": where}
