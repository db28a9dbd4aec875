"""The JSON of answers: OpenAI's and SGLang's shapes, and server-sent events made of them.

Owns the response side of the wire. A chat or completion event is made ready once per stream as a head and a tail, with
the token between them; `/generate` repeats the whole text so far in each event, as SGLang does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

DONE = b"data: [DONE]\n\n"

#: Placeholder of a token when an event is cut into head and tail; it occurs nowhere else in an event.
_GAP = "\x00token\x00"


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event with its type as its name, as in OpenAI's responses and in Anthropic's API."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


def frame(piece: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def usage(*, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage` with the cache report that SGLang gives with `--enable-cache-report`."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "reasoning_tokens": 0,
    }


def error(message: str, status: int) -> dict[str, Any]:
    """SGLang's error on the OpenAI routes."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return {"object": "error", "message": message, "type": kind, "param": _param(message), "code": status}


def generate_error(message: str) -> dict[str, Any]:
    """SGLang's error on `/generate`."""
    return {"error": {"message": message}}


def responses_error(message: str, status: int) -> dict[str, Any]:
    """OpenAI's error, on /v1/responses."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": _param(message), "code": None}}


def messages_error(message: str, status: int) -> dict[str, Any]:
    """Anthropic's error."""
    kind = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _param(message: str) -> str | None:
    """Return the field that a message names before a colon."""
    name, colon, _ = message.partition(": ")
    return name if colon and " " not in name else None


def chat_chunk(
    head: Mapping[str, Any],
    delta: Mapping[str, Any] | None,
    finish: str | None,
    used: Mapping[str, Any] | None = None,
    *,
    index: int = 0,
) -> dict[str, Any]:
    """A `chat.completion.chunk`; without a delta it has no choices (the usage chunk)."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return {**head, "object": "chat.completion.chunk", "choices": [] if delta is None else [choice], "usage": used}


def completion_choice(text: str, finish: str | None, index: int) -> dict[str, Any]:
    """A choice of `/v1/completions`, streamed or not."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}


def completion(
    head: Mapping[str, Any], choices: Sequence[Mapping[str, Any]], used: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A chunk, or a whole answer, of `/v1/completions`; without choices it is the usage chunk."""
    return {**head, "object": "text_completion", "choices": choices, "usage": used}


def chat_token_event(head: Mapping[str, Any], index: int) -> tuple[bytes, bytes]:
    """A content event of a chat, cut where the token goes."""
    return _cut(event(chat_chunk(head, {"content": _GAP}, None, index=index)))


def completion_token_event(head: Mapping[str, Any], index: int) -> tuple[bytes, bytes]:
    """A content event of a completion, cut where the token goes."""
    return _cut(event(completion(head, [completion_choice(_GAP, None, index)])))


def _cut(whole: bytes) -> tuple[bytes, bytes]:
    before, after = whole.split(json.dumps(_GAP)[1:-1].encode())
    return before, after
