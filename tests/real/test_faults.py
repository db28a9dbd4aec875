"""A llama.cpp server that is killed in the middle of its streams, and one that a deadline takes a request from."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from gorgo.config.model import LimitsConfig
from tests.real.faults import EMPTY_LEDGER, Death, chat, survive
from tests.real.llama_server import llama_server, missing_reason
from tests.real.served import eventually, served
from tests.real.tiny_model import make_tiny_model

SLOTS = 2
WORDS = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = missing_reason()
    if reason:
        pytest.skip(reason)
    return make_tiny_model(tmp_path_factory.mktemp("faults") / "tiny.gguf")


async def test_killed_engine_costs_no_stream_since_what_it_had_begun_goes_on_at_the_other_one(model: Path) -> None:
    with ExitStack() as stack:
        victim, other = (stack.enter_context(llama_server(model, slots=SLOTS, context=2048)) for _ in range(2))

        async def restart() -> None:
            stack.enter_context(llama_server(model, slots=SLOTS, context=2048, port=victim.port))

        death = Death(SLOTS, WORDS, kill=lambda: os.kill(victim.pid, signal.SIGKILL), restart=restart)
        urls = {"victim": victim.url, "other": other.url}
        async with served(urls, policy="round-robin", probe_interval_s=0.2) as proxy:
            await survive(proxy, death)


async def test_deadline_frees_the_place_of_its_request_in_the_engine(model: Path) -> None:
    with llama_server(model, slots=1, context=8192) as engine:
        limits = LimitsConfig(request_timeout_s=0.5, shutdown_grace_s=2.0)
        async with served({"only": engine.url}, limits=limits) as proxy, httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{proxy.url}/v1/chat/completions", json=chat(1, max_tokens=8000))
            assert b'"code": "total_timeout"' in answer.content
            await eventually(lambda: engine.processing() == 0)
            assert answer.content.count(b"data: ") < 7900
            assert await proxy.ledger() == EMPTY_LEDGER
