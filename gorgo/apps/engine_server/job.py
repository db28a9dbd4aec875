"""Request bodies of the engine, read leniently as SGLang does: unknown fields are ignored.

Owns the request side of the wire: the generating routes, and the fields of prompt, length and options of each.
Raises `BadRequest` with a message that is safe to send back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gorgo.apps.engine_server.outputs import (
    WORDS,
    RequestedOutput,
    chat_output,
    messages_output,
    refuse,
    responses_output,
)
from gorgo.core.prompt.parse import read_prompt
from gorgo.errors import BadRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

#: Output length when the body names none. (A real engine would go on to its own end of text.)
_DEFAULT_TOKENS = {CHAT: 128, COMPLETIONS: 16, GENERATE: 128, EMBEDDINGS: 1, RESPONSES: 128, MESSAGES: 128}
#: Names of the output length, the first one that is given counts.
_LENGTHS = {RESPONSES: ("max_output_tokens",), MESSAGES: ("max_tokens",)}
_LENGTHS_OF_OTHERS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
#: Answers of one request: OpenAI's bound on `n`.
MAX_ANSWERS = 128
#: Routes that take several prompts, and the field of them.
_PROMPTS = {COMPLETIONS: "prompt", EMBEDDINGS: "input", GENERATE: "text"}


def _is_on(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _has_audio(value: Any) -> bool:
    return isinstance(value, list) and "audio" in value


def _thinks(value: Any) -> bool:
    return not isinstance(value, dict) or value.get("type") != "disabled"


_REFUSED: dict[str, dict[str, Callable[[Any], object]]] = {
    CHAT: {
        "functions": _is_on,
        "function_call": _is_on,
        "logprobs": _is_on,
        "audio": _is_on,
        "modalities": _has_audio,
    },
    COMPLETIONS: {
        "best_of": _above_one,
        "echo": _is_on,
        "suffix": _is_on,
        "logprobs": _is_on,
        "response_format": _is_on,
    },
    RESPONSES: {"background": _is_on, "conversation": _is_on, "prompt": _is_on},
    MESSAGES: {"thinking": _thinks, "mcp_servers": _is_on, "container": _is_on},
    GENERATE: {"return_logprob": _is_on},
    EMBEDDINGS: {},
}
_REFUSED_SAMPLING: dict[str, Callable[[Any], object]] = {
    "n": _above_one, "json_schema": _is_on, "regex": _is_on, "ebnf": _is_on, "structural_tag": _is_on,
}  # fmt: skip
_OUTPUTS = {CHAT: chat_output, RESPONSES: responses_output, MESSAGES: messages_output}


@dataclass(frozen=True, slots=True)
class Job:
    """One request: the text of its prompts, and its options.

    Parameters
    ----------
    text, prompts:
        The only prompt, or the first of `prompts`.
    samples:
        Answers to each prompt.
    is_limited:
        Whether the body gives the output length.
    is_list:
        Whether the prompt was a list of prompts.
    body:
        For the fields that an answer repeats.
    """

    route: str
    text: bytes
    output_tokens: int
    stream: bool
    include_usage: bool
    rid: str | None
    prompts: tuple[bytes, ...] = ()
    samples: int = 1
    is_limited: bool = False
    is_list: bool = False
    output: RequestedOutput = WORDS
    body: Mapping[str, Any] = field(default_factory=dict)
    #: The LoRA adapter that answers: its cached prefixes are its own.
    adapter: str | None = None


def read_job(route: str, raw: bytes, text_of: Callable[[str], bytes | None] = lambda _: None) -> Job:
    """Read the body of a generating route. `text_of` gives the text of a stored response by its id."""
    body = _read_json(raw)
    prompts = _prompts(route, body, text_of)
    samples = _samples(route, body)
    if len(prompts) * samples > MAX_ANSWERS:
        name = "n" if samples > 1 else _PROMPTS[route]
        raise BadRequest(f"{name}: expected at most {MAX_ANSWERS} answers, got {len(prompts) * samples}")
    refuse(body, _REFUSED[route])
    if route == GENERATE:
        refuse(_mapping(body, "sampling_params"), _REFUSED_SAMPLING)
    options = _mapping(body, "stream_options")
    output = _OUTPUTS[route](body) if route in _OUTPUTS else WORDS
    limit = _limit(route, body)
    rid = body.get("rid")
    return Job(
        route=route,
        text=prompts[0],
        output_tokens=limit or _DEFAULT_TOKENS[route],
        stream=route != EMBEDDINGS and body.get("stream") is True,
        include_usage=options.get("include_usage") is True,
        rid=rid if isinstance(rid, str) and rid else None,
        prompts=prompts,
        samples=samples,
        is_limited=limit is not None,
        is_list=route in _PROMPTS and _is_list(body.get(_PROMPTS[route])),
        output=output,
        body=body,
    )


def _prompts(route: str, body: Mapping[str, Any], text_of: Callable[[str], bytes | None]) -> tuple[bytes, ...]:
    """Return the text of each prompt; that of a previous response goes before the new input."""
    several = body.get(_PROMPTS[route]) if route in _PROMPTS else None
    if _is_list(several):
        assert isinstance(several, list)
        if not 0 < len(several) <= MAX_ANSWERS:
            raise BadRequest(f"{_PROMPTS[route]}: expected 1 to {MAX_ANSWERS} prompts, got {len(several)}")
        read_prompt(route, body)  # an error names the place within the list
        return tuple(read_prompt(route, {**body, _PROMPTS[route]: one}).text for one in several)
    text = read_prompt(route, body).text
    previous = body.get("previous_response_id") if route == RESPONSES else None
    if previous is None:
        return (text,)
    stored = text_of(previous) if isinstance(previous, str) else None
    if stored is None:
        raise BadRequest(f"previous_response_id: no response {str(previous)[:80]!r} is stored here")
    return (stored + text,)


def _is_list(value: object) -> bool:
    """Whether it is a list of prompts; a list of numbers is one prompt in token ids."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int | float)


def _samples(route: str, body: Mapping[str, Any]) -> int:
    value = body.get("n")
    if value is None or route not in (CHAT, COMPLETIONS):
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_ANSWERS:
        raise BadRequest(f"n: expected a whole number from 1 to {MAX_ANSWERS}")
    return value


def _read_json(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{name} is not an object")
    return value


def _limit(route: str, body: Mapping[str, Any]) -> int | None:
    """Return the output length that the body gives; Anthropic's API requires one."""
    if route == EMBEDDINGS:
        return None
    if route == GENERATE:
        body = _mapping(body, "sampling_params")
    for name in _LENGTHS.get(route, _LENGTHS_OF_OTHERS):
        value = body.get(name)
        if value is None and route != MESSAGES:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be a whole number of at least 1")
        return value
    return None
