"""The simulated replica over HTTP: its routes, its streams, and the faults that it can be told to have."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from math import inf
from time import monotonic
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from gorgo.errors import BadRequest
from gorgo.lab.engine_server.replica import Deliveries, EngineFault, EngineFaults, FaultKind, StepLoop, read_fault
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.network import Link, Path
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


async def inject(session: aiohttp.ClientSession, **fault: Any) -> None:
    async with session.post("/sim/faults", json=fault) as response:
        assert response.status == 200, await response.text()


async def test_a_refused_request_has_no_answer_at_all(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="refuse", count=1)
    with pytest.raises(aiohttp.ClientError):
        await post(engine, CHAT, chat("hello"))
    assert await post(engine, CHAT, chat("hello"))


async def test_without_a_count_probes_are_refused_too_until_it_is_over(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="refuse")
    with pytest.raises(aiohttp.ClientError):
        await engine.get("/ping")
    await inject(engine, kind="none")
    async with engine.get("/ping") as response:
        assert response.status == 200


async def test_an_injected_error_is_a_500_for_so_many_requests(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="500", count=2)
    statuses = []
    for _ in range(3):
        async with engine.post(CHAT, json=chat("hello")) as response:
            statuses.append(response.status)
    assert statuses == [500, 500, 200]


async def test_a_hanging_response_never_starts_and_ends_with_its_client(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="hang_before_first_token", count=1)
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.1):
            await stream(engine, CHAT, chat("hello"))
    await until_idle(engine)


async def test_a_stream_hangs_after_half_of_its_tokens(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="hang_mid_stream", count=1)
    async with engine.post(CHAT, json=chat("hello", max_tokens=8, stream=True)) as response:
        received = [await response.content.readline() for _ in range(2 * (1 + 4))]
        assert b"".join(received).count(b'"content"') == 1 + 4
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(response.content.readline(), 0.1)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_connection_is_reset_after_half_of_the_tokens(engine: aiohttp.ClientSession, streaming: bool) -> None:
    await inject(engine, kind="reset_mid_stream", count=1)
    with pytest.raises(aiohttp.ClientError):
        async with engine.post(CHAT, json=chat("hello", max_tokens=8, stream=streaming)) as response:
            await response.read()
    await until_idle(engine)
    assert await post(engine, CHAT, chat("hello"))


async def test_a_client_that_leaves_at_the_last_token_is_no_failure(
    engine: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_eof = web.StreamResponse.write_eof

    async def end(self: web.StreamResponse, data: bytes = b"") -> None:
        if self.content_type == "text/event-stream":
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await write_eof(self, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", end)
    with pytest.raises(aiohttp.ClientPayloadError):
        async with engine.post(CHAT, json=chat("hello", max_tokens=2, stream=True)) as response:
            await response.read()
    await until_idle(engine)
    assert not [record for record in caplog.records if record.exc_info]


async def test_slow_makes_every_step_longer(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="slow", factor=20)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await post(engine, CHAT, chat("hello", max_tokens=5))
    assert loop.time() - began > 0.09
    await inject(engine, kind="none")


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "gremlin"},
        {"kind": "500", "count": 0},
        {"kind": "500", "count": 1.5},
        {"kind": "slow", "factor": -1},
        {"kind": "slow", "count": 3},
        {"kind": "500", "seconds": "long"},
        {"kind": "500", "often": 1},
        [],
    ],
)
async def test_a_wrong_fault_is_refused_with_what_was_expected(engine: aiohttp.ClientSession, fault: object) -> None:
    async with engine.post("/sim/faults", json=fault) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"kind": "slow"}, EngineFault(kind=FaultKind.SLOW, factor=3.0)),
        ({"kind": "slow", "factor": 20, "seconds": 0.5}, EngineFault(kind=FaultKind.SLOW, factor=20.0, seconds=0.5)),
        ({"kind": "500", "count": 999_999_999}, EngineFault(kind=FaultKind.ERROR, count=999_999_999)),
        ({"kind": "none", "count": None}, EngineFault(kind=FaultKind.NONE)),
    ],
)
def test_a_fault_is_read_with_what_it_leaves_out(body: dict[str, Any], fault: EngineFault) -> None:
    assert read_fault(body) == fault
    assert EngineFault(kind=FaultKind.SLOW).factor == 3.0


@pytest.mark.parametrize("value", [0, -1, True, 10**9, "1"])
def test_an_amount_is_positive_and_below_a_billion(value: object) -> None:
    for name in ("count", "seconds", "factor"):
        with pytest.raises(BadRequest, match=f"{name} must be a positive"):
            read_fault({"kind": "refuse", name: value})


def test_a_count_is_of_requests_that_meet_the_fault() -> None:
    faults = EngineFaults()
    faults.inject(EngineFault(kind=FaultKind.REFUSE, count=2), now=0.0)
    assert not faults.refuses_all(now=0.0)
    assert [faults.next_kind(now=0.0) for _ in range(3)] == [FaultKind.REFUSE, FaultKind.REFUSE, FaultKind.NONE]
    faults.inject(EngineFault(kind=FaultKind.REFUSE, seconds=2.0), now=5.0)
    assert [faults.refuses_all(now=now) for now in (5.0, 6.9, 7.0)] == [True, True, False]
    assert faults.slowdown(now=5.0) == 1.0


def test_slowness_lasts_as_long_as_it_was_said_to() -> None:
    faults = EngineFaults()
    faults.inject(EngineFault(kind=FaultKind.SLOW, seconds=2.0, factor=4.0), now=5.0)
    assert [faults.slowdown(now=now) for now in (5.0, 6.9, 7.0)] == [4.0, 4.0, 1.0]


def test_a_fault_ends_by_its_time() -> None:
    faults = EngineFaults()
    faults.inject(EngineFault(kind=FaultKind.ERROR, seconds=2.0), now=10.0)
    assert [faults.next_kind(now=now) for now in (10.0, 11.9, 12.0)] == [
        FaultKind.ERROR,
        FaultKind.ERROR,
        FaultKind.NONE,
    ]


def request(output_tokens: int = 2) -> EngineRequest:
    return EngineRequest(b"abcd", prompt_tokens=1, output_tokens=output_tokens)


class Listener:
    """Counts what is emitted, and knows when all of it was."""

    def __init__(self, *, expected: int) -> None:
        self.expected = expected
        self.ends_s: list[float] = []
        self.done = asyncio.Event()

    def __call__(self, _: EngineRequest, now: float) -> None:
        self.ends_s.append(now)
        if len(self.ends_s) == self.expected:
            self.done.set()


async def test_a_request_that_arrives_a_moment_ahead_of_its_time_is_not_forgotten() -> None:
    heard = Listener(expected=4)
    steps: StepLoop[EngineRequest] = StepLoop(EngineModel(QUICK), heard)
    now = monotonic()
    steps.submit(request(), now)
    steps.submit(request(), now + 0.02)
    await heard.done.wait()
    assert heard.ends_s[2] == pytest.approx(now + 0.02 + 0.001 + 1e-5)


async def test_steps_follow_each_other_without_drift() -> None:
    heard = Listener(expected=50)
    steps: StepLoop[EngineRequest] = StepLoop(EngineModel(QUICK), heard)
    now = monotonic()
    steps.submit(request(50), now)
    await heard.done.wait()
    assert heard.ends_s[-1] == pytest.approx(now + 0.001 + 1e-5 + 49 * 0.001)


async def test_the_engine_goes_on_when_one_of_its_listeners_fails() -> None:
    heard = Listener(expected=2)

    def emit(served: EngineRequest, now: float) -> None:
        heard(served, now)
        if len(heard.ends_s) == 1:
            raise RuntimeError("a broken stream")

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    steps: StepLoop[EngineRequest] = StepLoop(EngineModel(QUICK), emit)
    steps.submit(request(), monotonic())
    await heard.done.wait()
    assert [str(failure) for failure in failures] == ["a broken stream"]


async def test_the_engine_accounts_in_scheduled_time(engine: aiohttp.ClientSession) -> None:
    answer = await post(engine, "/generate", {"text": "x" * 400, "sampling_params": {"max_new_tokens": 30}})
    assert answer["meta_info"]["e2e_latency"] == pytest.approx(0.001 + 100 / 100_000 + 29 * 0.001)


class Sink:
    """A stream that writes down what arrives."""

    def __init__(self, *, expected: int) -> None:
        self.last_arrival_s = 0.0
        self.expected = expected
        self.pieces: list[bytes] = []
        self.done = asyncio.Event()

    def deliver(self, piece: bytes) -> None:
        self.pieces.append(piece)
        if len(self.pieces) == self.expected:
            self.done.set()


async def test_pieces_arrive_after_their_trip_and_in_order() -> None:
    deliveries = Deliveries(Path(Link(rtt_s=0.02, jitter=0.3), np.random.default_rng(0)))
    sinks = [Sink(expected=40) for _ in range(5)]
    sent_s = monotonic()
    for number in range(40):
        for sink in sinks:
            deliveries.send(sink, b"%d" % number, sent_s + number * 0.0005)
    assert not sinks[0].pieces
    await asyncio.gather(*(sink.done.wait() for sink in sinks))
    assert monotonic() - sent_s > 0.01
    assert all(sink.pieces == [b"%d" % number for number in range(40)] for sink in sinks)


async def test_nothing_more_arrives_at_a_stream_that_hangs() -> None:
    deliveries = Deliveries(Path(Link(rtt_s=0.0), np.random.default_rng(0)))
    sink = Sink(expected=1)
    deliveries.send(sink, b"first", monotonic())
    sink.last_arrival_s = inf
    deliveries.send(sink, b"second", monotonic())
    assert sink.pieces == [b"first"]
