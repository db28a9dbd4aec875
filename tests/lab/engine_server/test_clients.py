"""The clients of OpenAI and Anthropic before the proxy, the proxy before two simulated engines, all on sockets."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from msgspec import msgpack
from pydantic import BaseModel

from gorgo.core.prefix.kv_source import chain_hashes
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.lab.engine_server import replica, run_engine
from gorgo.lab.engine_server.cache_reports import PushTarget
from gorgo.live.kv_events.sockets import import_zmq
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.prompt_tokens import PromptTokens
from gorgo.live.tokens import ModelTokens
from tests.lab.engine_server.client import post
from tests.lab.engine_server.conftest import QUICK, Start, serving
from tests.lab.engine_server.test_push import listening, until
from tests.live.kv_events.feeding import needs_zmq
from tests.real.served import Served, served

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ARGUMENTS = {"city": "simulated", "days": 1}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
HELLO: Any = [{"role": "user", "content": "Hello, engine! " * 20}]


class Weather(BaseModel):
    """A structured answer."""

    city: str
    days: int


@pytest.fixture
async def proxy() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(serving()) for _ in range(2)]
        urls = {name: str(session._base_url) for name, session in zip("ab", sessions, strict=True)}
        yield await stack.enter_async_context(served(urls, engine="sglang"))


@pytest.fixture
async def client(proxy: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
async def claude(proxy: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=proxy.url, api_key="none", max_retries=0) as opened:
        yield opened


async def test_a_named_tool_is_called_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    tools: Any = [TOOL]
    whole = await client.chat.completions.create(model="m", messages=HELLO, tools=tools, tool_choice=named)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", None)
    async with client.chat.completions.stream(
        model="m", messages=HELLO, tools=tools, tool_choice=named, stream_options={"include_usage": True}
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    assert final.choices[0].finish_reason == "tool_calls"
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 5
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens == -(-len(call.function.arguments) // 4)
    assert final.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_a_tool_is_called_when_required_or_named_in_the_text_and_never_after_its_result(
    client: openai.AsyncOpenAI,
) -> None:
    async def calls(messages: Any, **more: Any) -> int:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], **more)  # type: ignore[list-item]
        return len(answer.choices[0].message.tool_calls or [])

    asking: Any = [{"role": "user", "content": "Please use get_weather."}]
    assert await calls(HELLO) == 0
    assert await calls(HELLO, tool_choice="required") == 1
    assert await calls(asking) == 1
    assert await calls(asking, tool_choice="none") == 0
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "get_weather says sunny"}
    assert await calls([*asking, {"role": "assistant", "tool_calls": [call]}, result]) == 0


async def test_n_choices_differ_and_their_prompt_counts_once(client: openai.AsyncOpenAI) -> None:
    one = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=5)
    whole = await client.chat.completions.create(model="m", messages=HELLO, max_tokens=5, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert one.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (one.usage.prompt_tokens, 15)
    details = whole.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert details.cached_tokens < one.usage.prompt_tokens
    stream = await client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=5, n=3, stream=True, stream_options={"include_usage": True}
    )
    parts = ["", "", ""]
    reasons = []
    async for chunk in stream:
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            reasons += [choice.index] if choice.finish_reason else []
        last = chunk
    assert parts == texts
    assert sorted(reasons) == [0, 1, 2]
    assert last.usage is not None
    assert last.usage.completion_tokens == 15


async def test_a_list_of_prompts_has_the_answers_in_its_order(client: openai.AsyncOpenAI) -> None:
    prompts = ["one " * 9, "two " * 5]
    alone = [await client.completions.create(model="m", prompt=prompt, max_tokens=4) for prompt in prompts]
    whole = await client.completions.create(model="m", prompt=prompts, max_tokens=4, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [whole.choices[place].text for place in (0, 2)] == [one.choices[0].text for one in alone]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9 + 5, 16)
    texts = [""] * 4
    async for chunk in await client.completions.create(model="m", prompt=prompts, max_tokens=4, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    vectors = await client.embeddings.create(model="m", input=prompts, encoding_format="float")
    assert [one.index for one in vectors.data] == [0, 1]
    assert vectors.data[0].embedding != vectors.data[1].embedding
    assert vectors.usage.prompt_tokens == 14


async def test_a_format_has_a_json_answer(client: openai.AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(model="m", messages=HELLO, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="simulated", days=0)
    assert parsed.choices[0].finish_reason == "stop"
    anything = await client.chat.completions.create(model="m", messages=HELLO, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    cut = await client.chat.completions.create(
        model="m", messages=HELLO, response_format={"type": "json_object"}, max_tokens=2
    )
    assert (cut.choices[0].finish_reason, len(cut.choices[0].message.content or "")) == ("length", 8)


async def test_a_response_has_its_events_and_continues_the_previous_one(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="m", input="x" * 400, max_output_tokens=8)
    assert (first.status, first.usage and first.usage.input_tokens) == ("incomplete", 100)
    assert first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    assert len(first.output_text) == 32
    async with client.responses.stream(model="m", input="and then?", previous_response_id=first.id) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert kinds.count("response.output_text.delta") == 128
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (final.status, len(final.output_text)) == ("completed", 512)
    assert final.previous_response_id == first.id
    assert final.usage is not None
    # 100 tokens, 8 of the answer, and 9 characters.
    assert (final.usage.input_tokens, final.usage.output_tokens) == (111, 128)
    assert final.usage.input_tokens_details.cached_tokens == 107
    parsed = await client.responses.parse(model="m", input="hi", text_format=Weather)
    assert parsed.output_parsed == Weather(city="simulated", days=0)


async def test_a_response_calls_a_function(client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    whole = await client.responses.create(model="m", input="hi", tools=[tool], tool_choice="required")
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), whole.status) == ("get_weather", ARGUMENTS, "completed")
    async with client.responses.stream(model="m", input="hi", tools=[tool], tool_choice="required") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    (again,) = final.output
    assert again.type == "function_call"
    assert again.arguments == call.arguments
    assert {event.type for event in events} == {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    }


async def test_a_message_is_whole_or_streamed_with_the_same_text_and_usage(claude: anthropic.AsyncAnthropic) -> None:
    whole = await claude.messages.create(model="m", max_tokens=6, messages=HELLO, system="Be brief.")
    (block,) = whole.content
    assert block.type == "text"
    assert (len(block.text), whole.stop_reason, whole.role) == (24, "max_tokens", "assistant")
    assert (whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (0, 6)
    async with claude.messages.stream(model="m", max_tokens=6, messages=HELLO, system="Be brief.") as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == block.text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 6)
    # The same prompt again: cached but for its last token; read from the cache is beside the input.
    assert final.usage.input_tokens < whole.usage.input_tokens
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == whole.usage.input_tokens


async def test_a_message_uses_a_tool_and_has_a_format(claude: anthropic.AsyncAnthropic) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": WEATHER}]
    options: Any = {"model": "m", "max_tokens": 50, "messages": HELLO, "tools": tools}
    whole = await claude.messages.create(**options, tool_choice={"type": "any"})
    (block,) = whole.content
    assert block.type == "tool_use"
    assert (block.name, block.input, whole.stop_reason) == ("get_weather", ARGUMENTS, "tool_use")
    async with claude.messages.stream(**options, tool_choice={"type": "tool", "name": "get_weather"}) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_message()
    assert {
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_stop",
    } <= kinds
    (again,) = final.content
    assert again.type == "tool_use"
    assert (again.input, final.stop_reason) == (ARGUMENTS, "tool_use")
    config: Any = {"format": {"type": "json_schema", "schema": WEATHER}}
    formatted = await claude.messages.create(model="m", max_tokens=50, messages=HELLO, output_config=config)
    (part,) = formatted.content
    assert part.type == "text"
    assert (json.loads(part.text), formatted.stop_reason) == (ARGUMENTS, "end_turn")


async def test_the_proxy_samples_the_usage_of_every_api(
    proxy: Served, client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    for stream in (False, True):
        async with client.responses.with_streaming_response.create(
            model="m", input="y" * 400, max_output_tokens=4, stream=stream
        ) as answer:
            await answer.read()
        async with claude.messages.with_streaming_response.create(
            model="m", max_tokens=4, messages=[{"role": "user", "content": "y" * 400}], stream=stream
        ) as message:
            await message.read()
    samples = await proxy.samples()
    assert [(one["input_tokens"], one["output_tokens"]) for one in samples] == [(100, 4)] * 4
    assert {one["status"] for one in samples} == {200}
    assert samples[0]["cached_tokens"] == 0
    assert {one["cached_tokens"] for one in samples[1:]} <= {0, 99, 100}
    assert samples[-1]["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 0}, "n: expected a whole number from 1 to 128"),
        ({"n": 129}, "n: expected a whole number from 1 to 128"),
        ({"logprobs": True}, "logprobs: not simulated; leave it out"),
        ({"functions": [{"name": "f"}]}, "functions: not simulated; leave it out"),
        ({"modalities": ["text", "audio"]}, "modalities: not simulated; leave it out"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type: only function is simulated"),
        ({"tools": {}}, "tools: expected a list"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: expected a name"),
        ({"tool_choice": "required"}, "tool_choice: a call is required, but there are no tools"),
        ({"tool_choice": "maybe"}, "tool_choice: expected none, auto, required or a function's name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice: no tool is named 'f'",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: expected text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "x"}}}},
            "response_format.json_schema.schema.pattern: not simulated; leave it out",
        ),
    ],
)
async def test_what_is_not_simulated_is_a_400_that_names_the_field(
    client: openai.AsyncOpenAI, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=HELLO, extra_body=body)
    error = caught.value.response.json()
    assert (error["message"], error["param"]) == (said, said.partition(":")[0])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"background": True}, "background: not simulated; leave it out"),
        ({"conversation": "c"}, "conversation: not simulated; leave it out"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: only function is simulated"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type: expected text, json_object or json_schema"),
        ({"max_output_tokens": 0}, "max_output_tokens must be a whole number of at least 1"),
    ],
)
async def test_a_response_that_is_not_simulated_is_a_400(
    client: openai.AsyncOpenAI, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input="hi", extra_body=body)
    assert caught.value.response.json()["error"]["message"] == said


async def test_a_previous_response_that_is_not_stored_is_a_400_of_the_engine(engine: aiohttp.ClientSession) -> None:
    unstored = await post(engine, "/v1/responses", {"input": "hi", "store": False, "max_output_tokens": 1})
    for name in (unstored["id"], "resp_unknown", 7):
        async with engine.post("/v1/responses", json={"input": "hi", "previous_response_id": name}) as response:
            error = (await response.json())["error"]
        assert response.status == 400
        assert error["param"] == "previous_response_id"
        assert error["message"].endswith("is stored here")


async def test_the_oldest_stored_response_is_dropped(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MAX_RESPONSES", 2)
    engine = await start()
    body = {"input": "hi", "max_output_tokens": 1}
    names = [(await post(engine, "/v1/responses", body))["id"] for _ in range(3)]
    statuses = []
    for name in names:
        async with engine.post(
            "/v1/responses", json={**body, "previous_response_id": name, "store": False}
        ) as response:
            statuses.append(response.status)
    assert statuses == [400, 200, 200]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: not simulated; leave it out"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: a call is required, but there are no tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: expected none, auto, any or tool"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools[0].type: only tools of the client are simulated",
        ),
        ({"max_tokens": None}, "max_tokens must be a whole number of at least 1"),
    ],
)
async def test_a_message_that_is_not_simulated_is_a_400(
    claude: anthropic.AsyncAnthropic, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        await claude.messages.create(model="m", max_tokens=4, messages=HELLO, extra_body=body)
    assert caught.value.response.json() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": said},
    }


# What a proxy counts for `tokenizer: simulated` is what a simulated engine reports, on every route.


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
FUNCTION_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "ü", "parameters": {"type": "object"}},
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "Kürze"}, {"role": "user", "content": "Hello"}]},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}, IMAGE]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [FUNCTION_TOOL]}),
    ("/v1/completions", {"prompt": "The replica is here"}),
    ("/v1/completions", {"prompt": [5, 6, 7, 8, 9]}),
    ("/generate", {"text": "The replica is here", "sampling_params": {"max_new_tokens": 4}}),
    ("/generate", {"input_ids": [5, 6, 7]}),
    ("/v1/embeddings", {"input": "The replica"}),
    ("/v1/messages", {"system": "Kürze", "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/responses", {"instructions": "Kürze", "input": "Hello there", "store": False}),
]


@pytest.mark.parametrize(("route", "body"), BODIES)
async def test_counted_tokens_are_the_reported_ones(
    engine: aiohttp.ClientSession, route: str, body: dict[str, Any]
) -> None:
    whole = {"model": "test", "max_tokens": 4, **body}
    fields = read_fields(route, json.dumps(whole).encode(), Fingerprinter(key=1))
    prompts = PromptTokens({"test": ModelTokens("test")}, lambda _: (16,), lambda _: None)
    exact = await prompts.exact_prompt(route, fields, model="test", base="test")
    assert exact is not None
    async with engine.post(route, json=whole) as response:
        answer = await response.json()
        assert response.status == 200, answer
    assert exact.tokens == _reported(answer)


def _reported(answer: dict[str, Any]) -> int:
    usage = answer.get("usage") or answer["meta_info"]
    found: object = usage.get("prompt_tokens", usage.get("input_tokens"))
    assert isinstance(found, int), usage
    cached: int = usage.get("cache_read_input_tokens") or 0

    return found + cached


# `gorgo engine` that both publishes KV events and pushes its cache: each has every change.


LAST = b"\xff" * 8


@asynccontextmanager
async def serving_reports(push_url: str) -> AsyncIterator[str]:
    """Yield the address of an engine with both reports."""
    stop, bound = asyncio.Event(), asyncio.get_running_loop().create_future()
    engine = asyncio.create_task(
        run_engine(
            name="test",
            profile=QUICK,
            rtt_ms=0.0,
            seed=0,
            host="127.0.0.1",
            port=0,
            ready=lambda host, port: bound.set_result(f"http://{host}:{port}"),
            stop=stop,
            push=PushTarget(url=push_url, replica="r0", model="gorgo-sim", token="secret"),
            kv_events="tcp://127.0.0.1:0",
            notify=lambda _: None,
        )
    )
    try:
        yield await bound
    finally:
        stop.set()
        await engine


async def replayed(port: int) -> list[dict[str, Any]]:
    """Return all events that the engine has published."""
    zmq = import_zmq()
    context = zmq.asyncio.Context()
    try:
        replays = context.socket(zmq.DEALER)
        replays.connect(f"tcp://127.0.0.1:{port}")
        await replays.send_multipart([b"", bytes(8)])
        events: list[dict[str, Any]] = []
        while (frames := await replays.recv_multipart())[-2] != LAST:
            events += msgpack.decode(frames[-1])[1]
        return events
    finally:
        context.destroy(linger=0)


@needs_zmq
async def test_an_engine_pushes_the_blocks_that_its_events_name() -> None:
    async with AsyncExitStack() as running, asyncio.timeout(10):
        # The first push is refused, so that the next one comes half a second later: with the blocks of the prompt.
        proxy = await running.enter_async_context(listening((503, {})))
        url = await running.enter_async_context(serving_reports(proxy.url))
        session = await running.enter_async_context(aiohttp.ClientSession(url))
        body = {"model": "gorgo-sim", "prompt": "".join(f"{number:04d}" for number in range(512)), "max_tokens": 1}
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
        await until(lambda: any(hashes for _, _, hashes in proxy.pushes))
        async with session.get("/server_info") as answer:
            port = (await answer.json())["kv_events"]["replay_endpoint_port_base"]
        events = await replayed(port)
    (query, pushed) = next((query, hashes) for _, query, hashes in proxy.pushes if hashes)
    assert {event["type"] for event in events} == {"BlockStored"}
    tokens = array("I", [token for event in events for token in event["token_ids"]])
    assert len(tokens) >= 512
    assert sorted(pushed) == sorted(chain_hashes(tokens.tobytes(), block_tokens=int(query["block_tokens"])))
