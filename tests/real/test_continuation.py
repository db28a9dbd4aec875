"""Greedy answers of two llama.cpp servers behind `gorgo serve`, cut at a hundred places: each is the uncut one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gorgo.engines.base import TOKENIZE_PATH, read_tokens, tokenize_body
from tests.real.cutting import (
    COUNTED,
    SHORT_BETWEEN,
    TOKENS,
    Bench,
    assert_cut_answers_are_whole,
    cut_engines,
    places_of,
)
from tests.real.llama_server import LlamaServer

#: Cuts of the answers of each route.
#: How many; `make test-system` cuts at a hundred.
PLACES = [
    ("/v1/chat/completions", 16),
    ("/v1/completions", 8),
    pytest.param("/v1/chat/completions", 100, marks=pytest.mark.system),
]
MESSAGE_PLACES = 12
#: Of Anthropic's messages; its client adds events of its own making.
RAW_EVENTS = frozenset(
    {
        *("message_start", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    }
)


@pytest.fixture
async def bench(tmp_path: Path, llama_servers: tuple[LlamaServer, LlamaServer]) -> AsyncIterator[Bench]:
    async with cut_engines(tmp_path, "llamacpp", [each.url for each in llama_servers]) as bench:
        yield bench


@pytest.mark.parametrize(("route", "count"), PLACES)
async def test_a_greedy_answer_that_is_cut_anywhere_is_the_uncut_one(bench: Bench, route: str, count: int) -> None:
    await assert_cut_answers_are_whole(bench, route, count=count)


@dataclass
class Message:
    """What the client of Anthropic's makes of a stream, and the events that came."""

    events: list[str]
    text: str
    reason: str | None
    usage: tuple[int, int]


async def test_the_anthropic_client_reads_one_message_wherever_it_is_cut(bench: Bench) -> None:
    """Every event comes once and in order, and the end and the counts are those of the uncut message."""
    anthropic = pytest.importorskip("anthropic", reason="ANTHROPIC CLIENT TEST SKIPPED: the package is not installed")
    url = str(bench.proxy.client.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:

        async def ask(*, tokens: int = TOKENS, after: int | None = None) -> Message:
            bench.cut.after = after
            said = {"role": "user", "content": "tell me of ban des fin"}
            extra = {"temperature": 0, "ignore_eos": True}
            async with client.messages.stream(
                model="tiny", max_tokens=tokens, messages=[said], extra_body=extra
            ) as stream:
                kinds = [event.type async for event in stream if event.type in RAW_EVENTS]
                made = await stream.get_final_message()
            bench.cut.after = None
            (block,) = made.content
            usage = made.usage
            prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
            return Message(kinds, block.text, made.stop_reason, (prompt, usage.output_tokens))

        whole = await ask()
        assert (len(whole.text) / 4, whole.reason, whole.usage[1]) == (TOKENS, "max_tokens", TOKENS)
        raw = await bench.raw_message(said="tell me of ban des fin")
        for place in places_of(raw, MESSAGE_PLACES):
            assert await ask(after=place) == whole
            for _ in range(SHORT_BETWEEN):
                await ask(tokens=4)
    metrics = (await bench.proxy.admin.get("/metrics")).text
    continued = sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(COUNTED))
    assert continued == MESSAGE_PLACES


async def test_llama_cpp_counts_the_tokens_of_a_text(llama_servers: tuple[LlamaServer, LlamaServer]) -> None:
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.post(f"{llama_servers[0].url}{TOKENIZE_PATH}", content=tokenize_body("tiny", " ban des"))
    found = read_tokens(answer.status_code, answer.content)
    assert found is not None
    assert len(found) == 2
