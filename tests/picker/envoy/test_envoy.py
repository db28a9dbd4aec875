"""The picker behind a real Envoy: bodies, streams, time points, aborts, errors, retries, and counts of tokens."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import statistics
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from gorgo.picker.call import FirstTokenCall
from tests.picker.envoy.envoy import needs_envoy
from tests.picker.envoy.rig import CHAT, KEYS, Rig, rig
from tests.picker.test_parity import CLAUDE, CLAUDE_HEADERS, CODEX, CODEX_CODING, packed
from tests.proxy.conftest import until
from tests.proxy.fakes import DONE, USAGE, Script, answer, chat, delta, event, hang, reset_after, stream

pytestmark = [needs_envoy, pytest.mark.asyncio(loop_scope="module")]


# --- The picker behind a real Envoy: bodies, streams, time points, aborts, errors and retries.


#: The printed configuration and a gateway's; `found` differs from the first in its cluster alone. `make test` has the
#: first everywhere, and the gateway's where bodies pass through the picker.
FRONTS = ("own", pytest.param("gateway", marks=pytest.mark.system))
BOTH = ("own", "gateway")
FOUND = pytest.param("found", marks=pytest.mark.system)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig(tmp_path_factory.mktemp("envoy")) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyless(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """Clients' keys are the engines': they are passed on."""
    async with rig(tmp_path_factory.mktemp("keyless"), with_keys=False) as found:
        yield found


@pytest.mark.parametrize("front", [*BOTH, FOUND])
async def test_request_is_served_and_its_usage_is_in_the_sample(running: Rig, front: str) -> None:
    running.script(stream(delta("hello"), USAGE, DONE))
    before = len(running.samples)
    async with running.client(front) as client:
        response = await client.post(CHAT, content=chat(stream=True))
    assert response.status_code == 200
    assert response.content == delta("hello") + USAGE + DONE
    await until(lambda: len(running.samples) == before + 1)
    await running.idle()
    sample = running.samples[-1]
    assert (sample["status"], sample["output_tokens"]) == (200, 2)


@pytest.mark.parametrize(("front", "kept"), [("own", USAGE), ("gateway", b"")])
async def test_usage_that_only_the_picker_requests_is_removed_by_a_gateway(
    running: Rig, monkeypatch: pytest.MonkeyPatch, front: str, kept: bytes
) -> None:
    for target in running.state.replicas.targets.values():
        monkeypatch.setattr(target, "request_usage", True)
    content = delta("hello") + USAGE + DONE
    running.script(stream(content[:200], content[200:], headers={"content-length": str(len(content))}))
    before = len(running.samples)
    async with running.client(front) as client:
        response = await client.post(CHAT, content=chat(stream=True))
    assert response.content == delta("hello") + kept + DONE
    await until(lambda: len(running.samples) == before + 1)
    await running.idle()
    assert running.samples[-1]["output_tokens"] == 2
    (seen,) = [each for replica in running.replicas for each in replica.seen]
    assert json.loads(seen.body)["stream_options"] == {"include_usage": True}


def sampled(running: Rig, count: int) -> bool:
    return len(running.samples) >= count


def timed_events(count: int, gap_s: float) -> object:
    """A stream whose events carry the time at which they were written."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(count):
            await asyncio.sleep(gap_s)
            content = {"choices": [{"index": 0, "delta": {"content": "x"}}], "at": time.monotonic()}
            await response.write(event(content))
        await response.write(DONE)
        return response

    return script


@pytest.mark.parametrize("front", FRONTS)
async def test_events_are_not_batched(running: Rig, front: str) -> None:
    running.script(timed_events(40, 0.01))
    async with running.client(front) as client, client.stream("POST", CHAT, content=chat(stream=True)) as response:
        delays_ms = [
            (time.monotonic() - json.loads(line[6:])["at"]) * 1000
            async for line in response.aiter_lines()
            if line.startswith("data: {")
        ]
    assert len(delays_ms) == 40
    median, p95 = statistics.median(delays_ms), statistics.quantiles(delays_ms, n=20)[18]
    sys.stdout.write(f"{front}: an event comes after {median:.2f} ms, p95 {p95:.2f} ms\n")
    # Events that wait for the next one are 10 ms late. The fastest tenth has least of other programs' work in it.
    assert statistics.quantiles(delays_ms, n=10)[0] < 5
    await running.idle()


@pytest.mark.parametrize("front", FRONTS)
async def test_first_token_is_seen_when_the_client_sees_it(running: Rig, front: str) -> None:
    differences_ms: list[float] = []
    body = chat(stream=True)
    fields = f"host: g\r\nauthorization: Bearer {KEYS['main']}\r\ncontent-length: {len(body)}"
    head = f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n"
    address = getattr(running.fronts, front).removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(*address)
    # A late one has turns of other programs in it.
    while len(differences_ms) < 30 and min(differences_ms, default=5.0) >= 5:
        running.script(timed_events(2, 0.02))
        before = len(running.samples)
        started = time.monotonic()
        writer.write(head.encode() + body)
        await reader.readuntil(b"data: ")
        seen_s = time.monotonic() - started
        await reader.readuntil(b"0\r\n\r\n")
        await until(partial(sampled, running, before + 1))
        differences_ms.append(abs(running.samples[-1]["ttft_ms"] - seen_s * 1000))
    writer.close()
    median, least = statistics.median(differences_ms), min(differences_ms)
    sys.stdout.write(f"{front}: first tokens {median:.2f} ms apart, at least {least:.2f} ms\n")
    assert least < 5
    await running.idle()


@pytest.mark.parametrize("front", BOTH)
async def test_large_bodies_come_whole_in_both_directions(running: Rig, front: str) -> None:
    sent = chat(text="".join(f"{number:06d} " for number in range(86_000)))
    returned = bytes(number % 251 for number in range(600_000))
    running.script(answer(200, returned, {"content-type": "application/octet-stream"}))
    async with running.client(front) as client:
        response = await client.post(CHAT, content=sent)
    assert response.status_code == 200
    assert hashlib.sha256(response.content).digest() == hashlib.sha256(returned).digest()
    (seen,) = [each for replica in running.replicas for each in replica.seen]
    assert len(sent) > 600_000
    assert hashlib.sha256(seen.body).digest() == hashlib.sha256(sent).digest()
    await running.idle()


def compressed(coding: str, body: object) -> bytes:
    data = json.dumps(body).encode()
    return {"identity": lambda: data, "deflate": lambda: zlib.compress(data)}.get(
        coding, lambda: packed(body, coding)
    )()


#: By client: path, body, coding, headers, and what the engine answers.
FORMS = {
    "Codex CLI": (
        "/v1/responses",
        CODEX,
        CODEX_CODING,
        (("originator", "codex_cli_rs"),),
        b"event: response.created\n",
    ),
    "Codex CLI, resumed": ("/v1/responses", CODEX, "gzip", (("session_id", "1"),), b"event: response.created\n"),
    "Claude Code": ("/v1/messages?beta=true", CLAUDE, "gzip", CLAUDE_HEADERS, b"event: message_start\n"),
    "Claude Code, uncompressed": ("/v1/messages?beta=true", CLAUDE, "identity", CLAUDE_HEADERS, b"event: ping\n"),
    "Claude Code's count": (
        "/v1/messages/count_tokens?beta=true",
        CLAUDE,
        "gzip",
        CLAUDE_HEADERS,
        b'{"input_tokens": 4}',
    ),
    "a chat in deflate": (CHAT, json.loads(chat()), "deflate", (), b"{}"),
}


@pytest.mark.parametrize("client", FORMS)
@pytest.mark.parametrize("front", BOTH)
async def test_forms_of_today_s_clients_reach_the_engine_unpacked(running_usage: Rig, front: str, client: str) -> None:
    path, body, coding, headers, answered_with = FORMS[client]
    running_usage.script(answer(200, answered_with))
    async with running_usage.client(front) as http:
        response = await http.post(
            path, content=compressed(coding, body), headers={"content-encoding": coding, **dict(headers)}
        )
    assert (response.status_code, response.content) == (200, answered_with), response.text
    (seen,) = [each for replica in running_usage.replicas for each in replica.seen]
    assert seen.path == path
    sent = json.loads(seen.body)
    assert {name: sent[name] for name in body} == body
    assert seen.header("content-encoding") == []
    assert seen.header("content-length") in ([str(len(seen.body))], []), "or in pieces"
    assert all(seen.header(name) == [value] for name, value in headers if name.startswith("anthropic-"))
    await running_usage.idle()


async def abort_in_mid_stream(running: Rig, client: httpx.AsyncClient) -> float:
    """Leave an answer that has begun; return when."""
    async with client.stream("POST", CHAT, content=chat(stream=True)) as response:
        await anext(response.aiter_raw())
        assert running.state.routing.router.in_flight == 1
        return time.monotonic()


async def abort_before_the_reply(running: Rig, client: httpx.AsyncClient) -> float:
    """Leave while the replica has said nothing; return when."""
    request = asyncio.create_task(client.post(CHAT, content=chat(stream=True)))
    await until(lambda: any(replica.arrived.is_set() for replica in running.replicas))
    request.cancel()
    return time.monotonic()


@pytest.mark.parametrize(("abort", "content"), [(abort_in_mid_stream, [delta("a")]), (abort_before_the_reply, [])])
@pytest.mark.parametrize("front", FRONTS)
async def test_abort_of_the_client_releases_the_load(
    running: Rig, front: str, abort: Callable[[Rig, httpx.AsyncClient], Awaitable[float]], content: list[bytes]
) -> None:
    took_ms = []
    async with running.client(front) as client:
        for _ in range(5):
            running.script(hang(*content))
            left_s = await abort(running, client)
            await until(lambda: not running.state.routing.router.in_flight)
            took_ms.append((time.monotonic() - left_s) * 1000)
            await running.idle()
    sys.stdout.write(f"{front}: load released after {statistics.median(took_ms):.1f} ms, {max(took_ms):.1f} at most\n")
    # Client, picker and replicas are one process: its wait for the processor beside other programs is in some of them.
    assert statistics.median(took_ms) < 100


@pytest.mark.parametrize("front", FRONTS)
async def test_quota_is_a_429_with_retry_after(running: Rig, front: str) -> None:
    running.script(answer(200))
    async with running.client(front, key="small") as client:
        responses = [await client.post(CHAT, content=chat()) for _ in range(3)]
    refused = responses[-1]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"]
    await running.idle()


@pytest.mark.parametrize("front", FRONTS)
async def test_no_replica_is_a_503_with_retry_after(running: Rig, front: str) -> None:
    router, clock = running.state.routing.router, running.state.routing.clock
    for name in ("r0", "r1"):
        router.replicas.drain(name, now=clock())
    try:
        async with running.client(front) as client:
            refused = await client.post(CHAT, content=chat())
    finally:
        for name in ("r0", "r1"):
            router.replicas.drain(name, False, now=clock())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    await running.idle()


@pytest.mark.parametrize("front", [*FRONTS, FOUND])
async def test_client_cannot_choose_its_replica(running: Rig, front: str) -> None:
    running.script(answer(200))
    async with running.client(front) as client:
        response = await client.post(CHAT, content=chat(), headers={"x-gateway-destination-endpoint": "127.0.0.1:1"})
    assert response.status_code == 200
    await running.idle()


@pytest.mark.parametrize("front", [*FRONTS, FOUND])
async def test_answer_says_who_gave_it_by_which_policy_and_nothing_of_envoy(running: Rig, front: str) -> None:
    running.script(answer(200, headers={"x-gorgo-replica": "another"}))
    async with running.client(front) as client:
        response = await client.post(CHAT, content=chat())
    assert response.status_code == 200
    (served,) = [n for n, replica in enumerate(running.replicas) if replica.seen]
    labels = {name: value for name, value in response.headers.items() if name.startswith("x-gorgo-")}
    expected = {"replica": f"r{served}", "region": "here", "policy": "round-robin", "weights-version": "1"}
    assert labels == {f"x-gorgo-{name}": value for name, value in expected.items()}
    assert [name for name in response.headers if name.startswith("x-envoy-")] == []
    await running.idle()


@pytest.mark.parametrize("front", ["own", "found"])
async def test_answer_has_the_id_of_its_request(running: Rig, front: str) -> None:
    running.script(answer(200, headers={"x-request-id": "of the engine"}))
    async with running.client(front) as client:
        own = await client.post(CHAT, content=chat(), headers={"x-request-id": "mine-7"})
        new = await client.post(CHAT, content=chat())
        refused = await client.post(CHAT, content=b"{", headers={"x-request-id": "mine-8"})
    seen = [each.header("x-request-id") for replica in running.replicas for each in replica.seen]
    assert own.headers.get_list("x-request-id") == ["mine-7"]
    assert refused.headers.get_list("x-request-id") == ["mine-8"]
    assert sorted(seen) == sorted([["mine-7"], new.headers.get_list("x-request-id")])
    await running.idle()


@pytest.mark.parametrize("front", FRONTS)
async def test_64_streams_of_http2_in_front(running: Rig, front: str) -> None:
    running.script(stream(delta("a"), delta("b"), USAGE, DONE))
    limits = httpx.Limits(max_connections=1)
    async with running.client(front, http1=False, http2=True, limits=limits) as client:
        responses = await asyncio.gather(*(client.post(CHAT, content=chat(stream=True)) for _ in range(64)))
    assert {response.http_version for response in responses} == {"HTTP/2"}
    assert {response.content for response in responses} == {delta("a") + delta("b") + USAGE + DONE}
    await running.idle()


@pytest.mark.parametrize("failing", [reset_after(), answer(503), answer(403)], ids=["reset", "503", "403"])
async def test_retry_of_envoy_is_credited_to_the_replica_that_served(running: Rig, failing: object) -> None:
    await readmitted(running)
    first, second = running.replicas
    running.script(stream(delta("a"), USAGE, DONE))
    first.scripts = [failing]  # type: ignore[list-item]
    before = len(running.samples)
    async with running.client() as client:
        responses = [await client.post(CHAT, content=chat(stream=True)) for _ in range(2)]
    assert [response.status_code for response in responses] == [200, 200]
    assert [response.headers["x-gorgo-replica"] for response in responses] == ["r1", "r1"]
    assert len(first.seen) >= 1
    assert len(second.seen) == 2
    await running.idle()
    await until(lambda: len(running.samples) >= before + 2)
    assert {sample["replica"] for sample in running.samples[before:]} == {"r1"}


@pytest.mark.parametrize("front", [*FRONTS, FOUND])
async def test_a_client_without_the_grant_is_told_no_replica(running: Rig, front: str) -> None:
    """Neither its choice nor the engine's own header: the replica tells which prompts others have sent."""
    running.script(answer(200, headers={"x-gorgo-replica": "another"}))
    async with running.client(front, key="plain") as client:
        response = await client.post(CHAT, content=chat())
    assert response.status_code == 200
    assert {name for name in response.headers if name.startswith("x-gorgo-")} == {
        "x-gorgo-policy",
        "x-gorgo-weights-version",
    }
    await running.idle()


@pytest.mark.parametrize("status", [404, 429, 500, 503])
async def test_a_retry_of_envoy_goes_to_no_replica_that_the_picker_has_not_named(running: Rig, status: int) -> None:
    """It may be in a forbidden region, or another operator's, who would get the first one's key."""
    await readmitted(running)
    running.script(answer(status, b'{"detail": "no"}'))
    router, clock = running.state.routing.router, running.state.routing.clock
    router.replicas.drain("r1", now=clock())
    try:
        async with running.client() as client:
            responses = [await client.post(CHAT, content=chat()) for _ in range(2)]
    finally:
        router.replicas.drain("r1", False, now=clock())
    assert {response.status_code for response in responses} == {status}
    assert running.replicas[1].seen == []
    await running.idle()


async def readmitted(running: Rig) -> None:
    """Let both replicas answer until neither is ejected, nor has a failure that counts."""
    running.script(stream(delta("a"), USAGE, DONE))
    states = running.state.routing.router.view.health_states
    async with running.client() as client, asyncio.timeout(20):
        while set(states().values()) != {"healthy"} or min(len(replica.seen) for replica in running.replicas) < 2:
            assert (await client.post(CHAT, content=chat(stream=True))).status_code == 200
            await running.idle()


async def test_a_request_that_every_replica_refuses_is_tried_at_each_and_blames_none(running: Rig) -> None:
    await readmitted(running)
    running.script(answer(404, b'{"detail": "nobody knows"}'))
    async with running.client() as client:
        responses = [await client.post(CHAT, content=chat(stream=True)) for _ in range(6)]
    assert {response.status_code for response in responses} == {404}
    assert {response.content for response in responses} == {b'{"detail": "nobody knows"}'}
    tries = [len(replica.seen) for replica in running.replicas]
    assert min(tries) >= 6
    assert sum(tries) <= 18, "the price of a wrong request: two tries more"
    await running.idle()
    assert running.state.routing.router.view.health_states() == {"r0": "healthy", "r1": "healthy"}


async def test_a_replica_that_refuses_what_another_answers_is_ejected_and_costs_no_request(running: Rig) -> None:
    await readmitted(running)
    running.script(stream(delta("a"), USAGE, DONE))
    first, _ = running.replicas
    first.scripts = [answer(403)]
    async with running.client() as client:
        async with asyncio.timeout(20):
            while running.state.routing.router.view.health_states()["r0"] != "ejected":
                assert (await client.post(CHAT, content=chat(stream=True))).status_code == 200
                await running.idle()
    assert len(first.seen) == 3


def by_key(refusal: Script, refused: str) -> Script:
    """Refuse one client's key, and answer every other one."""
    served = stream(delta("a"), USAGE, DONE)

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        is_refused = request.headers.get("authorization") == f"Bearer {refused}"
        return await (refusal if is_refused else served)(request, body)

    return script


@pytest.mark.parametrize(("status", "refused"), [(401, "small"), (403, "plain")])
async def test_a_bad_key_of_one_client_that_envoy_retries_ejects_the_replica_for_nobody(
    keyless: Rig, status: int, refused: str
) -> None:
    """Of a retry of its own Envoy shows the sum alone, unless each refused try leaves its status."""
    await readmitted(keyless)
    first, _ = keyless.replicas
    keyless.script(stream(delta("a"), USAGE, DONE))
    first.scripts = [by_key(answer(status, b'{"detail": "no such key"}'), KEYS[refused])]
    states = keyless.state.routing.router.view.health_states
    async with keyless.client(key=refused) as bad, keyless.client() as good:
        assert (await good.post(CHAT, content=chat(stream=True))).status_code == 200
        await keyless.idle()
        for _ in range(8):
            assert (await bad.post(CHAT, content=chat(stream=True))).status_code == 200
            await keyless.idle()
        assert states() == {"r0": "healthy", "r1": "healthy"}
        tries = len(first.seen)
        assert tries >= 3, "its key was refused often enough to eject"
        for _ in range(4):
            assert (await bad.post(CHAT, content=chat(stream=True))).status_code == 200
            await keyless.idle()
        assert len(first.seen) - tries <= 1, "the client goes where its key is known"
        first.seen.clear()
        for _ in range(4):
            assert (await good.post(CHAT, content=chat(stream=True))).status_code == 200
            await keyless.idle()
        assert len(first.seen) >= 1, "others are still served there"


async def test_a_status_of_a_try_that_envoy_gave_up_says_why_it_did(keyless: Rig) -> None:
    """A full replica pauses, as under `gorgo serve`; it has not failed."""
    await readmitted(keyless)
    first, _ = keyless.replicas
    keyless.script(stream(delta("a"), USAGE, DONE))
    first.scripts = [answer(429, b'{"detail": "full"}')]
    async with keyless.client() as client:
        for _ in range(6):
            assert (await client.post(CHAT, content=chat(stream=True))).status_code == 200
            await keyless.idle()
    assert keyless.state.routing.router.view.health_states() == {"r0": "healthy", "r1": "healthy"}


# --- Counts of tokens that Envoy reads of answers as they pass: every dialect, however its bytes come.


GENERATE = json.dumps({"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 9}}).encode()
#: A text of a client that looks like a usage, as JSON has it within an answer.
FALSE_USAGE = delta('"usage": {"prompt_tokens": 999, "completion_tokens": 999} }')
LONG = delta("x" * 70_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_usage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with rig(tmp_path_factory.mktemp("usage")) as found:
        yield found


def meta(count: int) -> bytes:
    found = {"id": "r", "finish_reason": {"matched": "}"}, "prompt_tokens": 12, "cached_tokens": 8}
    return event({"text": "a", "meta_info": {**found, "completion_tokens": count}})


def anthropic(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + event({"type": kind, **fields})


def json_answer(usage: object, *, text: str = "a") -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": usage, "prompt_logprobs": None}).encode()


FOUND_USAGE = {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
START = anthropic("message_start", message={"usage": {"input_tokens": 4, "cache_read_input_tokens": 8}})
DELTA = anthropic("content_block_delta", delta={"type": "text_delta", "text": "a"})
STREAMS = {
    "with an event of its own": [delta("a"), USAGE, DONE],
    "byte by byte": [delta("a"), *(USAGE[at : at + 1] for at in range(len(USAGE))), DONE],
    "in one piece with a long text": [LONG + USAGE + DONE],
    "after a long text": [*([LONG] * 20), USAGE, DONE],
    "behind one that looks like it": [FALSE_USAGE, USAGE, DONE],
    "before one that looks like it": [USAGE, FALSE_USAGE, DONE],
    "before a usage that is cut off": [USAGE, b'data: {"usage": null}\n\n', DONE],
    "beside bytes that are no text": [USAGE, b": \xff\xfe\x00\n\n", DONE],
}


async def answered(running: Rig, script: object, body: bytes, path: str = CHAT) -> tuple[Any, bytes]:
    """Return the sample of a request, and what the client has got."""
    running.script(script)
    before = len(running.samples)
    async with running.client() as client:
        response = await client.post(path, content=body)
    assert response.status_code == 200
    await until(partial(has_samples, running, before + 1))
    await running.idle()
    return running.samples[-1], response.content


def has_samples(running: Rig, count: int) -> bool:
    return len(running.samples) >= count


def counts(sample: Any) -> tuple[Any, ...]:
    return sample["input_tokens"], sample["cached_tokens"], sample["output_tokens"]


@pytest.mark.parametrize("parts", STREAMS.values(), ids=STREAMS)
async def test_usage_of_a_stream(running_usage: Rig, parts: list[bytes]) -> None:
    sample, content = await answered(running_usage, stream(*parts), chat(stream=True))
    assert counts(sample) == (12, 8, 2)
    assert content == b"".join(parts)


async def test_usage_in_the_words_of_sglang(running_usage: Rig) -> None:
    sample, _ = await answered(running_usage, stream(meta(1), meta(2), DONE), GENERATE, "/generate")
    assert counts(sample) == (12, 8, 2)


@pytest.mark.parametrize("middle", [DELTA, DELTA * 200], ids=["short", "long"])
async def test_usage_in_the_words_of_anthropic_at_both_ends(running_usage: Rig, middle: bytes) -> None:
    end = anthropic("message_delta", usage={"output_tokens": 2})
    parts = [START, middle, end, anthropic("message_stop")]
    body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    sample, content = await answered(running_usage, stream(*parts), json.dumps(body).encode(), "/v1/messages")
    assert counts(sample) == (12, 8, 2)
    assert content == b"".join(parts)


@pytest.mark.parametrize("text", ["a", "x" * 300_000, '"usage": {"prompt_tokens": 999}'])
async def test_usage_of_an_answer_in_one_piece(running_usage: Rig, text: str) -> None:
    whole = json_answer(FOUND_USAGE, text=text)
    sample, content = await answered(running_usage, answer(200, whole), chat())
    assert counts(sample) == (12, 8, 2)
    assert content == whole


@pytest.mark.parametrize("is_split", [False, True], ids=["with its length", "in pieces"])
@pytest.mark.parametrize(
    ("route", "kind", "calls"),
    [
        (CHAT, "application/json", 0),
        (CHAT, "application/json; charset=utf-8", 0),
        (CHAT, "text/html", 1),
        # The next request may name this answer at once, before the log has it.
        ("/v1/responses", "application/json", 1),
    ],
)
async def test_no_call_is_made_of_an_answer_that_the_log_has(
    running_usage: Rig, monkeypatch: pytest.MonkeyPatch, route: str, kind: str, calls: int, is_split: bool
) -> None:
    made: list[str] = []

    class Counted(FirstTokenCall):
        def __init__(self, *args: Any) -> None:
            made.append(kind)
            super().__init__(*args)

    monkeypatch.setattr("gorgo.picker.call.FirstTokenCall", Counted)
    whole = json_answer(FOUND_USAGE, text="\u00e9" * 900)
    script = stream(whole[:500], whole[500:], headers={"content-type": kind}) if is_split else answer(200, whole)
    body = chat() if route == CHAT else b'{"model": "m", "input": "hello", "store": false}'
    if not is_split and kind != "application/json":
        script = answer(200, whole, {"content-type": kind})
    sample, content = await answered(running_usage, script, body, route)
    assert (len(made), content) == (calls, whole)
    assert counts(sample) == (12, 8, 2)


async def test_usage_of_a_batch_is_the_sum_of_its_answers(running_usage: Rig) -> None:
    one = {"text": "a", "meta_info": {"prompt_tokens": 6, "cached_tokens": 4, "completion_tokens": 1}}
    body = json.dumps({"text": ["hello", "hello"], "sampling_params": {"max_new_tokens": 9}}).encode()
    sample, _ = await answered(running_usage, answer(200, json.dumps([one, one]).encode()), body, "/generate")
    assert counts(sample) == (12, 8, 2)


@pytest.mark.parametrize(
    "last",
    [
        b'data: {"choices": [], "usage": {"prompt_tokens": "twelve", "completion_tokens": -1}}\n\n',
        b'data: {"choices": [], "usage": {{{{{{\n\n',
        b'data: {"choices": [], "usage": [{"prompt_tokens": 12}]}\n\n',
        b'data: {"choices": [], "usage": {"completion_tokens": 99999999999999999999999999}}\n\n',
        b'data: {"choices": [], "usage": {"\xff": "\x00',
        b'"usage":' * 4000,
        b"{" * 9000,
        b"%s%d\x00\\" * 2000,
    ],
)
async def test_a_malformed_usage_is_none_and_breaks_nothing(running_usage: Rig, last: bytes) -> None:
    sample, content = await answered(running_usage, stream(delta("a"), delta("b"), last), chat(stream=True))
    assert sample["output_tokens"] is None
    assert content == delta("a") + delta("b") + last


async def test_a_long_answer_without_a_usage_is_searched_once(running_usage: Rig) -> None:
    """A search from each place would hold all of Envoy's streams for a second."""
    text = b"x" * 30_000
    took_s = []
    for _ in range(3):
        started_s = time.monotonic()
        sample, content = await answered(running_usage, stream(delta("a"), *[text] * 4), chat(stream=True))
        took_s.append(time.monotonic() - started_s)
        assert sample["output_tokens"] is None
        assert content == delta("a") + text * 4
    # The fastest has least of other programs' work in it: 0.1 s, and 1 s where each place is searched from.
    assert min(took_s) < 0.5


async def test_an_encoded_answer_is_not_searched(running_usage: Rig) -> None:
    plain = json_answer(FOUND_USAGE, text="x" * 300_000)
    whole = gzip.compress(plain, compresslevel=0)
    script = answer(200, whole, {"content-type": "application/json", "content-encoding": "gzip"})
    sample, content = await answered(running_usage, script, chat())
    assert sample["output_tokens"] is None
    assert content == plain
