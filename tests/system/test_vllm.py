"""Two real vLLM on the CPU behind `gorgo serve`, spoken to by the clients that people use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from gorgo.lab.traces.text import prompt_text
from tests.real.served import eventually, served
from tests.system.environments import Environment
from tests.system.router_process import RouterProcess, router_process
from tests.system.vllm_server import MAX_MODEL_TOKENS, VllmServer, vllm_server, wait_until_ready

Servers = tuple[VllmServer, VllmServer]


@pytest.fixture
def router(vllm_servers: Servers, tmp_path: Path) -> Iterator[RouterProcess]:
    replicas = {"left": vllm_servers[0].url, "right": vllm_servers[1].url}
    with router_process(tmp_path, replicas, engine="vllm") as router:
        yield router


def text_of(name: str, tokens: int) -> str:
    """A prompt that no other test sends."""
    return prompt_text([], tokens, rest=name).decode().rstrip()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8, **more}


def test_the_openai_client_streams_a_chat(router: RouterProcess) -> None:
    with OpenAI(base_url=f"{router.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text_of("stream", 300)}],
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) == 24
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens > 300) == (24, True)
    assert router.in_flight() == 0


def test_the_anthropic_client_streams_messages(router: RouterProcess) -> None:
    anthropic = pytest.importorskip("anthropic", reason="ANTHROPIC CLIENT TEST SKIPPED: the package is not installed")
    with anthropic.Anthropic(base_url=router.url, api_key="none") as client:
        said = {"role": "user", "content": text_of("messages", 300)}
        with client.messages.stream(model="tiny", max_tokens=16, messages=[said]) as stream:
            words = list(stream.text_stream)
            message = stream.get_final_message()
    assert len(words) == message.usage.output_tokens == 16
    assert router.in_flight() == 0


def test_cached_tokens_grow_over_turns_that_stay_on_one_replica(router: RouterProcess) -> None:
    messages = [{"role": "user", "content": text_of("turns", 400)}]
    cached, prompts, replicas = [], [], set()
    for turn in range(4):
        answer = httpx.post(f"{router.url}/v1/chat/completions", json=chat("") | {"messages": messages}, timeout=60)
        usage = answer.json()["usage"]
        prompts.append(usage["prompt_tokens"])
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        replicas.add(answer.headers["x-gorgo-replica"])
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": text_of(f"turn {turn}", 100)})
    assert len(replicas) == 1
    assert cached[0] == 0
    # Whole blocks of 32 tokens are kept.
    assert all(found > before - 32 for found, before in zip(cached[1:], prompts, strict=False))
    sample = router.samples()[-1]
    assert sample["cached_tokens"] == cached[-1]
    assert sample["estimated_cached_tokens"] == pytest.approx(cached[-1], abs=128)


async def test_a_client_that_leaves_frees_the_engine_and_the_ledger(
    router: RouterProcess, vllm_servers: Servers
) -> None:
    def running() -> float:
        return sum(server.running() for server in vllm_servers)

    async with httpx.AsyncClient(timeout=60) as http:
        body = chat(text_of("leave", 100), max_tokens=8_000, stream=True)
        async with http.stream("POST", f"{router.url}/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            while '"content":" ' not in await anext(lines):
                pass
            await eventually(lambda: running() == 1)
            assert router.in_flight() == 1
    await eventually(lambda: running() == 0)
    assert router.in_flight() == 0


def test_an_over_long_prompt_gets_the_engines_own_400(router: RouterProcess, vllm_servers: Servers) -> None:
    body = chat(text_of("long", MAX_MODEL_TOKENS + 1))
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=60)
    direct = httpx.post(f"{vllm_servers[0].url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == direct.status_code == 400
    assert answer.content == direct.content
    assert {row["state"] for row in router.admin("/admin/fleet")["replicas"]} == {"healthy"}
    assert router.in_flight() == 0


async def test_load_and_size_of_the_engine_are_read(vllm_servers: Servers) -> None:
    async with served({"left": vllm_servers[0].url}, engine="vllm") as proxy:
        (row,) = await proxy.fleet()
    assert (row["kv_capacity_tokens"], row["running_requests"], row["reports"]["metrics"]) == (32_000, 0, "reported")


async def test_an_engine_without_its_flag_is_told_apart_once_with_it(
    vllm: Environment, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with vllm_server(vllm, checkpoint) as silent:
        wait_until_ready(silent)
        async with served({"silent": silent.url}, engine="vllm") as proxy, httpx.AsyncClient(timeout=60) as http:
            for _ in range(10):
                answer = await http.post(f"{proxy.url}/v1/chat/completions", json=chat(text_of("silent", 300)))
                assert answer.status_code == 200
            (row,) = await proxy.fleet()
    assert row["reports"] == {"cached_tokens": "missing", "metrics": "reported"}
    (told,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "report_missing"]
    assert told["advice"].endswith("start the engine with --enable-prompt-tokens-details")
