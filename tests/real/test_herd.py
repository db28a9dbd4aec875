"""Sessions with one system prompt spread over two llama.cpp servers of small pools, and find what was estimated there.

One request at a time uses one slot of a server, and a cache of 14,336 tokens for sequences that have left it. The seven
sessions end with 3,300 tokens each: five of them fit into one server, and all do not.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest

from gorgo.config.model import OverloadConfig
from gorgo.lab.prompt_text import prompt_text
from tests.real.llama_server import llama_server, missing_reason
from tests.real.served import served
from tests.real.tiny_model import make_tiny_model

pytestmark = pytest.mark.system

SLOTS, CONTEXT, CACHE_MIB = 4, 16_384, 14
SESSIONS, TURNS = 7, 4
#: The system prompt is less than half of a first turn: llama.cpp drops what a slot has for a prompt that is more alike.
SYSTEM_TOKENS, QUESTION_TOKENS = 400, 700
NO_HEDGES = OverloadConfig(hedge_budget_ratio=0.0)
#: The index counts whole blocks of estimated tokens, and templates add a few.
ALIKE_TOKENS = 96


def message(role: str, words: str, tokens: int) -> dict[str, str]:
    return {"role": role, "content": prompt_text([], tokens, rest=words).decode().rstrip()}


async def test_sessions_spread_over_small_pools_and_cached_tokens_are_as_estimated(tmp_path: Path) -> None:
    if reason := missing_reason():
        pytest.skip(reason)
    model = make_tiny_model(tmp_path / "tiny.gguf")
    system = message("system", "the system prompt of all", SYSTEM_TOKENS)
    sessions = [[system] for _ in range(SESSIONS)]
    start = partial(llama_server, model, slots=SLOTS, context=CONTEXT, cache_mib=CACHE_MIB)
    with start() as left, start() as right:
        async with (
            # On a machine that stands still a second attempt would leave a second copy.
            served({"left": left.url, "right": right.url}, policy="gorgo-ms", overload=NO_HEDGES) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=60) as http,
        ):
            for turn in range(TURNS):
                for number, messages in enumerate(sessions):
                    messages.append(message("user", f"session {number}, turn {turn}", QUESTION_TOKENS))
                    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
                    answer = await http.post(
                        "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}
                    )
                    assert answer.status_code == 200
                    messages.append({"role": "assistant", "content": "so it is"})
            rows = await proxy.samples()
    requests = Counter(row["replica"] for row in rows)
    assert min(requests["left"], requests["right"]) >= SESSIONS * TURNS / 7, requests
    later = [(row["estimated_cached_tokens"], row["cached_tokens"]) for row in rows[SESSIONS:]]
    alike = [pair for pair in later if abs(pair[0] - pair[1]) <= ALIKE_TOKENS]
    assert len(alike) >= 0.75 * len(later), later
    estimated, reported = map(sum, zip(*later, strict=True))
    assert estimated == pytest.approx(reported, rel=0.15)
    # Not the system prompt alone: a session finds its own turns, so it stayed where they are.
    assert reported >= 0.6 * sum(row["input_tokens"] for row in rows[SESSIONS:])
