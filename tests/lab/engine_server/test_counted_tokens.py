"""What a proxy counts for `tokenizer: simulated` is what a simulated engine reports, on every route."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.prompt_tokens import PromptTokens
from gorgo.live.tokens.model_tokens import ModelTokens

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "ü", "parameters": {"type": "object"}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "Kürze"}, {"role": "user", "content": "Hello"}]},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}, IMAGE]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}),
    ("/v1/completions", {"prompt": "The replica is here"}),
    ("/v1/completions", {"prompt": [5, 6, 7, 8, 9]}),
    ("/generate", {"text": "The replica is here", "sampling_params": {"max_new_tokens": 4}}),
    ("/generate", {"input_ids": [5, 6, 7]}),
    ("/v1/embeddings", {"input": "The replica"}),
    ("/v1/messages", {"system": "Kürze", "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/responses", {"instructions": "Kürze", "input": "Hello there", "store": False}),
]


@pytest.mark.parametrize(("route", "body"), BODIES)
async def test_counted_tokens_are_the_reported_ones(
    engine: aiohttp.ClientSession, route: str, body: dict[str, Any]
) -> None:
    whole = {"model": "test", "max_tokens": 4, **body}
    fields = read_fields(route, json.dumps(whole).encode(), Fingerprinter(key=1))
    prompts = PromptTokens({"test": ModelTokens("test")}, lambda _: (16,), lambda _: None)
    exact = await prompts.exact_prompt(route, fields, model="test", base="test")
    assert exact is not None
    async with engine.post(route, json=whole) as response:
        answer = await response.json()
        assert response.status == 200, answer
    assert exact.tokens == _reported(answer)


def _reported(answer: dict[str, Any]) -> int:
    usage = answer.get("usage") or answer["meta_info"]
    found: object = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert isinstance(found, int), usage
    cached: int = usage.get("cache_read_input_tokens") or 0

    return found + cached
