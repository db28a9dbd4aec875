"""When a stream has begun to answer: its first content, or the error that came instead.

Owns what counts as content on each route: non-empty text, reasoning, a tool call or an audio delta; not the headers,
a role, a comment, an empty delta or `usage`. From the first content on nothing can be retried, and TTFT is measured
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from gorgo.core.json_text import parse_json
from gorgo.core.stream.sse import SseEvent, SseReader

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
        for event in self._reader.feed(chunk):
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


def _chat_content(data: Json) -> bool:
    for delta in _each(data.get("choices"), "delta"):
        for name in _DELTA_FIELDS:
            if delta.get(name):
                return True
    return False


_DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call", "audio")


def _completion_content(data: Json) -> bool:
    return any(choice.get("text") for choice in _each(data.get("choices")))


def _choice_end(data: Json) -> bool:
    return any(choice.get("finish_reason") for choice in _each(data.get("choices")))


def _generate_content(data: Json) -> bool:
    return bool(data.get("text") or data.get("output_ids"))


def _generate_end(data: Json) -> bool:
    return bool(_mapping(data.get("meta_info")).get("finish_reason"))


def _responses_content(data: Json) -> bool:
    kind = _text(data.get("type"))
    if kind.endswith(".delta"):
        return bool(data.get("delta"))
    if kind == "response.output_item.added":
        return _text(_mapping(data.get("item")).get("type")).endswith("_call")
    return kind.endswith(".done") and any(data.get(name) for name in ("text", "refusal", "arguments"))


def _responses_end(data: Json) -> bool:
    return data.get("type") in ("response.completed", "response.incomplete")


def _messages_content(data: Json) -> bool:
    if data.get("type") == "content_block_start":
        block = _mapping(data.get("content_block"))
        return bool(block.get("text") or block.get("thinking")) or _text(block.get("type")).endswith("tool_use")
    delta = _mapping(data.get("delta"))
    return data.get("type") == "content_block_delta" and any(
        delta.get(name) for name in ("text", "thinking", "partial_json")
    )


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


def error_status(name: str, data: Json) -> int | None:
    """Status that an error event stands for; `None` for any other event."""
    if "meta_info" in data:
        finish = _mapping(_mapping(data["meta_info"]).get("finish_reason"))
        if finish.get("type") == "abort":
            return _status_of(finish)
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


def _each(values: Any, name: str | None = None) -> list[Json]:
    """The objects in a list, or their member `name`; empty where the shape is another."""
    objects: list[Json] = [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
    return objects if name is None else [_mapping(value.get(name)) for value in objects]


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}  # the decoder's kind: no look-up of an abstract class


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
