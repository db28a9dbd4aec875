"""Anthropic's messages: one content block, a text or a tool use, and its typed events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gorgo.apps.engine_server import shapes
from gorgo.apps.engine_server.streams import ResponseFormat, Served


class MessagesFormat(ResponseFormat):
    """`/v1/messages`."""

    def whole(self, answers: Sequence[Served]) -> object:
        (served,) = answers
        return _message(served, [_block(served, served.text)], _stop_reason(served), served.emitted)

    def opening(self, served: Served) -> bytes:
        message = _message(served, [], None, 0)
        opening = shapes.named_event({"type": "message_start", "message": message})
        block = _block(served, "")
        return opening + shapes.named_event({"type": "content_block_start", "index": 0, "content_block": block})

    def delta(self, served: Served, token: str) -> bytes:
        if served.job.output.tool is None:
            delta = {"type": "text_delta", "text": token}
        else:
            delta = {"type": "input_json_delta", "partial_json": token}
        return shapes.named_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, served: Served) -> bytes:
        delta = {"stop_reason": _stop_reason(served), "stop_sequence": None}
        ended = {"type": "message_delta", "delta": delta, "usage": _usage(served, served.emitted)}
        return (
            shapes.named_event({"type": "content_block_stop", "index": 0})
            + shapes.named_event(ended)
            + shapes.named_event({"type": "message_stop"})
        )


def _message(
    served: Served, content: list[dict[str, Any]], stop_reason: str | None, output_tokens: int
) -> dict[str, Any]:
    return {
        "id": served.rid,
        "type": "message",
        "role": "assistant",
        "model": served.head["model"],
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": _usage(served, output_tokens),
    }


def _usage(served: Served, output_tokens: int) -> dict[str, Any]:
    """Return the counts; what was read from the cache is beside the input, not within it."""
    return {
        "input_tokens": served.prompt_tokens - served.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": served.cached_tokens,
        "output_tokens": output_tokens,
    }


def _block(served: Served, text: str) -> dict[str, Any]:
    """Return the content block. The input of a call that was cut off is empty: it is no JSON."""
    name = served.job.output.tool
    if name is None:
        return {"type": "text", "text": text}
    given = json.loads(text) if text and not served.is_cut else {}
    return {"type": "tool_use", "id": f"toolu_{served.rid.removeprefix('msg_')}", "name": name, "input": given}


def _stop_reason(served: Served) -> str:
    if served.is_cut:
        return "max_tokens"
    return "end_turn" if served.job.output.tool is None else "tool_use"
