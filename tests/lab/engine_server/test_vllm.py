"""A simulated vLLM: routes and metrics of vLLM, steps of its scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.engines.discovery import FoundEngine, owner_of, read_models, recognise
from gorgo.engines.vllm import VLLM
from tests.lab.engine_server.client import CHAT, chat, metrics, post
from tests.lab.engine_server.conftest import QUICK, Start
from tests.real.served import served

#: Forty blocks of 16 tokens.
PROFILE = replace(QUICK, scheduler="vllm", chunk_tokens=64, kv_tokens=640)


@pytest.fixture
async def engine(start: Start) -> aiohttp.ClientSession:
    return await start(profile=PROFILE)


async def values(engine: aiohttp.ClientSession) -> dict[str, float]:
    families = text_string_to_metric_families(await metrics(engine))
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_it_is_recognised_as_vllm(engine: aiohttp.ClientSession) -> None:
    async with engine.get("/v1/models") as response:
        answer = await response.json()
    assert owner_of(answer) == "vllm"
    assert [model.name for model in read_models(answer) or ()] == ["gorgo-sim"]
    async with engine.get("/version") as response:
        assert recognise("/version", await response.json()) == FoundEngine("vllm", "0.32.0")


async def test_it_has_no_routes_of_sglang(engine: aiohttp.ClientSession) -> None:
    for route in ("/server_info", "/v1/loads", "/model_info"):
        async with engine.get(route) as response:
            assert response.status == 404
    async with engine.post("/generate", json={"text": "x"}) as response:
        assert response.status == 404
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with engine.get("/health") as response:
        assert response.status == 200
    assert loop.time() - began < 0.9


async def test_the_router_reads_its_metrics(engine: aiohttp.ClientSession) -> None:
    for _ in range(2):
        await post(engine, CHAT, chat("x" * 400))
    sample = VLLM().read_metrics(await metrics(engine))
    assert (sample.running_requests, sample.queued_requests, sample.used_tokens) == (0, 0, 0)
    assert (sample.kv_capacity_tokens, sample.prompt_tokens_total) == (640, 200)
    found = await values(engine)
    assert found["vllm:prefix_cache_hits_total"] == 96
    assert found["vllm:generation_tokens_total"] == 8
    assert found["vllm:request_success_total"] == 2
    # Two chunks of the first prompt, the rest of the second, three more tokens of each.
    assert found["vllm:iteration_tokens_total_count"] == 9
    assert found["vllm:iteration_tokens_total_sum"] == 100 + 4 + 8


async def test_a_router_that_finds_the_engine_itself_learns_its_pool_and_what_it_had_cached(start: Start) -> None:
    engine = await start(profile=PROFILE)
    text = "x" * 1200
    async with served({"near": str(engine._base_url).rstrip("/")}, engine="auto", policy="gorgo-ms") as proxy:
        async with aiohttp.ClientSession(proxy.url) as client:
            for _ in range(2):
                answer = await post(client, CHAT, {**chat(text), "model": "gorgo-sim"})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 288
        (row,) = await proxy.fleet()
        assert (row["engine"]["name"], row["engine"]["found"], row["kv_capacity_tokens"]) == ("vllm", True, 640)
        assert row["reports"] == {"cached_tokens": "reported", "metrics": "reported"}
        first, second = await proxy.samples()
        assert (first["cached_tokens"], second["cached_tokens"]) == (0, 288)


async def test_preemptions_are_counted(engine: aiohttp.ClientSession) -> None:
    """Two of 20 blocks of prompt fill the pool; the seventeenth token of an answer needs one more."""
    answers = [post(engine, CHAT, {**chat(letter * 4 * 310), "max_tokens": 40}) for letter in "ab"]
    for answer in await asyncio.gather(*answers):
        assert answer["usage"]["completion_tokens"] == 40
    found = await values(engine)
    assert found["vllm:num_preemptions_total"] >= 1
    assert found["vllm:generation_tokens_total"] == 80
    assert found["vllm:kv_cache_usage_perc"] == 0


async def test_the_prefix_cache_is_reset_when_idle(engine: aiohttp.ClientSession) -> None:
    for _ in range(2):
        await post(engine, CHAT, chat("x" * 400))
        async with engine.post("/reset_prefix_cache") as response:
            assert response.status == 200
    assert (await values(engine))["vllm:prefix_cache_hits_total"] == 0


async def test_an_engine_without_a_prefix_cache_says_so(start: Start) -> None:
    engine = await start(profile=replace(PROFILE, prefix_cache=False))
    for _ in range(2):
        answer = await post(engine, CHAT, chat("x" * 400))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 'enable_prefix_caching="False"' in await metrics(engine)
