"""Token counts that a response reports: `usage` in the OpenAI and Anthropic dialects, `meta_info` in SGLang's.

Owns finding them without parsing the response (a batch aside): the last object under such a key in the bytes. Within a
JSON string a quote is escaped, so generated text cannot be mistaken for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from itertools import islice
from typing import Any

from gorgo.core.numeric import MAX_AMOUNT
from gorgo.core.record import mutable_record, record
from gorgo.core.stream.sse import MAX_EVENT_BYTES

#: Bytes retained of a stream's end: more than any usage object with its tail, little enough for thousands of streams.
TAIL_BYTES = 16 * 1024
#: Bytes beyond that before it is cut again, so that the copy costs little per chunk.
SLACK_BYTES = 2 * 1024
#: Bytes retained of a stream's start, where Anthropic's dialect reports the prompt's length.
HEAD_BYTES = 2 * 1024
#: Objects of that name that are searched for a usage: a dialect puts one or two behind it, and a reply of nothing else
#: would delay all other streams for a second.
MAX_CANDIDATES = 8

_USAGE, _META_INFO = b'"usage"', b'"meta_info"'
_KEY = re.compile(rb'"(?:usage|meta_info)"\s*:\s*(?=\{)')
#: What `json.JSONDecoder.raw_decode` calls: it raises `StopIteration` where there is no value.
_SCAN: Callable[[str, int], tuple[object, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


@record
class Usage:
    """Token counts; `None` where the response reports none. `cached_tokens` of the prompt came from the cache."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")


@mutable_record
class UsageReader:
    """Retains both ends of a stream, and reads its usage on demand.

    Example
    -------
    >>> tail = UsageReader()
    >>> tail.feed(b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\\n\\n')
    >>> tail.usage()
    Usage(prompt_tokens=9, cached_tokens=None, output_tokens=2)
    """

    #: Empty while the tail has it.
    _head: bytes = b""
    _tail: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes) -> None:
        tail = self._tail
        tail += chunk
        if len(tail) > TAIL_BYTES + SLACK_BYTES:
            if not self._head:
                self._head = bytes(tail[:HEAD_BYTES])
            del tail[:-TAIL_BYTES]

    @property
    def tail(self) -> bytes:
        """The last bytes: all of a short stream."""
        return bytes(self._tail[-TAIL_BYTES:])

    def usage(self) -> Usage | None:
        last = _last_usage(self.tail)
        if last is not None and None not in (last.prompt_tokens, last.cached_tokens, last.output_tokens):
            return last
        head = self._head or bytes(self._tail[:HEAD_BYTES])
        return filled(last, _first_usage(head))


def read_usage(body: bytes) -> Usage | None:
    """Usage of a whole JSON body. A batch of `/generate` is a list with one `meta_info` each: their sum."""
    if body.lstrip()[:1] != b"[":
        return _last_usage(body)
    usages = [usage for usage in map(_usage, _meta_infos(body)) if usage is not None]
    if not usages:
        return None
    return Usage(*(_sum([getattr(usage, name) for usage in usages]) for name in _COUNTS))


def _meta_infos(body: bytes) -> list[object]:
    """Those of a batch, each of its answer. Parsed: there may be hundreds, and it is small, being withheld."""
    try:
        answers = json.loads(body)
    except (ValueError, RecursionError):
        return []
    return [answer.get("meta_info") for answer in answers if isinstance(answer, Mapping)]


def filled(usage: Usage | None, other: Usage | None) -> Usage | None:
    """Return `usage` with unknown counts taken from `other`."""
    if usage is None or other is None:
        return usage or other
    mine = ((getattr(usage, name), getattr(other, name)) for name in _COUNTS)
    return Usage(*(second if first is None else first for first, second in mine))


class UsageEventFilter:
    """Removes the usage-only event from a stream whose client did not request it; all else passes byte for byte.

    Engines end a chat or completion stream with one event of empty `choices` when `stream_options.include_usage` is
    set. An event is buffered until its end; one longer than `MAX_EVENT_BYTES` is let through as it comes.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._pending = b""
        self._searched = 0
        self._passing = False

    def feed(self, chunk: bytes) -> bytes:
        """What may go downstream now."""
        if not self._pending and chunk.endswith(b"\n\n") and b'"usage"' not in chunk:
            # Whole events, as nearly always: nothing to buffer.
            return chunk
        self._pending += chunk
        out: list[bytes] = []
        start = 0
        for end in _EVENT_END.finditer(self._pending, self._searched):
            event = self._pending[start : end.end()]
            start = end.end()
            usage_only = not self._passing and self._is_usage_only(event)
            # Blank lines before it are not the event's.
            out.append(event[: len(event) - len(event.lstrip(b"\r\n"))] if usage_only else event)
            self._passing = False
        self._pending = self._pending[start:]
        # An end is four bytes at most, and the last byte may be half of a CR LF.
        self._searched = max(0, len(self._pending) - 4)
        if self._passing or len(self._pending) > MAX_EVENT_BYTES:
            out.append(self._release())
        return b"".join(out)

    def flush(self) -> bytes:
        """Return the rest of a stream that ends without the end of its last event."""
        rest, self._pending, self._searched = self._pending, b"", 0
        return rest

    def _release(self) -> bytes:
        """Let the rest of a long event through, but for the bytes that may belong to its end."""
        self._passing = True
        rest, self._pending = self._pending[:-4], self._pending[-4:]
        self._searched = 0
        return rest

    def _is_usage_only(self, event: bytes) -> bool:
        if not _KEY.search(event):
            return False
        lines = event.removeprefix(b"\xef\xbb\xbf").splitlines()
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return False
        if not isinstance(body, dict) or body.get("choices") != [] or not isinstance(body.get("usage"), dict):
            return False
        self.usage = _usage(body["usage"]) or self.usage
        return True


#: A blank line: two line ends in a row. A CR that an LF follows, or that is last so far, is no end of its own.
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?=[^\n]))(?:\r\n|\n|\r(?=[^\n]))")


def _last_usage(data: bytes) -> Usage | None:
    """Return the last usage object in `data`, of the last `MAX_CANDIDATES` that may be one. Most is not searched."""
    usage, meta = data.rfind(_USAGE), data.rfind(_META_INFO)
    reads = 0
    while (place := usage if usage > meta else meta) >= 0 and reads < MAX_CANDIDATES:
        key = _KEY.match(data, place)
        if key is not None:
            reads += 1
            found = _usage(_object_at(data, key.end()))
            if found is not None:
                return found
        if place == usage:
            usage = data.rfind(_USAGE, 0, place)
        else:
            meta = data.rfind(_META_INFO, 0, place)
    return None


def _first_usage(data: bytes) -> Usage | None:
    """Return the first usage object in `data`, of the first `MAX_CANDIDATES` that may be one."""
    for key in islice(_KEY.finditer(data), MAX_CANDIDATES):
        found = _usage(_object_at(data, key.end()))
        if found is not None:
            return found
    return None


def _object_at(data: bytes, start: int) -> object:
    """The JSON object that starts at `start`; `None` if it is cut off or broken."""
    try:
        found: object = _SCAN(data[start : start + TAIL_BYTES].decode("utf-8", "replace"), 0)[0]
    except (StopIteration, ValueError, RecursionError):
        return None
    return found


def _usage(fields: object) -> Usage | None:
    """Counts of a usage object in any dialect; `None` if it has none."""
    if not isinstance(fields, dict):
        return None
    prompt = _count(fields, "prompt_tokens", "input_tokens")
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    if cached is None:
        cached = _count(fields, "cached_tokens")
    if "cache_read_input_tokens" in fields:
        # Anthropic's dialect counts what was read from the cache, and what was written to it, beside the input.
        cached = _count(fields, "cache_read_input_tokens")
        written = _count(fields, "cache_creation_input_tokens")
        prompt = None if prompt is None else prompt + (cached or 0) + (written or 0)
    output = _count(fields, "completion_tokens", "output_tokens")
    return None if prompt is None and output is None else Usage(prompt, cached, output)


def _count(fields: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = fields.get(name)
        if type(value) is int and 0 <= value <= MAX_AMOUNT:
            return value
    return None


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
