"""Streams before three engines, of which one is killed: real processes, and answers to the last character."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.proxy.served import environ, served

STREAMS = 12
TOKENS = 120


@dataclass
class Read:
    """One answer, as its client read it."""

    text: str = ""
    ids: set[str] = field(default_factory=set)
    finished: int = 0
    done: int = 0
    seams: int = 0
    errors: int = 0
    usage: list[dict[str, Any]] = field(default_factory=list)


def regions(ports: list[int], kind: str) -> str:
    replicas = [
        {"name": f"r{number}", "region": "here", "engine": kind, "url": f"http://127.0.0.1:{port}"}
        for number, port in enumerate(ports)
    ]
    return json.dumps(
        {
            "proxy": {"region": "here", "policy": "round-robin", "probe_interval_s": 1},
            "regions": [{"name": "here"}],
            "simulation": {"rtt_ms": {"here": 1}},
            "replicas": replicas,
        }
    )


@asynccontextmanager
async def engine(config: Path, name: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    words = ("engine", "--config", str(config), "--replica", name, "--host", "127.0.0.1", "--port", "0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environ(),
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        url = next(word for word in line.decode().split() if word.startswith("http://"))
        yield process, int(url.rstrip("/,").rpartition(":")[2])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> Read:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"question {number} " * 20}],
        "max_tokens": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    found = Read()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            found.seams += line.startswith(": x-gorgo-continued ")
            if line == "data: [DONE]":
                found.done += 1
            elif line.startswith("data: "):
                _add(found, json.loads(line[6:]))
                if len(found.text) in range(40, 44):
                    begun.release()
    return found


def _add(found: Read, event: dict[str, Any]) -> None:
    found.errors += "error" in event
    if "choices" not in event:
        return
    found.ids.add(event["id"])
    if event.get("usage"):
        found.usage.append(event["usage"])
    for choice in event["choices"]:
        found.text += choice["delta"].get("content") or ""
        found.finished += choice["finish_reason"] is not None


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
async def test_a_killed_engine_costs_no_character(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(regions([1, 2, 3], kind))
    async with engine(config, "r0") as (_, a), engine(config, "r1") as (victim, b), engine(config, "r2") as (_, c):
        config.write_text(regions([a, b, c], kind))
        async with served(tmp_path) as proxy:
            begun = asyncio.Semaphore(0)
            whole = await asyncio.gather(*(ask(proxy.client, number, begun) for number in range(STREAMS)))
            begun = asyncio.Semaphore(0)
            asking = asyncio.gather(*(ask(proxy.client, number, begun) for number in range(STREAMS)))
            for _ in range(STREAMS):
                await asyncio.wait_for(begun.acquire(), 30)
            victim.kill()
            found = await asking
    assert [each.text for each in found] == [each.text for each in whole]
    assert sum(each.seams for each in found) >= STREAMS // 3 - 1
    for before, after in zip(whole, found, strict=True):
        assert (len(after.ids), after.finished, after.done, after.errors, len(after.usage)) == (1, 1, 1, 0, 1)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert after.usage[0][name] == before.usage[0][name]


async def test_the_openai_client_reads_one_answer_over_a_seam(tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(regions([1, 2], "vllm"))
    async with engine(config, "r0") as (victim, a), engine(config, "r1") as (_, b):
        config.write_text(regions([a, b], "vllm"))
        async with served(tmp_path) as proxy:
            client = AsyncOpenAI(base_url=f"{proxy.client.base_url}/v1", api_key="none", max_retries=0)

            async def read(*, kill: bool) -> tuple[str, set[str], str | None]:
                text, ids, finish = "", set(), None
                messages: list[Any] = [{"role": "user", "content": "a question " * 20}]
                stream = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=TOKENS, stream=True
                )
                async for chunk in stream:
                    ids.add(chunk.id)
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        finish = choice.finish_reason or finish
                    if kill and len(text) == 40:
                        victim.kill()
                return text, ids, finish

            # Round robin: the first and the third are the victim's.
            whole, _, _ = await read(kill=False)
            await read(kill=False)
            text, ids, finish = await read(kill=True)
            await client.close()
    assert (text, len(ids), finish) == (whole, 1, "length")


@pytest.mark.parametrize("kind", ["llamacpp", "vllm"])
async def test_the_anthropic_client_reads_one_message_over_a_seam(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(regions([1, 2], kind))
    async with engine(config, "r0") as (victim, a), engine(config, "r1") as (_, b):
        config.write_text(regions([a, b], kind))
        async with served(tmp_path) as proxy:
            client = AsyncAnthropic(base_url=str(proxy.client.base_url), api_key="none", max_retries=0)

            async def read(*, kill: bool) -> tuple[list[str], str, str | None, int]:
                kinds: list[str] = []
                text = ""
                said: Any = [{"role": "user", "content": "a question " * 20}]
                async with client.messages.stream(model="m", max_tokens=TOKENS, messages=said) as stream:
                    async for event in stream:
                        kinds.append(event.type)
                        text += event.text if event.type == "text" else ""
                        if kill and event.type == "text" and len(text) == 40:
                            victim.kill()
                    made = await stream.get_final_message()
                assert "".join(getattr(block, "text", "") for block in made.content) == text
                return kinds, text, made.stop_reason, made.usage.output_tokens

            # Round robin: the first and the third are the victim's.
            whole = await read(kill=False)
            await read(kill=False)
            over_a_seam = await read(kill=True)
            metrics = (await proxy.admin.get("/metrics")).text
            await client.close()
    assert whole[2:] == ("max_tokens", TOKENS)
    assert over_a_seam == whole
    counts = [line.split()[-1] for line in metrics.splitlines() if line.startswith("gorgo_streams_continued_total{")]
    assert sum(map(float, counts)) == 1
