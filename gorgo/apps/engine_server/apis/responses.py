"""OpenAI's responses: one output item, a message or a function call, and its typed events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gorgo.apps.engine_server import shapes
from gorgo.apps.engine_server.apis.chat import call_id
from gorgo.apps.engine_server.streams import ResponseFormat, Served

#: Fields of the request that the response repeats, and what they are if the request has none.
_REPEATED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


class ResponsesFormat(ResponseFormat):
    """`/v1/responses`; one instance per response, because it numbers the events.

    Parameters
    ----------
    remember:
        Takes the id and the text of a finished response, unless the request has `store: false`.
    """

    def __init__(self, remember: Callable[[str, bytes], None]) -> None:
        self._remember = remember
        self._number = 0

    def whole(self, answers: Sequence[Served]) -> object:
        self._store(answers[0])
        return _response(answers[0], _status(answers[0]))

    def opening(self, served: Served) -> bytes:
        response = _response(served, "in_progress")
        opening = self._event("response.created", response=response)
        opening += self._event("response.in_progress", response=response)
        opening += self._event("response.output_item.added", output_index=0, item=_item(served, "in_progress"))
        if served.job.output.tool is None:
            opening += self._event("response.content_part.added", **_place(served), part=_part(""))
        return opening

    def delta(self, served: Served, token: str) -> bytes:
        if served.job.output.tool is None:
            return self._event("response.output_text.delta", **_place(served), delta=token, logprobs=[])
        return self._event(
            "response.function_call_arguments.delta", item_id=_item_id(served), output_index=0, delta=token
        )

    def closing(self, served: Served) -> bytes:
        status = _status(served)
        if served.job.output.tool is None:
            closing = self._event("response.output_text.done", **_place(served), text=served.text, logprobs=[])
            closing += self._event("response.content_part.done", **_place(served), part=_part(served.text))
        else:
            closing = self._event(
                "response.function_call_arguments.done",
                item_id=_item_id(served),
                output_index=0,
                name=served.job.output.tool,
                arguments=served.text,
            )
        closing += self._event("response.output_item.done", output_index=0, item=_item(served, status))
        self._store(served)
        return closing + self._event(f"response.{status}", response=_response(served, status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        return shapes.named_event({"type": kind, "sequence_number": number, **fields})

    def _store(self, served: Served) -> None:
        if served.job.body.get("store") is not False:
            self._remember(served.rid, served.prompt + served.answer.text(served.emitted))


def _response(served: Served, status: str) -> dict[str, Any]:
    body = served.job.body
    repeated = {name: default if body.get(name) is None else body[name] for name, default in _REPEATED.items()}
    ended = status != "in_progress"
    return {
        "id": served.rid,
        "object": "response",
        "created_at": served.head["created"],
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": served.head["model"],
        "output": [_item(served, status)] if ended else [],
        **repeated,
        "store": body.get("store") is not False,
        "usage": _usage(served) if ended else None,
    }


def _usage(served: Served) -> dict[str, Any]:
    return {
        "input_tokens": served.prompt_tokens,
        "input_tokens_details": {"cached_tokens": served.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": served.emitted,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": served.prompt_tokens + served.emitted,
    }


def _item(served: Served, status: str) -> dict[str, Any]:
    """Return the output item so far; it has no content while in progress."""
    ended = status != "in_progress"
    item: dict[str, Any] = {"id": _item_id(served), "status": status}
    if served.job.output.tool is None:
        return {**item, "type": "message", "role": "assistant", "content": [_part(served.text)] if ended else []}
    call = {"call_id": call_id(served), "name": served.job.output.tool, "arguments": served.text if ended else ""}
    return {**item, "type": "function_call", **call}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _place(served: Served) -> dict[str, Any]:
    return {"item_id": _item_id(served), "output_index": 0, "content_index": 0}


def _item_id(served: Served) -> str:
    return ("msg_" if served.job.output.tool is None else "fc_") + served.rid.removeprefix("resp_")


def _status(served: Served) -> str:
    return "incomplete" if served.is_cut else "completed"
