"""Request bodies of the engine, read leniently as SGLang does: unknown fields are ignored.

Owns the request side of the wire: the generating routes, and the fields of prompt, length and options of each.
Raises `BadRequest` with a message that is safe to send back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gorgo.core.prompt.parse import read_prompt
from gorgo.errors import BadRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
EMBEDDINGS = "/v1/embeddings"

#: Output length when the body names none. (A real engine would go on to its own end of text.)
_DEFAULT_TOKENS = {CHAT: 128, COMPLETIONS: 16, GENERATE: 128, EMBEDDINGS: 1}


@dataclass(frozen=True, slots=True)
class Job:
    """One generation: the text of the prompt, and its options."""

    route: str
    text: bytes
    output_tokens: int
    stream: bool
    include_usage: bool
    rid: str | None


def read_job(route: str, raw: bytes) -> Job:
    """Read the body of a generating route."""
    body = _read_json(raw)
    prompt = read_prompt(route, body)
    options = _mapping(body, "stream_options")
    rid = body.get("rid")
    return Job(
        route=route,
        text=prompt.text,
        output_tokens=_output_tokens(route, body),
        stream=route != EMBEDDINGS and body.get("stream") is True,
        include_usage=options.get("include_usage") is True,
        rid=rid if isinstance(rid, str) and rid else None,
    )


def _read_json(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
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


def _output_tokens(route: str, body: Mapping[str, Any]) -> int:
    if route == EMBEDDINGS:
        return 1
    if route == GENERATE:
        body = _mapping(body, "sampling_params")
    for name in ("max_completion_tokens", "max_tokens", "max_new_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be a whole number of at least 1")
        return value
    return _DEFAULT_TOKENS[route]
