"""Filters of a trace: the replayed requests and their times.

Owns the filters, the order in which they act, and the window, which is given as offsets or as dates and times
(`parse_window`). Leaves reading a line to `rows`. The order, always the same:

1. `start` and `end` keep a window, counted from the file's first request, or from time stamp 0 (`from_zero`) where
   the stamps of several files count from one instant,
2. `max_input` drops requests that are too long,
3. `limit` keeps the first N of those, in the file's order,
4. `max_output` caps the output of each, `min_output` extends it,
5. `spread` scatters requests that share a time stamp,
6. the rest is sorted by time (stable) and rebased: the first remaining request is at 0,
7. with `user_sessions` a request without a session has that of its user.

`time_scale` is no filter: it acts once, in `scheduled_s`. `next_turns` says what a closed loop sends after what.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gorgo.errors import TraceError
from gorgo.lab.traces.rows import TraceRequest

#: A file may be a little out of order. Reading stops only this long after `end`, so that a day's file of many GB is
#: not read to its last line for a window in its morning.
REORDER_SLACK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilters:
    """Filters of a trace; the defaults change nothing.

    Parameters
    ----------
    limit:
        Most requests.
    max_input:
        Requests with more input tokens are dropped.
    max_output:
        Output tokens of a request are capped at this.
    min_output:
        Every request has at least so many output tokens. At `max_output`, every answer ends at the cap.
    spread_s:
        Requests with equal time stamps are scattered uniformly over so many seconds. For traces whose clock is coarse.
    start_s, end_s:
        Window [start, end) in seconds from the file's first request, or from time stamp 0 with `from_zero`.
    seed:
        Of the scatter.
    user_sessions:
        All requests of a user without a session are one session.
    """

    limit: int | None = None
    max_input: int | None = None
    max_output: int | None = None
    min_output: int = 1
    spread_s: float = 0.0
    start_s: float = 0.0
    end_s: float | None = None
    seed: int = 0
    from_zero: bool = False
    user_sessions: bool = False

    def apply(self, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
        """Return the remaining requests in the order of their times, the first at 0."""
        selected = list(_first(self.limit, self._short_enough(self._window(requests))))
        selected = [replace(request, output_tokens=self._capped(request)) for request in selected]
        rebased = _rebased(sorted(self._scattered(selected), key=lambda request: request.timestamp_s))
        return [_in_user_session(request) for request in rebased] if self.user_sessions else rebased

    def _window(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        origin_s = 0.0 if self.from_zero else None
        for request in requests:
            origin_s = request.timestamp_s if origin_s is None else origin_s
            offset_s = request.timestamp_s - origin_s
            if self.end_s is not None and offset_s >= self.end_s + REORDER_SLACK_S:
                return
            begun = not self.start_s or offset_s >= self.start_s  # a start of 0 drops nothing that is out of order
            if begun and (self.end_s is None or offset_s < self.end_s):
                yield request

    def _short_enough(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        return (r for r in requests if self.max_input is None or r.input_tokens <= self.max_input)

    def _capped(self, request: TraceRequest) -> int:
        tokens = max(request.output_tokens, self.min_output)
        return tokens if self.max_output is None else min(tokens, self.max_output)

    def _scattered(self, requests: list[TraceRequest]) -> list[TraceRequest]:
        if not self.spread_s:
            return requests
        chance = random.Random(self.seed)
        on_stamp = Counter(request.timestamp_s for request in requests)
        return [
            _later(request, chance.random() * self.spread_s) if on_stamp[request.timestamp_s] > 1 else request
            for request in requests
        ]


def scheduled_s(request: TraceRequest, time_scale: float) -> float:
    """When to send it, in seconds from the start. The one place where `time_scale` acts: 2.0 = half the load."""
    return request.timestamp_s * time_scale


def next_turns(requests: Sequence[TraceRequest]) -> dict[int, tuple[TraceRequest, float]]:
    """Return the session's next request by the index of each, with the think time before it, s.

    A closed loop sends it that long after the end of the answer. Without a think time in the trace that is the time
    between the two stamps, which has the answer's duration in it.

    >>> one, two = (TraceRequest(index, 10.0 * index, 9, 9, session="a") for index in (0, 1))
    >>> next_turns([one, two])[0][1]
    10.0
    """
    found: dict[int, tuple[TraceRequest, float]] = {}
    last: dict[str, TraceRequest] = {}
    for request in requests:
        if request.session is None:
            continue
        before = last.get(request.session)
        if before is not None:
            think_s = request.timestamp_s - before.timestamp_s if request.think_s is None else request.think_s
            found[before.index] = request, think_s
        last[request.session] = request
    return found


def parse_offset(text: str) -> float:
    """Seconds from `90`, `1.5`, `MM:SS` or `HH:MM:SS`; raises `TraceError` for anything else."""
    parts = text.strip().split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    in_range = all(0 <= number < 60 for number in numbers[1:]) and all(0 <= number < 1e9 for number in numbers)
    if not 1 <= len(numbers) <= 3 or not in_range:
        raise TraceError(f"{text!r} is no offset within a trace; expected seconds, MM:SS or HH:MM:SS")
    seconds = 0.0
    for number in numbers:
        seconds = seconds * 60 + number
    return seconds


def _first(limit: int | None, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Stops reading with the last one it gives."""
    if limit is not None and limit <= 0:
        return
    for count, request in enumerate(requests, start=1):
        yield request
        if count == limit:
            return


def _rebased(requests: list[TraceRequest]) -> list[TraceRequest]:
    origin_s = requests[0].timestamp_s if requests else 0.0
    return [_later(request, -origin_s) for request in requests]


def _in_user_session(request: TraceRequest) -> TraceRequest:
    return request if request.session is not None else replace(request, session=request.user)


def _later(request: TraceRequest, by_s: float) -> TraceRequest:
    return replace(request, timestamp_s=request.timestamp_s + by_s)


# The window of a trace: offsets from its first request, or dates and times.
#
# ART-Chat has a file per day, but its time stamps count from the first request of the week. A date is therefore an
# offset from the instant of time stamp 0, whichever file is read.


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
