"""The window of a trace: offsets from its first request, or dates and times.

ART-Chat has a file per day, but its time stamps count from the first request of the week. A date is therefore an
offset from the instant of time stamp 0, whichever file is read.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from gorgo.apps.traces.filters import parse_offset
from gorgo.errors import TraceError

#: ART-Chat-2.5M is the week of April 1 to 7, 2026. The release does not state the time of its first request; this is
#: the beginning of the day, on the clock by which the paper names its windows.
WEEK_ORIGIN = "2026-04-01T00:00"


def parse_window(start: str | None, end: str | None) -> tuple[float, float | None, bool]:
    """Start and end in seconds, and whether they count from time stamp 0 rather than from the file's first request.

    Each is an offset as in `parse_offset`, or a date and time like `2026-04-05T16:15`; without a zone all are of one
    clock. Raises `TraceError` for anything else, for a mixture, and for a window that ends before it begins.

    >>> parse_window("2026-04-01T00:05", "2026-04-01T01:00")
    (300.0, 3600.0, True)
    >>> parse_window("05:00", None)
    (300.0, None, False)
    """
    dated = {_is_date(text) for text in (start, end) if text is not None}
    if len(dated) == 2:
        raise TraceError(f"window from {start!r} to {end!r}: expected two offsets or two dates")
    from_zero = True in dated
    zero = _instant(WEEK_ORIGIN)
    start_s, end_s = (_seconds(text, zero if from_zero else None) for text in (start, end))
    if start_s is not None and end_s is not None and end_s <= start_s:
        raise TraceError(f"window from {start!r} to {end!r}: expected an end after its start")
    return start_s or 0.0, end_s, from_zero


def _is_date(text: str) -> bool:
    return re.match(r"\d{4}-", text.strip()) is not None


def _seconds(text: str | None, zero: datetime | None) -> float | None:
    if text is None:
        return None
    if zero is None:
        return parse_offset(text)
    seconds = (_instant(text) - zero).total_seconds()
    if seconds < 0:
        raise TraceError(f"{text!r} lies before {WEEK_ORIGIN}, the date of time stamp 0; give an offset instead")
    return seconds


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise TraceError(f"{text!r} is no date and time; expected one like {WEEK_ORIGIN}") from None
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)
