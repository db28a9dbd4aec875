"""What holds before the simulated engine must hold before llama.cpp's server too, also when it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from gorgo.config.model import LimitsConfig
from gorgo.lab.prompt_text import prompt_text
from tests.real.faults import EMPTY_LEDGER, Death, chat, survive
from tests.real.llama_server import LlamaServer, llama_server, missing_reason
from tests.real.served import Served, eventually, served
from tests.real.tap import Tap, TappedConnection, bodies_of, tapped
from tests.real.tiny_model import byte_letters, make_tiny_model, vocabulary

# --- What holds before the simulated engine must hold before llama.cpp's server too.


CHAT = b"POST /v1/chat/completions "
#: llama.cpp says `Keep-Alive: timeout=5, max=100`.
MAX_REQUESTS_A_CONNECTION = 100
#: And 5 s it is, unless the machine stands still.
IDLE_WITHIN_S = 30.0
EMPTY_LEDGER_LLAMA_CPP = {"in_flight_requests": 0, "in_flight_tokens": 0, "queued_prefill_tokens": 0}


@dataclass(frozen=True, slots=True)
class Bench:
    """Two engines, a tap before each, the proxy before the taps."""

    proxy: Served
    engines: dict[str, LlamaServer]
    taps: dict[str, Tap]
    http: httpx.AsyncClient

    def connections(self) -> list[TappedConnection]:
        """Connections to either engine that carried a chat request."""
        return [connection for tap in self.taps.values() for connection in tap.carrying(CHAT)]

    def processing(self) -> int:
        return sum(engine.processing() for engine in self.engines.values())


@pytest.fixture
async def bench(llama_servers: tuple[LlamaServer, LlamaServer]) -> AsyncIterator[Bench]:
    engines = dict(zip(("left", "right"), llama_servers, strict=True))
    async with AsyncExitStack() as stack:
        taps = {name: await stack.enter_async_context(tapped(engine.url)) for name, engine in engines.items()}
        proxy = await stack.enter_async_context(served({name: tap.url for name, tap in taps.items()}))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=30))
        yield Bench(proxy, engines, taps, http)


def chat_llama_cpp(text: str, *, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}


def text_of(number: int, tokens: int) -> str:
    """A prompt that no other test sends."""
    return prompt_text([], tokens, rest=f"prompt {number}").decode().rstrip()


async def test_the_openai_client_streams_a_chat(bench: Bench) -> None:
    async with AsyncOpenAI(base_url=f"{bench.proxy.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text_of(1, 300)}],
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    words = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(words) == 24
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens > 300
    assert await bench.proxy.ledger() == EMPTY_LEDGER_LLAMA_CPP


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_reaches_the_client_byte_for_byte(bench: Bench, stream: bool) -> None:
    answer = await bench.http.post("/v1/chat/completions", json=chat_llama_cpp(text_of(2, 50), stream=stream))
    assert answer.status_code == 200
    (connection,) = bench.connections()
    assert answer.content == connection.last_body()


async def test_the_same_request_sent_to_the_engine_gives_the_same_text(bench: Bench) -> None:
    body = chat_llama_cpp(text_of(3, 50), max_tokens=32)
    routed = await bench.http.post("/v1/chat/completions", json=body)
    direct = await bench.http.post(f"{bench.engines['left'].url}/v1/chat/completions", json=body)
    assert routed.json()["choices"] == direct.json()["choices"]


async def test_cached_tokens_grow_over_turns_that_stay_on_one_replica(bench: Bench) -> None:
    messages = [{"role": "user", "content": text_of(4, 400)}]
    cached, prompts, replicas = [], [], set()
    for turn in range(4):
        answer = await bench.http.post("/v1/chat/completions", json=chat_llama_cpp("") | {"messages": messages})
        usage = answer.json()["usage"]
        prompts.append(usage["prompt_tokens"])
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        replicas.add(answer.headers["x-gorgo-replica"])
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": text_of(40 + turn, 100)})
    assert len(replicas) == 1
    assert cached[0] < 20
    # Each turn finds at least the whole prompt of the turn before.
    assert all(found >= before for found, before in zip(cached[1:], prompts, strict=False))


async def test_what_the_engine_reports_cached_is_what_the_samples_say(bench: Bench) -> None:
    for _ in range(2):
        answer = await bench.http.post("/v1/chat/completions", json=chat_llama_cpp(text_of(5, 600)))
    reported = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    sample = (await bench.proxy.samples())[-1]
    assert sample["cached_tokens"] == reported > 600
    assert sample["estimated_cached_tokens"] == pytest.approx(600, abs=64)


async def test_a_client_that_leaves_frees_the_engine_and_the_ledger(bench: Bench) -> None:
    body = chat_llama_cpp(text_of(6, 100), max_tokens=3_900, stream=True)
    async with bench.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.aiter_lines()
        while '"content":" ' not in await anext(lines):
            pass
        assert bench.processing() == 1
        assert (await bench.proxy.ledger())["in_flight_requests"] == 1
    await eventually(lambda: bench.processing() == 0)
    # The engine is free before it is done: what it wrote is far from 3,900 tokens.
    (connection,) = bench.connections()
    assert connection.answers.count(b"data: ") < 3_800
    assert await bench.proxy.ledger() == EMPTY_LEDGER_LLAMA_CPP


async def test_an_over_long_prompt_gets_the_engines_own_400(bench: Bench) -> None:
    body = chat_llama_cpp(text_of(7, 5_000))
    answer = await bench.http.post("/v1/chat/completions", json=body)
    direct = await bench.http.post(f"{bench.engines['left'].url}/v1/chat/completions", json=body)
    assert answer.status_code == direct.status_code == 400
    assert answer.content == direct.content
    assert answer.json()["error"]["type"] == "exceed_context_size_error"
    assert len(bench.connections()) == 1  # nobody else was asked
    states = {row["name"]: row["state"] for row in await bench.proxy.fleet()}
    assert states == {"left": "healthy", "right": "healthy"}
    assert await bench.proxy.ledger() == EMPTY_LEDGER_LLAMA_CPP


async def test_a_connection_may_end_after_a_hundred_requests_unseen_by_clients(bench: Bench) -> None:
    body = chat_llama_cpp(text_of(8, 20), max_tokens=1)
    for _ in range(2 * MAX_REQUESTS_A_CONNECTION + 50):
        answer = await bench.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
    counts = [connection.count(CHAT) for connection in bench.connections()]
    assert sum(counts) == 2 * MAX_REQUESTS_A_CONNECTION + 50  # no request was sent twice
    assert 50 < max(counts) <= MAX_REQUESTS_A_CONNECTION  # the pool was used, up to the engine's limit
    # One of the two engines had 125 or more; the other need not have had its hundred.
    assert any(connection.closed_by for connection in bench.connections())


@pytest.mark.system
async def test_the_engines_idle_limit_is_unseen_by_clients(bench: Bench) -> None:
    """How often connections are kept warm is shown in virtual time: a machine that stands still is let be idle too."""
    body = chat_llama_cpp(text_of(9, 20), max_tokens=1)
    first = await bench.http.post("/v1/chat/completions", json=body)
    name = first.headers["x-gorgo-replica"]
    await closed_for_idling(bench.engines[name])
    second = await bench.http.post("/v1/chat/completions", json=body)
    assert (first.status_code, second.status_code) == (200, 200)
    bodies = [found for connection in bench.connections() for found in bodies_of(connection.answers)]
    assert sum(b'"chat.completion"' in found for found in bodies) == 2  # no request was answered twice


async def closed_for_idling(engine: LlamaServer) -> None:
    """Returns when the engine has closed a connection on which nothing went any more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: engine\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(IDLE_WITHIN_S):
        while await reader.read(1 << 16):
            pass
    writer.close()


async def test_the_anthropic_client_streams_messages(bench: Bench) -> None:
    anthropic = pytest.importorskip("anthropic", reason="ANTHROPIC CLIENT TEST SKIPPED: the package is not installed")
    async with anthropic.AsyncAnthropic(base_url=bench.proxy.url, api_key="none") as client:
        said = {"role": "user", "content": text_of(10, 300)}
        for _ in range(2):
            async with client.messages.stream(model="tiny", max_tokens=16, messages=[said]) as stream:
                words = [word async for word in stream.text_stream]
                message = await stream.get_final_message()
    assert len(words) == message.usage.output_tokens == 16
    assert message.usage.cache_read_input_tokens > 300
    sample = (await bench.proxy.samples())[-1]
    assert sample["cached_tokens"] == message.usage.cache_read_input_tokens
    assert await bench.proxy.ledger() == EMPTY_LEDGER_LLAMA_CPP


async def test_the_openai_client_streams_a_response(bench: Bench) -> None:
    async with AsyncOpenAI(base_url=f"{bench.proxy.url}/v1", api_key="none") as client:
        stream = await client.responses.create(model="tiny", input=text_of(11, 100), max_output_tokens=12, stream=True)
        events = [event async for event in stream]
    assert sum(event.type == "response.output_text.delta" for event in events) == 12
    assert events[-1].type == "response.completed"
    assert await bench.proxy.ledger() == EMPTY_LEDGER_LLAMA_CPP


async def test_usage_that_the_client_did_not_ask_for_is_learnt_and_taken_out(bench: Bench) -> None:
    tap = bench.taps["left"]
    async with served({"left": tap.url}, request_usage=True) as proxy:
        body = chat_llama_cpp(text_of(12, 100), stream=True)
        answer = await bench.http.post(f"{proxy.url}/v1/chat/completions", json=body)
        (sample,) = await proxy.samples()
    (connection,) = tap.carrying(CHAT)
    (extra,) = (event for event in connection.last_body().split(b"\n\n") if b'"usage":' in event)
    assert answer.content == connection.last_body().replace(extra + b"\n\n", b"")
    assert sample["output_tokens"] == 8


async def test_an_engine_without_metrics_is_told_apart_once_with_its_flag(
    tmp_path: Path, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "tiny.gguf")
    with llama_server(model, metrics=False) as silent:
        async with served({"silent": silent.url, "telling": bench.engines["left"].url}) as proxy:
            reports = {row["name"]: row["reports"]["metrics"] for row in await proxy.fleet()}
    assert reports == {"silent": "missing", "telling": "reported"}
    (told,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "report_missing"]
    assert told["replica"] == "silent"
    assert told["advice"].endswith("start the engine with --metrics")


async def test_the_engine_and_its_model_are_found_by_asking(llama_servers: tuple[LlamaServer, LlamaServer]) -> None:
    engines = dict(zip(("left", "right"), llama_servers, strict=True))
    async with served({name: engine.url for name, engine in engines.items()}, engine="auto") as proxy:
        for row in await proxy.fleet():
            assert row["engine"]["name"] == "llamacpp"
            assert row["engine"]["version"]
            assert (row["models"], row["max_running_requests"]) == (["tiny"], 4)
        async with httpx.AsyncClient(base_url=proxy.url, timeout=30) as http:
            assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["tiny"]


# --- The model that the other tests believe: its vocabulary, and that it is the same on each run.


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "first.gguf").read_bytes()
    assert make_tiny_model(tmp_path / "second.gguf").read_bytes() == first
    assert make_tiny_model(tmp_path / "third.gguf", seed=1).read_bytes() != first


def test_every_byte_and_every_syllable_is_one_token_of_the_vocabulary() -> None:
    words = vocabulary()
    assert len(set(words.tokens)) == len(words.tokens) == 835
    assert set(byte_letters()) <= set(words.tokens)
    assert len(words.spoken) == 256


def test_a_prompt_of_a_trace_has_as_many_tokens_for_the_engine_as_in_the_trace(
    llama_servers: tuple[LlamaServer, LlamaServer],
) -> None:
    text = prompt_text([1, 2], 700).decode().rstrip()
    answer = httpx.post(f"{llama_servers[0].url}/tokenize", json={"content": text})
    assert len(answer.json()["tokens"]) == 700


# --- A llama.cpp server that is killed in the middle of its streams, and one that a deadline takes a request from.


SLOTS = 2
WORDS = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reason = missing_reason()
    if reason:
        pytest.skip(reason)
    return make_tiny_model(tmp_path_factory.mktemp("faults") / "tiny.gguf")


@pytest.mark.system
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
