"""What a proxy counts with a model's files is what vLLM reports for the same bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.model import ModelConfig
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.prompt_tokens import PromptTokens
from gorgo.live.tokens.model_tokens import read_models
from tests.live.tokens.files import conversation, needs_tokenizers
from tests.system.vllm_server import VllmServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The router sends each request to a replica. Grüße, naïve 東京\n\n\tand  blanks. "
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": conversation(TEXT)}),
    (CHAT, {"messages": conversation(TEXT, "", "Why? ", system="Be brief.\n")}),
    (CHAT, {"messages": conversation(*[TEXT * 5] * 9, system=TEXT)}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
    (CHAT, {"messages": conversation("What does <|im_start|> or <|endoftext|> mean?"), "n": 2, "temperature": 0.5}),
    (COMPLETIONS, {"prompt": TEXT}),
    (COMPLETIONS, {"prompt": "\n"}),
    (COMPLETIONS, {"prompt": [5, 6, 7, 8, 9]}),
]


@needs_tokenizers
@pytest.mark.parametrize(("route", "body"), BODIES)
async def test_counted_tokens_are_those_that_vllm_reports(
    vllm_servers: tuple[VllmServer, VllmServer], checkpoint: Path, route: str, body: dict[str, Any]
) -> None:
    whole = {"model": "tiny", "max_tokens": 1, **body}
    models = read_models([ModelConfig(name="tiny", tokenizer=str(checkpoint / "tokenizer.json"))])
    prompts = PromptTokens(models, lambda _: (16,), lambda _: None)
    fields = read_fields(route, json.dumps(whole).encode(), Fingerprinter(key=1))
    exact = await prompts.exact_prompt(route, fields, model="tiny", base="tiny")
    answer = httpx.post(vllm_servers[0].url + route, json=whole, timeout=120)
    assert answer.status_code == 200, answer.text
    assert exact is not None
    assert exact.tokens == answer.json()["usage"]["prompt_tokens"]
