"""Chat and text completions: choices, tool calls, usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gorgo.apps.engine_server import shapes
from gorgo.apps.engine_server.streams import ResponseFormat, Served


class ChatFormat(ResponseFormat):
    """`/v1/chat/completions`."""

    def whole(self, answers: Sequence[Served]) -> object:
        choices = [
            {
                "index": served.index,
                "message": _message(served),
                "logprobs": None,
                "finish_reason": _finish(served),
                "matched_stop": None,
            }
            for served in answers
        ]
        lead = answers[0]
        return {**lead.head, "object": "chat.completion", "choices": choices, "usage": lead.usage}

    def opening(self, served: Served) -> bytes:
        name = served.job.output.tool
        opening = self._event(served, {"role": "assistant", "content": "" if name is None else None})
        if name is not None:
            call = {"index": 0, "id": call_id(served), "type": "function", "function": {"name": name, "arguments": ""}}
            opening += self._event(served, {"tool_calls": [call]})
        return opening

    def delta(self, served: Served, token: str) -> bytes:
        if served.job.output.tool is None:
            return self._event(served, {"content": token})
        return self._event(served, {"tool_calls": [{"index": 0, "function": {"arguments": token}}]})

    def closing(self, served: Served) -> bytes:
        closing = self._event(served, {}, _finish(served))
        if not served.all_finished:
            return closing
        if served.job.include_usage:
            closing += shapes.event(shapes.chat_chunk(served.head, None, None, served.usage))
        return closing + shapes.DONE

    def _event(self, served: Served, delta: dict[str, Any], finish: str | None = None) -> bytes:
        return shapes.event(shapes.chat_chunk(served.head, delta, finish, index=served.index))


class CompletionFormat(ResponseFormat):
    """`/v1/completions`, with the choices of all prompts in their order."""

    def whole(self, answers: Sequence[Served]) -> object:
        choices = [shapes.completion_choice(served.text, "length", served.index) for served in answers]
        return shapes.completion(answers[0].head, choices, answers[0].usage)

    def delta(self, served: Served, token: str) -> bytes:
        return shapes.event(shapes.completion(served.head, [shapes.completion_choice(token, None, served.index)]))

    def closing(self, served: Served) -> bytes:
        last = shapes.completion_choice("", "length", served.index)
        closing = shapes.event(shapes.completion(served.head, [last]))
        if not served.all_finished:
            return closing
        if served.job.include_usage:
            closing += shapes.event(shapes.completion(served.head, [], served.usage))
        return closing + shapes.DONE


def call_id(served: Served) -> str:
    """Return the id of a tool call, the same in all events of an answer."""
    return f"call_{served.lead.rid.rpartition('-')[2][-20:]}{served.index}"


def _message(served: Served) -> dict[str, Any]:
    name = served.job.output.tool
    message: dict[str, Any] = {"role": "assistant", "content": served.text, "reasoning_content": None}
    if name is None:
        return {**message, "tool_calls": None}
    function = {"name": name, "arguments": served.text}
    return {
        **message,
        "content": None,
        "tool_calls": [{"id": call_id(served), "index": 0, "type": "function", "function": function}],
    }


def _finish(served: Served) -> str:
    if served.job.output.tool is not None and not served.is_cut:
        return "tool_calls"
    return "length" if served.is_cut else "stop"
