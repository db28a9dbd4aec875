"""Messages of a real vLLM, which has no flags there: cut anywhere, their rest is asked for as a chat.

One engine stands behind two relays, so that the answers are those of the same weights and each is cut by its relay.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.proxy.served import Served, served
from tests.real.cutting import COUNTED, SHORT_BETWEEN, Cut, cutting, places_of
from tests.system.environments import Environment
from tests.system.vllm_server import CACHED_TOKENS_FLAG, vllm_server, wait_until_ready

TOKENS, PLACES = 60, 12
SAID = "tell me of ban des fin " * 4
ORDER = [
    *("message_start", "content_block_start", "content_block_delta"),
    *("content_block_stop", "message_delta", "message_stop"),
]


async def ask(proxy: Served, *, tokens: int = TOKENS) -> tuple[bytes, list[dict[str, Any]]]:
    said = [{"role": "user", "content": [{"type": "text", "text": SAID}]}]
    body = {"model": "tiny", "max_tokens": tokens, "system": "Be brief.", "messages": said, "temperature": 0}
    response = await proxy.client.post("/v1/messages", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    return response.content, events_of(response.content)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    found = [json.loads(part.partition(b"data: ")[2]) for part in raw.split(b"\n\n") if b"data: {" in part]
    return [event for event in found if event["type"] != "ping"]


async def chat(url: str, begun: str, tokens: int) -> str:
    """Return what the engine itself says in a chat, behind the beginning of its answer."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SAID}]
    flags = {"continue_final_message": True, "add_generation_prompt": False} if begun else {}
    messages += [{"role": "assistant", "content": begun}] if begun else []
    body = {"model": "tiny", "messages": messages, "max_tokens": tokens, "temperature": 0, **flags}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


def counts_of(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the tokens of prompt and answer as the end has them, whatever of the prompt was cached."""
    usage = events[-2]["usage"]
    prompt = sum(usage.get(f"{name}input_tokens", 0) for name in ("", "cache_read_", "cache_creation_"))
    return prompt, usage["output_tokens"]


async def test_a_message_of_vllm_is_one_message_wherever_it_is_cut(
    tmp_path: Path, vllm: Environment, checkpoint: Path
) -> None:
    with vllm_server(vllm, checkpoint, CACHED_TOKENS_FLAG) as server:
        wait_until_ready(server)
        async with AsyncExitStack() as stack:
            cut = Cut()
            urls = [await stack.enter_async_context(cutting(server.url, cut)) for _ in range(2)]
            config = {
                "proxy": {"region": "here", "policy": "round-robin", "probe_interval_s": 30},
                "regions": [{"name": "here"}],
                "simulation": {"rtt_ms": {"here": 1}},
                "replicas": [
                    {"name": f"r{number}", "region": "here", "engine": "vllm", "url": url}
                    for number, url in enumerate(urls)
                ],
            }
            (tmp_path / "regions.yaml").write_text(json.dumps(config))
            proxy = await stack.enter_async_context(served(tmp_path))
            raw, whole = await ask(proxy)
            counts = counts_of(whole)
            assert text_of(whole) == await chat(server.url, "", TOKENS), "a message is a chat to it"
            assert (len(whole) > 8, text_of(whole) != "", counts[1]) == (True, True, TOKENS)
            equal = 0
            for place in places_of(raw, PLACES):
                cut.after = place
                answer, events = await ask(proxy)
                cut.after = None
                kinds = [event["type"] for event in events]
                assert [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind] == ORDER
                assert events[-2]["delta"] == whole[-2]["delta"]
                assert counts_of(events) == counts
                before = events_of(answer[: answer.index(b": x-gorgo-continued ")])
                said = sum(event["type"] == "content_block_delta" for event in before)
                equal += text_of(events) == text_of(before) + await chat(server.url, text_of(before), TOKENS - said)
                for _ in range(SHORT_BETWEEN):
                    await ask(proxy, tokens=4)
            metrics = (await proxy.admin.get("/metrics")).text
    continued = sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(COUNTED))
    assert continued == PLACES
    # Not the uncut text each time: that of random weights is read back as other tokens.
    assert equal >= PLACES - 1
