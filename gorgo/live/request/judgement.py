"""Results of attempts by what a replica answered: statuses, error events, and how long an answer may be.

Owns the rules; the judgement of bytes is `core.stream`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

from gorgo.core.messages.request import REFUSALS, AttemptResult, Outcome
from gorgo.core.stream import Usage, is_short
from gorgo.live.http.headers import Header, find

#: A request for fewer tokens can be answered with no more than one.
LEAST_TOKENS = 2
#: A longer stream is no short answer.
SHORT_BYTES = 4 * 1024
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


def failure_of(status: int, headers: Sequence[Header] = ()) -> Outcome | None:
    """Return the outcome of an error status before any content: busy or failed; None for a response to relay."""
    if status in (429, 503):
        retry_after_s = _retry_after_s(headers)
        return Outcome(AttemptResult.BUSY, status=status, error=f"status_{status}", retry_after_s=retry_after_s)
    if not 200 <= status < 300 and not 400 <= status < 500 and status not in REFUSALS:
        # Redirects too: they are not followed.
        return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=status, error=f"status_{status}")
    return None


def result_of_stream(error_status: int | None) -> AttemptResult:
    """Return the result of a complete stream; `error_status` is that of an error event before any content."""
    if error_status is None:
        return AttemptResult.COMPLETED
    return AttemptResult.UPSTREAM_4XX if failure_of(error_status) is None else AttemptResult.FAILED_AFTER_CONTENT


def failure_of_event(error_status: int | None) -> Outcome | None:
    """Return the outcome of an error event before any content; None for a 4xx."""
    return failure_of(500 if error_status is None else error_status)


def is_short_stream(route: str, stream: bytes, usage: Usage | None, *, may_be_short: bool) -> bool | None:
    """Return whether a stream is doubtfully short, as `Outcome.short`; `stream` has at least its last bytes."""
    if len(stream) > SHORT_BYTES or not is_short(route, stream, usage):
        return False
    return True if may_be_short else None


def is_short_usage(usage: Usage | None, *, may_be_short: bool) -> bool | None:
    """Return whether an answer is doubtfully short by its usage alone, as `Outcome.short`; without one it is not."""
    if usage is None or usage.output_tokens is None or usage.output_tokens > 1:
        return False
    return True if may_be_short else None


def wants_more_than_one(parsed: Mapping[str, Any]) -> bool:
    """Return whether a request leaves room for a longer answer than one token.

    >>> wants_more_than_one({"max_tokens": 2}), wants_more_than_one({"max_tokens": 1})
    (True, False)
    """
    sampling = parsed.get("sampling_params")
    return _allows_more(parsed) and (not isinstance(sampling, dict) or _allows_more(sampling))


def _allows_more(fields: Mapping[str, Any]) -> bool:
    for name in _MAX_TOKENS:
        if name in fields:
            limit = fields[name]
            if isinstance(limit, int) and limit < LEAST_TOKENS:
                return False
    return True


def _retry_after_s(headers: Sequence[Header]) -> float | None:
    """Return the seconds of `Retry-After`; a date counts from the replica's own `Date`, else from this clock."""
    value = find(headers, b"retry-after") or b""
    if value.isdigit() and len(value) < 10:
        return float(value)
    at_s = _unix_s(value)
    if at_s is None:
        return None
    now_s = _unix_s(find(headers, b"date") or b"")
    return max(0.0, at_s - (time() if now_s is None else now_s))


def _unix_s(date: bytes) -> float | None:
    """Return the Unix time of an HTTP date; `None` for anything else."""
    if not 20 <= len(date) <= 40:
        return None
    try:
        found = parsedate_to_datetime(date.decode("latin-1"))
    except (ValueError, OverflowError):
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
