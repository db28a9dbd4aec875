"""What the relay reads of a response as it passes, behind one import: pure, incremental, blind to how bytes are split.

Owns the framing of events and what the events of each dialect mean. Leaves the relay, and what follows from a result,
to the shells and to `dispatch.lifecycle`.

- `SseReader` splits a stream into events.
- `FirstTokenDetector` finds the first content, or the error that came instead.
- `UsageReader` finds the token counts that a response reports.
- `end_of_stream`, `has_end`, `error_of_body` and `is_short` judge what has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from enum import Enum
from itertools import chain, islice
from typing import Any

from gorgo.core.numeric import MAX_AMOUNT, parse_json
from gorgo.core.record import mutable_record, record

# Server-sent events out of bytes split anywhere.
#
# Owns the framing of a stream of events (WHATWG HTML, "Server-sent events": lines end in LF, CR or CR LF, a blank line
# ends an event, a line that starts with a colon is a comment). What an event means is for the parts below.


#: A longer event is passed on undecoded: the proxy buffers no more than that before it lets bytes through.
MAX_EVENT_BYTES = 64 * 1024
#: Lines that are read of one stream. Before its first token an engine sends a few, and a comment every some seconds; a
#: hostile one could send thousands in each chunk, and each takes ten microseconds.
MAX_LINES = 1024

_BOM = b"\xef\xbb\xbf"
#: The end of a line. A CR that is the last byte so far may be half of a CR LF, so it ends nothing yet.
_EOL = re.compile(rb"\r\n|\n|\r(?=[^\n])")


@record
class SseEvent:
    """One event: its name (empty unless the stream gives one) and its data lines joined by LF."""

    name: str
    data: bytes


class SseReader:
    """Turns chunks into events; comments and events without data are left out.

    Parameters
    ----------
    max_lines:
        Lines that are read.

    Example
    -------
    >>> reader = SseReader()
    >>> reader.feed(b"data: 1\\n\\nda"), reader.feed(b"ta: 2\\n\\n")
    ([SseEvent(name='', data=b'1')], [SseEvent(name='', data=b'2')])
    """

    def __init__(self, *, max_lines: float = MAX_LINES) -> None:
        #: A bound was exceeded: bytes of a line or an event, or lines in all. Nothing is read after it.
        self.overflowed = False
        self._max_lines = max_lines
        self._pending = b""
        self._searched = 0
        self._started = False
        self._name = ""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._lines = 0

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events that end in `chunk`."""
        return [*self.events(chunk)]

    def events(self, chunk: bytes) -> Iterator[SseEvent]:
        """Yield the same, each as it is read. Who does not take the last one may feed no other chunk."""
        if self.overflowed:
            return
        self._pending += chunk
        if not self._started and not self._skip_bom():
            return
        searched = self._pending[: self._searched]
        *lines, last = _EOL.split(self._pending[self._searched :])
        if lines:
            lines[0] = searched + lines[0]
        else:
            last = searched + last
        self._pending = last
        # The last byte may be a CR that only the next one can judge; it is not counted as the line's either.
        self._searched = len(last) - 1 if last else 0
        left = self._max_lines - self._lines
        self._lines += len(lines)
        for line in lines:
            left -= 1
            if left < 0 or len(line) + self._data_bytes > MAX_EVENT_BYTES:
                self.overflowed = True
                return
            if line:
                self._take(line)
            else:
                data, name = self._data, self._name
                self._data, self._data_bytes, self._name = [], 0, ""
                if data:
                    yield SseEvent(name, b"\n".join(data))
        self.overflowed = len(last) > MAX_EVENT_BYTES + 1

    def _skip_bom(self) -> bool:
        """Whether enough has come to know that there is no byte order mark (any more)."""
        if len(self._pending) < len(_BOM) and _BOM.startswith(self._pending):
            return False
        self._pending = self._pending.removeprefix(_BOM)
        self._started = True
        return True

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(line)
        elif field == b"event":
            self._name = value.removeprefix(b" ").decode("utf-8", "replace")


# When a stream has begun to answer: its first content, or the error that came instead.
#
# Owns what counts as content on each route: all that a model generates, under any name; not the headers, a role, a
# comment, an empty delta or `usage`. From the first content on nothing can be retried, and TTFT is measured
# there.


Json = Mapping[str, Any]


class StreamState(Enum):
    """State of the stream so far."""

    WAITING = "waiting"
    CONTENT = "content"
    ERROR = "error"


class FirstTokenDetector:
    """Reads a stream of events up to its first content or error, and nothing after it.

    An event too long to buffer counts as content, and so do more lines than any stream has before its first.

    Example
    -------
    >>> detector = FirstTokenDetector("/v1/completions")
    >>> detector.feed(b'data: {"choices": [{"text": ""}]}\\n\\n')
    <StreamState.WAITING: 'waiting'>
    >>> detector.feed(b'data: {"choices": [{"text": "a"}]}\\n\\n')
    <StreamState.CONTENT: 'content'>
    """

    def __init__(self, route: str) -> None:
        #: Status of the error event that came before any content.
        self.error_status: int | None = None
        #: The stream said that it is done before any content.
        self.ended = False
        self._state = StreamState.WAITING
        self._reader = SseReader()
        self._has_content, self._is_end = content_rule(route), end_rule(route)

    def feed(self, chunk: bytes) -> StreamState:
        if self._state is not StreamState.WAITING:
            return self._state
        for event in self._reader.events(chunk):
            self._state = self._judge(event)
            if self._state is not StreamState.WAITING:
                return self._state
        if self._reader.overflowed:
            self._state = StreamState.CONTENT
        return self._state

    def _judge(self, event: SseEvent) -> StreamState:
        data = parse_event(event.data)
        self.error_status = error_status(event.name, data)
        if self.error_status is not None:
            return StreamState.ERROR
        if self._has_content(data):
            return StreamState.CONTENT
        self.ended = self.ended or event.data.strip() == b"[DONE]" or self._is_end(data)
        return StreamState.WAITING


# Content is any member that is not empty and not of the frame around it: engines, and gateways before them, have ever
# new names for what a model generates, and content that is not seen is withheld, timed out and generated again.


def _has_more(data: Json, frame: frozenset[str]) -> bool:
    """Return whether `data` has a member that is not empty and not of its `frame`."""
    return bool([name for name, value in data.items() if value and name not in frame])  # one frame for all members


_DELTA_FRAME = frozenset({"role"})
_CHOICE_FRAME = frozenset({"index", "finish_reason", "stop_reason", "matched_stop", "content_filter_results"}) | {
    *("logprobs", "prompt_logprobs", "prompt_token_ids")
}
_GENERATE_FRAME = frozenset({"index", "id", "rid", "request_id", "model", "object", "created", "created_at"}) | {
    *("meta_info", "usage", "finish_reason", "details", "prompt_token_ids", "prompt_logprobs", "logprobs")
}
_RESPONSES_FRAME = frozenset({"type", "sequence_number", "item_id", "output_index", "content_index"}) | {
    *("summary_index", "annotation_index", "partial_image_index", "response", "item", "part", "logprobs"),
    "obfuscation",
}
_ITEM_FRAME = frozenset({"type", "id", "object", "status", "role", "phase"})
_BLOCK_FRAME = frozenset({"type"})
#: Events about the response as a whole.
_RESPONSE_STATES = frozenset({"response.created", "response.queued", "response.in_progress"})


def _chat_content(data: Json) -> bool:
    for choice in _each(data.get("choices")):
        if choice.get("token_ids") or _has_more(_mapping(choice.get("delta")), _DELTA_FRAME):
            return True
    return False


def _completion_content(data: Json) -> bool:
    return any(_has_more(choice, _CHOICE_FRAME) for choice in _each(data.get("choices")))


def _choice_end(data: Json) -> bool:
    return any(choice.get("finish_reason") for choice in _each(data.get("choices")))


def _generate_content(data: Json) -> bool:
    return _has_more(data, _GENERATE_FRAME)


def _generate_end(data: Json) -> bool:
    return bool(_mapping(data.get("meta_info")).get("finish_reason"))


def _responses_content(data: Json) -> bool:
    kind = data.get("type")
    if not isinstance(kind, str) or kind in _RESPONSE_STATES:
        return False
    for name in ("item", "part"):
        inner = _mapping(data.get(name))
        if _text(inner.get("type")).endswith("_call") or _has_more(inner, _ITEM_FRAME):
            return True
    return _has_more(data, _RESPONSES_FRAME)


def _responses_end(data: Json) -> bool:
    return data.get("type") in ("response.completed", "response.incomplete", "response.cancelled")


def _messages_content(data: Json) -> bool:
    if data.get("type") == "content_block_start":
        block = _mapping(data.get("content_block"))
        return _text(block.get("type")).endswith("tool_use") or _has_more(block, _BLOCK_FRAME)
    return data.get("type") == "content_block_delta" and _has_more(_mapping(data.get("delta")), _BLOCK_FRAME)


def _messages_end(data: Json) -> bool:
    return data.get("type") == "message_stop" or bool(_mapping(data.get("delta")).get("stop_reason"))


_Rule = Callable[[Json], bool]
_ROUTES: dict[str, tuple[_Rule, _Rule]] = {
    "/v1/chat/completions": (_chat_content, _choice_end),
    "/v1/completions": (_completion_content, _choice_end),
    "/generate": (_generate_content, _generate_end),
    "/v1/responses": (_responses_content, _responses_end),
    "/v1/messages": (_messages_content, _messages_end),
}


def content_rule(route: str) -> _Rule:
    """Return the rule for an event with content on a route."""
    return _ROUTES.get(route, (_chat_content, _choice_end))[0]


def end_rule(route: str) -> _Rule:
    """Return the rule for the event that ends an answer on a route."""
    return _ROUTES.get(route, (_chat_content, _choice_end))[1]


#: Finish reasons of answers that the engine broke off: by a pause, a stop or an operator (vLLM and SGLang), or because
#: it failed (gateways).
_BROKEN_OFF = ("abort", "error")


def error_status(name: str, data: Json) -> int | None:
    """Status that an error event stands for; `None` for any other event. An answer that is broken off is an error."""
    if "meta_info" in data:
        finish = _mapping(_mapping(data["meta_info"]).get("finish_reason"))
        if finish.get("type") in _BROKEN_OFF:
            return _status_of(finish)
    for choice in _each(data.get("choices")):
        if choice.get("finish_reason") in _BROKEN_OFF:
            return 500
    error = data.get("error")
    if not error and "response" in data:
        error = _mapping(data["response"]).get("error")
    if isinstance(error, dict):
        return _status_of(error)
    if error or name == "error" or data.get("type") in ("error", "response.failed") or data.get("object") == "error":
        return _status_of(data)
    return None


def _status_of(error: Json) -> int:
    for name in ("code", "status_code", "status"):
        status = error.get(name)
        if isinstance(status, str) and status.isascii() and status.isdigit() and len(status) == 3:
            status = int(status)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    words = (error.get("type"), error.get("code"))
    return next((_STATUS_OF_WORD[word] for word in words if isinstance(word, str) and word in _STATUS_OF_WORD), 500)


#: Words that the dialects use instead of a number. Any other is the replica's fault: 500.
_STATUS_OF_WORD = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "invalid_prompt": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "NotFoundError": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 503,
}


def parse_event(data: bytes) -> Json:
    """An event's JSON object; empty for anything else, which is then neither content nor error."""
    try:
        return _mapping(parse_json(data))
    except (ValueError, RecursionError):
        return {}


def _each(values: Any) -> list[Json]:
    """The objects in a list; empty where the shape is another."""
    if not isinstance(values, list):
        return []
    if len(values) == 1 and isinstance(values[0], dict):  # as of nearly every event
        return values
    return [value for value in values if isinstance(value, dict)]


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}  # the decoder's kind: no look-up of an abstract class


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# Token counts that a response reports: `usage` in the OpenAI and Anthropic dialects, `meta_info` in SGLang's.
#
# Owns finding them without parsing the response (a batch aside): the last object under such a key in the bytes. Within
# a JSON string a quote is escaped, so generated text cannot be mistaken for one.


#: Bytes retained of a stream's end: more than any usage object with its tail, little enough for thousands of streams.
TAIL_BYTES = 16 * 1024
#: Of chunks that are joined into one piece: twenty of an ordinary size, so that neither the join nor the piece counts.
PIECE_BYTES = 4 * 1024
#: What a chunk takes beside its bytes: an object and its place in a list.
_CHUNK_BYTES = 48
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

    With `keep` the whole stream is retained, as far as there is memory for it.
    """

    #: The last chunks, which are joined once they take `PIECE_BYTES`: a bytearray would be moved as it is cut.
    _chunks: list[bytes] = field(default_factory=list)
    #: What they may still take.
    _left: int = PIECE_BYTES
    #: The bytes before them: up to the last `TAIL_BYTES`, or all of them.
    _pieces: list[bytes] = field(default_factory=list)
    _pieces_bytes: int = 0
    #: Empty while the pieces have it.
    _head: bytes = b""
    #: Bytes before the pieces.
    _cut_off: int = 0
    _reserved: int = 0
    _more: Callable[[int], int] | None = None

    @property
    def size(self) -> int:
        """Bytes of the stream so far."""
        return self._cut_off + self._pieces_bytes + sum(map(len, self._chunks))

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._left = left = self._left - len(chunk) - _CHUNK_BYTES
        if left < 0:
            self._join()

    def keep(self, more: Callable[[int], int]) -> None:
        """Retain everything. `more` is called with the size when it exceeds the last limit, and returns the next one.

        Where that is no larger than the size, only the two ends are retained from then on. The tail alone is not asked
        for.
        """
        self._more = more

    def stop_keeping(self) -> None:
        """Retain only the two ends."""
        if self._more is not None:
            self._more = None
            if self._pieces_bytes > TAIL_BYTES:
                self._cut()

    @property
    def whole(self) -> bytes | None:
        """The whole stream so far, if it is retained."""
        return None if self._more is None else b"".join((*self._pieces, *self._chunks))

    def _join(self) -> None:
        """Make a piece of the chunks, and cut off what is not retained."""
        piece = b"".join(self._chunks)
        self._chunks.clear()
        self._left = PIECE_BYTES
        self._pieces.append(piece)
        self._pieces_bytes += len(piece)
        if self._pieces_bytes <= TAIL_BYTES:
            return
        if self._more is None:
            self._cut()
        elif self._pieces_bytes > self._reserved:
            self._reserved = self._more(self._pieces_bytes)
            if self._reserved <= self._pieces_bytes:
                self.stop_keeping()

    def _cut(self) -> None:
        pieces = self._pieces
        if not self._head:
            self._head = _first_bytes(pieces, HEAD_BYTES)
        while (excess := self._pieces_bytes - TAIL_BYTES) > 0:
            cut = min(excess, len(pieces[0]))
            if cut == len(pieces[0]):
                del pieces[0]
            elif cut >= PIECE_BYTES:
                pieces[0] = pieces[0][cut:]
            else:
                return
            self._cut_off += cut
            self._pieces_bytes -= cut

    @property
    def tail(self) -> bytes:
        """The last bytes: all of a short stream."""
        if not self._pieces:
            return b"".join(self._chunks)[-TAIL_BYTES:]
        size, last = 0, list[bytes]()
        for chunk in chain(reversed(self._chunks), reversed(self._pieces)):
            last.append(chunk)
            size += len(chunk)
            if size >= TAIL_BYTES:
                break
        return b"".join(reversed(last))[-TAIL_BYTES:]

    def usage(self) -> Usage | None:
        last = _last_usage(self.tail)
        if last is not None and None not in (last.prompt_tokens, last.cached_tokens, last.output_tokens):
            return last
        head = self._head or _first_bytes(chain(self._pieces, self._chunks), HEAD_BYTES)
        return filled(last, _first_usage(head))


def _first_bytes(chunks: Iterable[bytes], size: int) -> bytes:
    head = b""
    for chunk in chunks:
        head += chunk[: size - len(head)]
        if len(head) == size:
            break
    return head


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
        #: The beginning of an event, which waits for its end.
        self.pending = b""
        self._searched = 0
        self._passing = False

    def feed(self, chunk: bytes) -> bytes:
        """What may go downstream now."""
        if not self.pending and chunk[-2:] == b"\n\n" and chunk.find(b'"usage"') < 0:
            # Whole events, as nearly always: nothing to buffer. `find`, as `in` raises a TypeError inside it first.
            return chunk
        self.pending += chunk
        out: list[bytes] = []
        start = 0
        for end in _EVENT_END.finditer(self.pending, self._searched):
            event = self.pending[start : end.end()]
            start = end.end()
            usage_only = not self._passing and self._is_usage_only(event)
            # Blank lines before it are not the event's.
            out.append(event[: len(event) - len(event.lstrip(b"\r\n"))] if usage_only else event)
            self._passing = False
        self.pending = self.pending[start:]
        # An end is four bytes at most, and the last byte may be half of a CR LF.
        self._searched = max(0, len(self.pending) - 4)
        if self._passing or len(self.pending) > MAX_EVENT_BYTES:
            out.append(self._release())
        return b"".join(out)

    def flush(self) -> bytes:
        """Return the rest of a stream that ends without the end of its last event."""
        rest, self.pending, self._searched = self.pending, b"", 0
        return rest

    def _release(self) -> bytes:
        """Let the rest of a long event through, but for the bytes that may belong to its end."""
        self._passing = True
        rest, self.pending = self.pending[:-4], self.pending[-4:]
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
    while (position := usage if usage > meta else meta) >= 0 and reads < MAX_CANDIDATES:
        key = _KEY.match(data, position)
        if key is not None:
            reads += 1
            counts = _usage(_object_at(data, key.end()))
            if counts is not None:
                return counts
        if position == usage:
            usage = data.rfind(_USAGE, 0, position)
        else:
            meta = data.rfind(_META_INFO, 0, position)
    return None


def _first_usage(data: bytes) -> Usage | None:
    """Return the first usage object in `data`, of the first `MAX_CANDIDATES` that may be one."""
    for key in islice(_KEY.finditer(data), MAX_CANDIDATES):
        usage = _usage(_object_at(data, key.end()))
        if usage is not None:
            return usage
    return None


def _object_at(data: bytes, start: int) -> object:
    """The JSON object that starts at `start`; `None` if it is cut off or broken."""
    try:
        parsed: object = _SCAN(data[start : start + TAIL_BYTES].decode("utf-8", "replace"), 0)[0]
    except (StopIteration, ValueError, RecursionError):
        return None
    return parsed


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
    reported = [count for count in counts if count is not None]
    return sum(reported) if reported else None


# Whole responses: whether a stream has its end, whether a body is an error, and whether an answer is doubtfully short.
#
# Owns the judgement of bytes that have all come; `FirstTokenDetector` has that of a beginning. A faulty engine can end
# a stream without an end, answer 200 with an error, or with one token, and is faster than its peers each time.


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


def may_have_error(data: bytes) -> bool:
    """Return whether there may be an error, or the end of an answer that was broken off: in a string it is escaped."""
    # `find`, as `in` raises and clears a TypeError before it searches bytes.
    return data.find(b'"error"') >= 0 or data.find(b'"abort"') >= 0


def end_of_stream(route: str, tail: bytes) -> StreamEnd:
    """Return how a stream ended, by its last bytes. An event that is longer than these counts as a complete end.

    >>> end_of_stream("/v1/completions", b'data: {"choices": [{"text": "a"}]}\\n\\n')
    <StreamEnd.MISSING: 'missing'>
    >>> end_of_stream("/v1/completions", b'data: {"choices": [{"text": "a"}]}\\n\\ndata: [DONE]\\n\\n')
    <StreamEnd.COMPLETE: 'complete'>
    """
    if tail.rstrip().endswith(_DONE) and not may_have_error(tail):
        return StreamEnd.COMPLETE
    return _read_end(route, tail) or StreamEnd.COMPLETE


def has_end(route: str, tail: bytes) -> bool:
    """Return whether the last bytes prove that an answer is whole, though its connection broke behind them."""
    return _read_end(route, tail) is StreamEnd.COMPLETE


def _read_end(route: str, tail: bytes) -> StreamEnd | None:
    """Return how a stream ended; `None` if these bytes have no event.

    A usage of the whole answer comes behind all of its choices. Else each choice of which content has come needs an end
    of its own.
    """
    has_content, is_end = content_rule(route), end_rule(route)
    is_done = has_event = is_counted = False
    ended: set[int] = set()
    begun: set[int] = set()
    for data in _last_data(tail):
        has_event = True
        if data == _DONE:
            is_done = True
            continue
        event = parse_event(data)
        is_choice = is_end(event) or has_content(event)
        if (is_choice or not ended) and (error_status("", event) or 0) >= 500:
            return StreamEnd.ERROR
        if is_choice and is_counted:
            return StreamEnd.COMPLETE
        if is_choice:
            for index, is_last in _choices(event, is_end):
                (ended if is_last else begun).add(index)
        elif not (ended or begun) and event.get("choices") == [] and _usage(event.get("usage")) is not None:
            is_counted = True
    if is_counted:
        return StreamEnd.COMPLETE
    if is_done or (ended and begun <= ended):
        return StreamEnd.COMPLETE
    return StreamEnd.MISSING if has_event else None


def _choices(event: Json, is_end: _Rule) -> list[tuple[int, bool]]:
    """Return the index of each choice in an event, and whether it is the choice's last."""
    choices = _each(event.get("choices"))
    if choices:
        return [(_index(choice), bool(choice.get("finish_reason"))) for choice in choices]
    # An index elsewhere is one of parts of one answer.
    return [(_index(event) if "meta_info" in event else 0, is_end(event))]


def _index(fields: Json) -> int:
    index = fields.get("index")
    return index if isinstance(index, int) else 0


def error_of_body(body: bytes) -> int | None:
    """Return the status of the error that a JSON body is; `None` for an answer.

    >>> error_of_body(b'{"error": {"message": "out of memory"}}'), error_of_body(b'{"choices": [], "error": null}')
    (500, None)
    """
    if not may_have_error(body):
        return None
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return error_status("", data) if isinstance(data, Mapping) else None


#: What a whole answer of a route has in any case.
_ANSWER_KEYS = {
    "/v1/chat/completions": b'"choices"',
    "/v1/completions": b'"choices"',
    "/v1/embeddings": b'"data"',
    "/v1/messages": b'"content"',
    "/v1/responses": b'"output"',
}


def lacks_answer(route: str, body: bytes) -> bool:
    """Return whether a JSON body of a generating route has nothing that could be an answer.

    >>> lacks_answer("/v1/chat/completions", b'{"status": "ok"}'), lacks_answer("/tokenize", b'{"count": 3}')
    (True, False)
    """
    key = _ANSWER_KEYS.get(route)
    return key is not None and key not in body


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


__all__ = [
    "FirstTokenDetector",
    "SseEvent",
    "SseReader",
    "StreamEnd",
    "StreamState",
    "Usage",
    "UsageEventFilter",
    "UsageReader",
    "content_rule",
    "end_of_stream",
    "error_of_body",
    "error_status",
    "filled",
    "has_end",
    "is_json",
    "is_short",
    "lacks_answer",
    "may_have_error",
    "parse_event",
    "read_usage",
]
