"""LiteLLM's client reads one answer from `gorgo serve`, wherever the replica that began it breaks off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import llama_servers  # noqa: F401  The fixture is of another folder.
from tests.real.cutting import COUNTED, SHORT_BETWEEN, TOKENS, Bench, cut_engines, places_of
from tests.real.llama_server import LlamaServer
from tests.system.environments import Environment, InstallError, litellm_environment

PLACES = 20
SAID = "tell me of ban des fin"
#: Reads a question a line from its standard input, and prints what the client made of each answer.
_CLIENT = """
import json, sys
import litellm

litellm.telemetry = False
for line in sys.stdin:
    asked = json.loads(line)
    stream = litellm.completion(
        model="openai/tiny", api_base=sys.argv[1], api_key="none", temperature=0, stream=True, num_retries=0,
        messages=[{"role": "user", "content": asked["said"]}], max_tokens=asked["tokens"],
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )
    text, ids, reasons, usages = "", set(), [], []
    for chunk in stream:
        ids.add(chunk.id)
        if usage := getattr(chunk, "usage", None):
            usages.append([usage.prompt_tokens, usage.completion_tokens])
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    print(json.dumps({"text": text, "ids": len(ids), "reasons": reasons, "usages": usages}), flush=True)
"""


@dataclass
class Client:
    """The library, in a process of its own environment."""

    process: asyncio.subprocess.Process
    bench: Bench

    async def ask(self, *, tokens: int = TOKENS, after: int | None = None) -> Any:
        self.bench.cut.after = after
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"said": SAID, "tokens": tokens}).encode() + b"\n")
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        self.bench.cut.after = None
        return json.loads(line)


@pytest.fixture(scope="session")
def litellm() -> Environment:
    try:
        return litellm_environment()
    except InstallError as error:
        pytest.skip(f"LITELLM TESTS SKIPPED: {error}")


@pytest.fixture
async def client(
    tmp_path: Path,
    llama_servers: tuple[LlamaServer, LlamaServer],  # noqa: F811  It is the fixture.
    litellm: Environment,
) -> AsyncIterator[Client]:
    async with cut_engines(tmp_path, "llamacpp", [each.url for each in llama_servers]) as bench:
        process = await asyncio.create_subprocess_exec(
            *(str(litellm.python), "-c", _CLIENT, f"{bench.proxy.client.base_url}/v1".replace("//v1", "/v1")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
        )
        try:
            yield Client(process, bench)
        finally:
            process.kill()
            await process.communicate()


async def test_litellms_client_reads_one_answer_wherever_it_is_cut(client: Client) -> None:
    """Text, ids, ends and counts are those of the uncut answer, and each was continued once."""
    whole = await client.ask()
    assert (len(whole["text"]) / 4, whole["ids"], whole["reasons"]) == (TOKENS, 1, ["length"])
    raw = (await client.bench.ask("/v1/chat/completions")).raw
    for place in places_of(raw, PLACES):
        assert await client.ask(after=place) == whole
        for _ in range(SHORT_BETWEEN):
            await client.ask(tokens=4)
    metrics = (await client.bench.proxy.admin.get("/metrics")).text
    counted = [line for line in metrics.splitlines() if line.startswith(COUNTED)]
    assert sum(float(line.split()[-1]) for line in counted) == PLACES
