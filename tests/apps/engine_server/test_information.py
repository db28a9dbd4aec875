from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.apps.engine_server.client import CHAT, chat, load, metrics, post, until_idle
from tests.apps.engine_server.conftest import Start


async def test_health_takes_a_second_and_the_cheap_probes_do_not(engine: aiohttp.ClientSession) -> None:
    loop = asyncio.get_running_loop()
    for route, least, most in (("/ping", 0.0, 0.9), ("/ready", 0.0, 0.9), ("/health", 1.0, 10.0)):
        began = loop.time()
        async with engine.get(route) as response:
            assert response.status == 200
        assert least <= loop.time() - began < most


async def test_a_probe_is_as_far_away_as_a_request(start: Start) -> None:
    session = await start(rtt_ms=30.0)
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(2):
        began = loop.time()
        async with session.get("/ping") as response:
            await response.read()
        times.append(loop.time() - began)
    assert times[0] > 0.059
    assert times[1] > 0.029


async def test_the_model_and_the_server_describe_themselves(engine: aiohttp.ClientSession) -> None:
    async with engine.get("/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "gorgo-sim"
    for route in ("/model_info", "/get_model_info"):
        async with engine.get(route) as response:
            assert (await response.json())["is_generation"] is True
    async with engine.get("/server_info") as response:
        info = await response.json()
    assert info["max_total_num_tokens"] == 50_000
    assert info["max_running_requests"] == 64
    assert info["page_size"] == 1


async def test_loads_and_metrics_tell_the_same_story(engine: aiohttp.ClientSession) -> None:
    await post(engine, CHAT, chat("x" * 400))
    await post(engine, CHAT, chat("x" * 400))
    entry = await load(engine)
    assert entry["total_prefill_uncached_tokens"] == 101
    assert entry["total_prefill_busy_us"] > 0
    assert entry["max_total_num_tokens"] == 50_000
    families = {family.name: family for family in text_string_to_metric_families(await metrics(engine))}
    values = {name: family.samples[0].value for name, family in families.items()}
    assert values["sglang:prompt_tokens"] == 200
    assert values["sglang:cached_tokens"] == 99
    assert values["sglang:generation_tokens"] == 8
    assert values["sglang:num_requests"] == 2
    assert values["sglang:num_running_reqs"] == values["sglang:num_queue_reqs"] == 0
    assert values["sglang:cache_hit_rate"] == entry["cache_hit_rate"] == pytest.approx(0.495)
    ttft = {sample.name: sample.value for sample in families["sglang:time_to_first_token_seconds"].samples}
    assert ttft["sglang:time_to_first_token_seconds_count"] == 2
    assert ttft["sglang:time_to_first_token_seconds_bucket"] == 2, "the last bucket holds all"


async def test_flush_forgets_when_idle_and_is_refused_when_busy(engine: aiohttp.ClientSession) -> None:
    await post(engine, CHAT, chat("x" * 400))
    async with engine.post(CHAT, json=chat("busy", max_tokens=20_000, stream=True)) as streaming:
        await streaming.content.readline()
        async with engine.post("/flush_cache") as response:
            assert response.status == 400
    await until_idle(engine)
    async with engine.get("/flush_cache") as response:
        assert response.status == 200
    again = await post(engine, CHAT, chat("x" * 400))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_an_id_in_use_is_refused_and_free_again_after(engine: aiohttp.ClientSession) -> None:
    async with engine.post(CHAT, json=chat("one", max_tokens=20_000, rid="same", stream=True)) as first:
        await first.content.readline()
        async with engine.post(CHAT, json=chat("two", rid="same")) as second:
            assert second.status == 400
            assert "duplicate request id 'same'" in (await second.json())["message"]
    await until_idle(engine)
    assert (await post(engine, CHAT, chat("three", rid="same")))["id"] == "same"
