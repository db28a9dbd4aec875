from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.lab.engine_server.client import CHAT, chat, load, metrics, post, stream, until_idle
from tests.lab.engine_server.conftest import QUICK, Start


async def test_a_chat_stream_is_role_then_a_chunk_per_token_then_finish_and_usage(
    engine: aiohttp.ClientSession,
) -> None:
    events = await stream(engine, CHAT, chat("x" * 40, stream_options={"include_usage": True}))
    role, *tokens, finish, usage = events
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(token["choices"][0]["delta"]["content"]) for token in tokens] == [4] * 4
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 10
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


async def test_usage_is_in_a_stream_only_if_asked_for(engine: aiohttp.ClientSession) -> None:
    assert all(event["usage"] is None for event in await stream(engine, CHAT, chat("hello")))


async def test_the_same_prompt_has_the_same_answer_streamed_or_not(engine: aiohttp.ClientSession) -> None:
    whole = await post(engine, CHAT, chat("the same", max_tokens=9))
    events = await stream(engine, CHAT, chat("the same", max_tokens=9))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert whole["choices"][0]["message"]["content"] == text
    assert len(text) == 36
    assert whole["choices"][0]["finish_reason"] == "length"


async def test_a_second_request_finds_the_first_ones_prompt_cached(engine: aiohttp.ClientSession) -> None:
    await post(engine, CHAT, chat("y" * 400))
    again = await post(engine, CHAT, chat("y" * 400 + "z" * 40))
    assert again["usage"]["prompt_tokens"] == 110
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 100


async def test_a_next_turn_finds_the_answer_cached_as_well(engine: aiohttp.ClientSession) -> None:
    first = await post(engine, CHAT, chat("y" * 400, max_tokens=8))
    answer = first["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": "y" * 400}, {"role": "assistant", "content": answer}]
    turn = {"messages": [*messages, {"role": "user", "content": "and then?"}], "max_tokens": 1}
    again = await post(engine, CHAT, turn)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 107


async def test_content_in_parts_counts_as_its_text(engine: aiohttp.ClientSession) -> None:
    parts = [{"type": "text", "text": "a" * 8}, {"type": "text", "text": "b" * 5}]
    answer = await post(engine, CHAT, {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 2})
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("route", "body", "tokens"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "unheard_of": {"of": 1}}, 128),
        ("/v1/completions", {"prompt": "hi"}, 16),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": None}, 16),
    ],
)
async def test_without_a_length_the_default_is_generated_and_unknown_fields_are_ignored(
    engine: aiohttp.ClientSession, route: str, body: dict[str, Any], tokens: int
) -> None:
    assert (await post(engine, route, body))["usage"]["completion_tokens"] == tokens


async def test_a_completion_streams_texts(engine: aiohttp.ClientSession) -> None:
    options = {"stream_options": {"include_usage": True}}
    *tokens, finish, usage = await stream(engine, "/v1/completions", {"prompt": "hi", "max_tokens": 3, **options})
    whole = await post(engine, "/v1/completions", {"prompt": "hi", "max_tokens": 3})
    assert "".join(token["choices"][0]["text"] for token in tokens) == whole["choices"][0]["text"]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 3


async def test_generate_repeats_the_text_so_far_and_tells_of_the_cache(engine: aiohttp.ClientSession) -> None:
    body = {"text": "w" * 80, "sampling_params": {"max_new_tokens": 3}}
    events = await stream(engine, "/generate", body)
    texts = [event["text"] for event in events]
    assert [len(text) for text in texts] == [4, 8, 12]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [event["meta_info"]["finish_reason"] for event in events] == [None, None, {"type": "length", "length": 3}]
    whole = await post(engine, "/generate", body)
    assert whole["text"] == texts[-1]
    assert whole["meta_info"]["prompt_tokens"] == 20
    assert whole["meta_info"]["completion_tokens"] == 3
    assert whole["meta_info"]["cached_tokens"] == 19
    assert len(whole["output_ids"]) == 3


async def test_embeddings_depend_on_the_text_alone(engine: aiohttp.ClientSession) -> None:
    one, same, other = [await post(engine, "/v1/embeddings", {"input": text}) for text in ("a", "a", "b")]
    assert one["data"] == same["data"] != other["data"]
    assert one["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize(
    ("route", "raw"),
    [
        (CHAT, b"{"),
        (CHAT, b"[]"),
        (CHAT, b'{"messages": "hi"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 0}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": "many"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "stream_options": 3}'),
        ("/v1/completions", b"{}"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_with_a_reason(
    engine: aiohttp.ClientSession, route: str, raw: bytes
) -> None:
    async with engine.post(route, data=raw) as response:
        assert response.status == 400
        error = await response.json()
    assert error["object"] == "error"
    assert error["message"]
    assert error["code"] == 400


async def test_an_over_long_request_is_refused_in_the_shape_of_its_route(engine: aiohttp.ClientSession) -> None:
    long = "x" * 4 * 32_768
    async with engine.post(CHAT, json=chat(long, stream=True)) as response:
        assert response.status == 400
        error = await response.json()
    assert "The input (32768 tokens) is longer than the model's context length (32768 tokens)." in error["message"]
    assert error["type"] == "BadRequestError"
    async with engine.post("/generate", json={"text": long}) as response:
        assert response.status == 400
        assert "longer than" in (await response.json())["error"]["message"]


async def test_a_client_that_goes_away_takes_its_request_with_it(engine: aiohttp.ClientSession) -> None:
    async with engine.post(CHAT, json=chat("bye" * 100, max_tokens=20_000, stream=True)) as response:
        await response.content.readline()
        assert (await load(engine))["num_running_reqs"] == 1
    after = await until_idle(engine)
    assert after["num_used_tokens"] == 0


async def test_a_client_that_goes_away_while_its_request_travels_is_never_admitted(start: Start) -> None:
    session = await start(rtt_ms=50.0)
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.02):
            await session.post(CHAT, json=chat("bye"))
    await post(session, CHAT, chat("hello"))
    assert (await load(session))["total_prefill_uncached_tokens"] == 2


@pytest.mark.parametrize("rtt_ms", [0.0, 10.0])
async def test_many_streams_at_once_each_get_their_own_tokens_in_order(start: Start, rtt_ms: float) -> None:
    engine = await start(rtt_ms=rtt_ms, jitter=0.5)
    requests = [chat(f"stream {number}", max_tokens=20 + number % 7) for number in range(90)]
    streams = await asyncio.gather(*(stream(engine, CHAT, request) for request in requests))
    wholes = await asyncio.gather(*(post(engine, CHAT, request) for request in requests))
    for events, whole in zip(streams, wholes, strict=True):
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert text == whole["choices"][0]["message"]["content"]


async def test_an_http_1_0_client_gets_the_same_events_without_chunks(engine: aiohttp.ClientSession) -> None:
    async with engine.get("/ping") as response:
        base = response.url
    body = json.dumps(chat("hello", stream=True)).encode()
    reader, writer = await asyncio.open_connection(base.host, base.port)
    writer.write(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    raw = await reader.read()
    writer.close()
    head, _, events = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


async def test_distance_is_paid_on_the_way_in_and_back_and_for_a_new_connection(start: Start) -> None:
    session = await start(rtt_ms=40.0)
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(2):
        began = loop.time()
        await post(session, CHAT, chat("hello", max_tokens=1))
        times.append(loop.time() - began)
    new, warm = times
    assert warm > 0.039
    assert new > 0.079


async def test_a_large_body_pays_a_round_trip_per_flight(start: Start) -> None:
    """100 kB take three on a new connection, and one when the connection has carried as much twice."""
    session = await start(rtt_ms=40.0)
    loop = asyncio.get_running_loop()
    times = []
    for _ in range(3):
        began = loop.time()
        await post(session, CHAT, chat("x" * 100_000, max_tokens=1))
        times.append(loop.time() - began)
    assert times[0] > 4 * 0.04
    assert times[1] > 2 * 0.04
    assert times[2] < times[0] - 2 * 0.04


async def test_first_tokens_come_in_the_order_that_the_model_predicts(start: Start) -> None:
    slow = QUICK.__class__(
        **{name: getattr(QUICK, name) for name in QUICK.__slots__} | {"prefill_tokens_per_s": 20_000.0}
    )
    session = await start(profile=slow)
    loop = asyncio.get_running_loop()

    async def ttft(text: str) -> float:
        began = loop.time()
        async with session.post(CHAT, json=chat(text, stream=True, max_tokens=2)) as response:
            await response.content.readline()
            took = loop.time() - began
            await response.read()
        return took

    long, short = "l" * 4 * 4_000, "s" * 4 * 400
    cold_long, cold_short, warm_long = await ttft(long), await ttft(short), await ttft(long)
    assert cold_long > 0.2 > cold_short > 0.02
    assert warm_long < cold_long / 2


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


# LoRA adapters of the simulated engine: listed, named as SGLang's clients name them, each with a cache of its own.


TEXT = "a prompt of some length " * 40


async def test_adapters_are_listed_with_their_base(start: Start) -> None:
    session = await start(adapters=["sql"])
    async with session.get("/v1/models") as response:
        rows = (await response.json())["data"]
    assert [(row["id"], row["parent"]) for row in rows] == [("gorgo-sim", None), ("sql", "gorgo-sim")]


async def test_each_adapter_has_a_cache_of_its_own(start: Start) -> None:
    session = await start(adapters=["sql", "python"])
    ways: list[dict[str, Any]] = [
        {},
        {"model": "gorgo-sim:sql"},
        {"lora_path": "python"},
        {"lora_path": "sql"},
        {"model": "gorgo-sim"},
    ]
    cached = []
    for way in ways:
        usage = (await post(session, CHAT, chat(TEXT, **way)))["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, False, False, True, True]


async def test_an_adapter_that_is_not_loaded_is_a_400_that_names_the_others(start: Start) -> None:
    session = await start(adapters=["sql"])
    async with session.post(CHAT, json=chat(TEXT, lora_path="x")) as response:
        assert response.status == 400
        assert "lora_path: expected a loaded adapter, one of sql" in await response.text()
