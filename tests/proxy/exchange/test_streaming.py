"""Bytes through the proxy are the bytes of the replica, streamed or not, in both directions."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
from base64 import b64encode

import httpx
import pytest

from tests.proxy.conftest import Start, config_for, system_tls, until, with_replica
from tests.proxy.fakes import DONE, ROLE, USAGE, answer, chat, delta, event, hang, running, stream

TOOL_BODY = chat(
    stream=True,
    tools=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    messages=[
        {"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat 🐈"},
    ],
    unknown_field={"kept": [1.0, 1e400, None]},
)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_stream_passes_byte_for_byte_and_names_its_replica(start: Start) -> None:
    chunks = (b": hello\n\n", ROLE, delta("a"), delta("b"), DONE)
    fleet = await start.fleet([stream(*chunks)])
    body = chat(stream=True)
    response = await fleet.client.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.content) == (200, b"".join(chunks))
    assert response.headers["x-gorgo-replica"] == "r0"
    assert response.headers["x-gorgo-region"] == "here"
    assert response.headers["x-gorgo-policy"] == "round-robin"
    assert response.headers["x-gorgo-weights-version"] == "1"
    assert response.headers["x-gorgo-estimated-cached-tokens"] == "0"
    assert fleet.replicas[0].seen[0].body == body
    await fleet.idle()


@pytest.mark.parametrize("seed", range(3))
async def test_stream_cut_anywhere_arrives_as_it_was(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    whole = ROLE + b"".join(delta(chr(0x4E00 + n) * 3) for n in range(200)) + USAGE + DONE
    cuts = sorted(rng.sample(range(1, len(whole)), 60))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    fleet = await start.fleet([stream(*pieces)])
    response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
    assert digest(response.content) == digest(whole)
    sample = next(iter(fleet.state.routing.router.samples))
    assert (sample.input_tokens, sample.cached_tokens, sample.output_tokens) == (12, 8, 2)


@pytest.mark.parametrize("size", [0, 100, 64 * 1024, 64 * 1024 + 1, 5_000_000])
async def test_whole_answer_of_any_size_arrives_with_its_length(start: Start, size: int) -> None:
    body = b'{"object":"list","data":"' + b"x" * size + b'","usage":{"prompt_tokens":3,"total_tokens":3}}'
    fleet = await start.fleet([answer(200, body)])
    response = await fleet.client.post("/v1/embeddings", json={"input": "hello"})
    assert digest(response.content) == digest(body)
    assert response.headers["content-length"] == str(len(body))
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).input_tokens == 3


async def test_body_with_tools_and_images_reaches_the_replica_byte_for_byte(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), DONE)])
    response = await fleet.client.post("/v1/chat/completions", content=TOOL_BODY)
    assert response.status_code == 200
    assert digest(fleet.replicas[0].seen[0].body) == digest(TOOL_BODY)


async def test_megabytes_of_body_reach_the_replica_byte_for_byte(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    body = chat(messages=[{"role": "user", "content": "π" * 3_000_000}])
    response = await fleet.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 200
    assert digest(fleet.replicas[0].seen[0].body) == digest(body)


async def test_encoded_answer_that_was_not_asked_for_stays_encoded(start: Start) -> None:
    packed = gzip.compress(b'{"choices":[]}')
    fleet = await start.fleet([answer(200, packed, {"content-encoding": "gzip"})])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat()) as response:
        raw = b"".join([chunk async for chunk in response.aiter_raw()])
    assert raw == packed
    assert response.headers["content-encoding"] == "gzip"
    assert fleet.replicas[0].seen[0].header("accept-encoding") == ["identity"]


async def test_replica_gets_no_header_that_nobody_sent_but_the_id_and_the_coding_of_its_answer(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with httpx.AsyncClient(base_url=fleet.addresses.data_url, verify=system_tls()) as bare:
        request = bare.build_request("POST", "/v1/chat/completions", content=chat())
        for name in ("accept-encoding", "accept", "user-agent"):
            del request.headers[name]
        assert (await bare.send(request)).status_code == 200
    seen = fleet.replicas[0].seen[0]
    assert {key.lower() for key, _ in seen.headers} == {b"host", b"content-length", b"x-request-id", b"accept-encoding"}


async def test_encoded_stream_is_passed_at_once(start: Start) -> None:
    packed, late = gzip.compress(delta("a")), gzip.compress(DONE)
    fleet = await start.fleet([hang(packed, rest=[late], headers={"content-encoding": "gzip"})])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        first = await anext(raw)
        fleet.replicas[0].release.set()
        rest = b"".join([chunk async for chunk in raw])
    assert first + rest == packed + late


async def test_an_image_is_priced_by_its_size_and_then_as_its_model_reports(start: Start) -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 3000, "completion_tokens": 1}})
    fleet = await start.fleet([stream(delta("a"), usage, DONE)])
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1120).to_bytes(4, "big") * 2
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(head).decode()}"}}
    for tokens in (1601, 3000):  # 40 x 40 patches of 28 pixels and a word, and as reported
        body = chat(messages=[{"role": "user", "content": [image, {"type": "text", "text": "what"}]}], stream=True)
        response = await fleet.client.post("/v1/chat/completions", content=body)
        (decision,) = fleet.state.routing.router.view.decisions(response.headers["x-request-id"])
        assert decision.prompt_tokens == tokens
    await fleet.idle()


async def test_nothing_is_sent_before_the_first_content(start: Start) -> None:
    preamble = (b": wait\n\n", ROLE)
    fleet = await start.fleet([hang(*preamble, rest=[delta("a"), DONE])])
    request = asyncio.create_task(fleet.client.post("/v1/chat/completions", content=chat(stream=True)))
    await fleet.replicas[0].arrived.wait()
    await until(lambda: len(fleet.replicas[0].seen) == 1)
    assert not request.done()
    assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].queued_prefill_tokens > 0
    fleet.replicas[0].release.set()
    response = await request
    assert response.content == b"".join(preamble) + delta("a") + DONE
    await fleet.idle()


async def test_more_than_64_kib_without_content_is_let_go(start: Start) -> None:
    comments = b": " + b"x" * 80_000 + b"\n\n"
    fleet = await start.fleet([hang(comments, rest=[delta("a"), DONE])])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        fleet.replicas[0].release.set()
        got += b"".join([chunk async for chunk in raw])
    assert digest(got) == digest(comments + delta("a") + DONE)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).ttft_ms is not None


async def test_more_than_64_kib_of_comments_is_let_go_and_the_first_content_still_found(start: Start) -> None:
    comments = (b": " + b"x" * 1000 + b"\n\n") * 70
    fleet = await start.fleet([hang(comments, rest=[ROLE, delta("a"), delta("b"), DONE])])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].queued_prefill_tokens > 0
        fleet.replicas[0].release.set()
        got += b"".join([chunk async for chunk in raw])
    assert digest(got) == digest(comments + ROLE + delta("a") + delta("b") + DONE)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).ttft_ms is not None


async def test_stream_that_ends_without_content_is_complete(start: Start) -> None:
    fleet = await start.fleet([stream(ROLE, DONE)], [stream(delta("b"), DONE)])
    response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
    assert response.content == ROLE + DONE


async def test_usage_is_asked_for_and_taken_out_again_where_the_replica_says_so(start: Start) -> None:
    async with running(stream(ROLE, delta("a"), USAGE, DONE)) as replica:
        config = with_replica(config_for([replica]), 0, request_usage=True)
        fleet = await start.proxy(config, [replica])
        response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
        assert response.content == ROLE + delta("a") + DONE
        seen = json.loads(replica.seen[0].body)
        assert seen == {**json.loads(chat(stream=True)), "stream_options": {"include_usage": True}}
        assert next(iter(fleet.state.routing.router.samples)).cached_tokens == 8


@pytest.mark.parametrize("fields", [{"stream": True, "stream_options": {"include_usage": True}}, {"stream": False}])
async def test_usage_that_the_client_asked_for_itself_stays(start: Start, fields: dict[str, object]) -> None:
    async with running(stream(ROLE, delta("a"), USAGE, DONE)) as replica:
        config = with_replica(config_for([replica]), 0, request_usage=True)
        fleet = await start.proxy(config, [replica])
        body = chat(**fields)
        response = await fleet.client.post("/v1/chat/completions", content=body)
        assert response.content == ROLE + delta("a") + USAGE + DONE
        assert replica.seen[0].body == body


async def test_usage_is_never_asked_for_by_default(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), DONE)])
    await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
    assert fleet.replicas[0].seen[0].body == chat(stream=True)


async def test_stored_response_goes_back_to_its_replica(start: Start) -> None:
    first = event({"type": "response.created", "response": {"id": "resp_abc"}})
    text = event({"type": "response.output_text.delta", "delta": "a"})
    fleet = await start.fleet([stream(first, text)], [answer(200, b'{"id":"resp_other"}')])
    opened = await fleet.client.post("/v1/responses", json={"model": "m", "input": "hello", "stream": True})
    assert opened.headers["x-gorgo-replica"] == "r0"
    for _ in range(3):
        again = {"model": "m", "input": "and?", "previous_response_id": "resp_abc", "stream": True}
        assert (await fleet.client.post("/v1/responses", json=again)).headers["x-gorgo-replica"] == "r0"


async def test_unknown_stored_response_is_a_clear_404(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    body = {"model": "m", "input": "and?", "previous_response_id": "resp_nobody"}
    response = await fleet.client.post("/v1/responses", json=body)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "previous_response_not_found"
    assert "previous_response_id" in response.json()["error"]["message"]


async def test_learned_bytes_per_token_move_the_estimate(start: Start) -> None:
    usage = {"prompt_tokens": 20_000, "completion_tokens": 1}
    fleet = await start.fleet([answer(200, json.dumps({"usage": usage}).encode())])
    body = chat(messages=[{"role": "user", "content": "x" * 40_000}])
    answers = [await fleet.client.post("/v1/chat/completions", content=body) for _ in range(2)]
    decisions = [fleet.state.routing.router.view.decisions(answer.headers["x-request-id"]) for answer in answers]
    first, second = (decision.prompt_tokens for (decision,) in decisions)
    assert first == 10_000
    assert second > 18_000
