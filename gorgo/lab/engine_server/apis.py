"""Responses of the simulated engine in the forms of the APIs that it speaks.

Owns the bodies and events of OpenAI's chat and text completions, of Anthropic's messages, of OpenAI's responses, of
SGLang's `/generate`, and of embeddings. Leaves the request side to `gorgo.lab.engine_server.job`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from gorgo.lab.engine_server import shapes
from gorgo.lab.engine_server.streams import ResponseFormat, Served, Streamed, vector


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


# Anthropic's messages: one content block, a text or a tool use, and its typed events.


class MessagesFormat(ResponseFormat):
    """`/v1/messages`."""

    def whole(self, answers: Sequence[Served]) -> object:
        (served,) = answers
        return _anthropic_message(served, [_block(served, served.text)], _stop_reason(served), served.emitted)

    def opening(self, served: Served) -> bytes:
        message = _anthropic_message(served, [], None, 0)
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


def _anthropic_message(
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


# OpenAI's responses: one output item, a message or a function call, and its typed events.


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
        "usage": _response_usage(served) if ended else None,
    }


def _response_usage(served: Served) -> dict[str, Any]:
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


# SGLang's own `/generate`, and embeddings.


#: Finish reason of every answer: it has all requested tokens.
_FINISH = "length"


class GenerateFormat(ResponseFormat):
    """`/generate`: a list of prompts has a list of answers."""

    def whole(self, answers: Sequence[Served]) -> object:
        made = [generated(served, _FINISH) for served in answers]
        return made if answers[0].job.is_list else made[0]

    def closing(self, served: Served) -> bytes:
        return shapes.DONE if served.all_finished else b""


class GenerateStream(Streamed):
    """The stream of `/generate`: every event has the whole answer so far."""

    def emit(self, now: float) -> None:
        if self.finished:
            self.ended_s = now
        piece = shapes.event(generated(self, _FINISH if self.finished else None))
        if self.finished:
            self._send_edge(b"", piece, now)
        else:
            self._send(self.lead, self._frame(piece), now)
        self._strike(now)


def generated(served: Served, finish: str | None) -> dict[str, Any]:
    """Return the answer so far, with SGLang's account of the generation."""
    meta: dict[str, Any] = {
        "id": served.rid,
        "finish_reason": None if finish is None else {"type": finish, "length": served.emitted},
        "prompt_tokens": served.prompt_tokens,
        "weight_version": "default",
        "completion_tokens": served.emitted,
        "cached_tokens": served.cached_tokens,
    }
    if served.ended_s is not None:
        meta["e2e_latency"] = served.ended_s - served.submitted_s
    answer = {"text": served.text, "output_ids": served.answer.ids(served.emitted), "meta_info": meta}
    return {**answer, "index": served.index} if served.job.is_list else answer


class EmbeddingFormat(ResponseFormat):
    """`/v1/embeddings`: a vector per input."""

    def whole(self, answers: Sequence[Served]) -> object:
        data = [
            {"object": "embedding", "index": served.index, "embedding": vector(served.prompt)} for served in answers
        ]
        tokens = sum(served.prompt_tokens for served in answers)
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": answers[0].head["model"], "data": data, "usage": used}
