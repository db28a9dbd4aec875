"""Whole responses: whether a stream has its end, whether a body is an error, and whether an answer is doubtfully short.

Owns the judgement of bytes that have all come; `first_token` has that of a beginning. A faulty engine can end a stream
without an end, answer 200 with an error, or with one token, and is faster than its peers each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum

from gorgo.core.stream.first_token import content_rule, end_rule, error_status, parse_event
from gorgo.core.stream.usage import Usage

#: Lines read from the end of a stream: the dialects put a handful of events behind the last token.
_LAST_LINES = 128
#: A longer event may carry more than one token, where the engine reports no usage.
_TOKEN_EVENT_BYTES = 512
_DONE = b"[DONE]"


class StreamEnd(Enum):
    """How a stream ended."""

    COMPLETE = "complete"
    #: An error event after the content.
    ERROR = "error"
    #: Neither a finish reason nor `[DONE]`.
    MISSING = "missing"


def end_of_stream(route: str, tail: bytes) -> StreamEnd:
    """Return how a stream ended, by its last bytes. An event that is longer than these counts as a complete end.

    >>> end_of_stream("/v1/completions", b'data: {"choices": [{"text": "a"}]}\\n\\n')
    <StreamEnd.MISSING: 'missing'>
    >>> end_of_stream("/v1/completions", b'data: {"choices": [{"text": "a"}]}\\n\\ndata: [DONE]\\n\\n')
    <StreamEnd.COMPLETE: 'complete'>
    """
    if b'"error"' not in tail and tail.rstrip().endswith(_DONE):
        return StreamEnd.COMPLETE
    is_end, found, done = end_rule(route), False, False
    for data in _last_data(tail):
        found = True
        if data == _DONE:
            done = True
            continue
        event = parse_event(data)
        if is_end(event):
            return StreamEnd.COMPLETE
        if (error_status("", event) or 0) >= 500:
            return StreamEnd.ERROR
    return StreamEnd.COMPLETE if done or not found else StreamEnd.MISSING


def error_of_body(body: bytes) -> int | None:
    """Return the status of the error that a JSON body is; `None` for an answer.

    >>> error_of_body(b'{"error": {"message": "out of memory"}}'), error_of_body(b'{"choices": [], "error": null}')
    (500, None)
    """
    if b'"error"' not in body and b'"abort"' not in body:
        return None
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return error_status("", data) if isinstance(data, Mapping) else None


def is_json(body: bytes) -> bool:
    """Return whether a body looks like a whole JSON object or list."""
    text = body.strip()
    return (text[:1], text[-1:]) in ((b"{", b"}"), (b"[", b"]"))


def is_short(route: str, stream: bytes, usage: Usage | None) -> bool:
    """Return whether a whole stream has one token or none, by its usage or by its events."""
    if usage is not None and usage.output_tokens is not None:
        return usage.output_tokens <= 1
    has_content = content_rule(route)
    sizes = [len(data) for data in _last_data(stream) if data != _DONE and has_content(parse_event(data))]
    return len(sizes) <= 1 and sum(sizes) <= _TOKEN_EVENT_BYTES


def _last_data(stream: bytes) -> Iterator[bytes]:
    """Yield the data of the last events, last one first. A part of a line does not begin with `data:`."""
    for line in reversed(stream.splitlines()[-_LAST_LINES:]):
        if line.startswith(b"data:"):
            yield line[5:].strip()
