"""Random faults, overload and uploads over real sockets: an answer is one replica's or an error, and nothing stays
reserved.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from gorgo.config.model import ClientsConfig, OverloadConfig
from tests.proxy.conftest import QUIET, Running, Start, config_for, until
from tests.proxy.fakes import DONE, ROLE, FakeReplica, Script, answer, chat, delta, event, hang, stream
from tests.proxy.raw import connected

# --- Random faults and departures, by seed: every answer is one replica's or an error, and nothing stays reserved.


CHAT = "/v1/chat/completions"
REQUESTS = 80
FAULTS = ("none", "none", "500", "429", "400", "reset", "reset-role", "reset-middle", "error", "close-role", "hang")


def faulty(name: str, rng: random.Random) -> Script:
    """A replica that answers with its own name in every token, or fails in a random way."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        fault = rng.choice(FAULTS)
        if fault.isdigit():
            return web.Response(status=int(fault), body=b'{"error":{"message":"no"}}')
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        assert request.transport is not None
        if fault == "reset":
            request.transport.abort()
            return response
        await response.prepare(request)
        if fault == "error":
            await response.write(event({"error": {"message": "no", "code": 500}}))
            return response
        await response.write(ROLE)
        if fault == "reset-role":
            request.transport.abort()
        if fault == "hang":
            await asyncio.get_running_loop().create_future()
        if fault in ("reset-role", "close-role"):
            return response
        for n in range(rng.randrange(1, 30)):
            await response.write(delta(f"<{name}>"))
            if fault == "reset-middle" and n == 3:
                request.transport.abort()
                return response
        await response.write(DONE)
        return response

    return script


@pytest.mark.parametrize("seed", range(4))
async def test_every_answer_is_one_replicas_or_an_error(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    fleet = await start.fleet(
        *([faulty(f"r{n}", random.Random(seed * 10 + n))] for n in range(3)),
        proxy=replace(QUIET, policy="random"),
        first_token_timeout_s=0.3,
        max_attempts=3,
        continuations=0,
    )

    async def one(number: int) -> None:
        departure = rng.choice([None, None, None, 0, 3, 40])
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, chat(stream=True), "connection: close")
            if departure is not None:
                for _ in range(departure):
                    await asyncio.sleep(0)
                client.reset()
                return
            check(await client.rest())

    await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    await until(lambda: fleet.state.routing.router.in_flight == 0)
    await fleet.idle()
    samples = list(fleet.state.routing.router.samples)
    assert len({sample.request_id for sample in samples}) == len(samples)


def check(answer: bytes) -> None:
    """Complete by the rules of HTTP, and from one replica only."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status != 200:
        # 500 is the engine's own answer, where each replica that was tried gave it.
        assert status in (400, 429, 500, 502, 503, 504)
        assert b'"error"' in body
        return
    assert body.endswith(b"0\r\n\r\n")
    named = {name for name in (b"<r0>", b"<r1>", b"<r2>") if name in body}
    assert len(named) == 1
    assert b"x-gorgo-replica: " + named.pop().strip(b"<>") in head.lower()
    assert (DONE in body) != (b"upstream_failed" in body)


# --- Holding, shedding and deadlines over real sockets.


PREDICTS = replace(QUIET, policy="gorgo-ms")
ANSWER = stream(ROLE, delta("hello"), DONE)


async def fleet(start: Start, *scripts: list[Script], **overload: Any) -> Running:
    replicas: list[FakeReplica] = [await start.replica(*script) for script in scripts]
    config = replace(
        config_for(replicas, PREDICTS), overload=OverloadConfig(**{"max_concurrency_per_replica": 1, **overload})
    )
    return await start.proxy(config, replicas)


async def begun(proxy: Running) -> asyncio.Task[httpx.Response]:
    """A request that has its first content and stays open."""
    task = asyncio.create_task(proxy.client.post(CHAT, content=chat(stream=True)))
    await until(lambda: proxy.replicas[0].arrived.is_set())
    return task


async def waiting(proxy: Running, count: int = 1, **headers: str) -> asyncio.Task[httpx.Response]:
    task = asyncio.create_task(proxy.client.post(CHAT, content=chat(stream=True), headers=headers))
    await until(lambda: proxy.state.routing.router.queued == count)
    return task


async def test_a_request_waits_at_the_proxy_and_goes_when_there_is_room(start: Start) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER])
    first = await begun(proxy)
    second = await waiting(proxy)
    assert len(proxy.replicas[0].seen) == 1
    proxy.replicas[0].release.set()
    answers = await asyncio.gather(first, second)
    assert [answer.status_code for answer in answers] == [200, 200]
    await proxy.idle()
    metrics = (await proxy.client.get("/metrics")).text
    assert "gorgo_queue_seconds_count 1.0" in metrics
    assert "gorgo_queue_requests 0.0" in metrics


async def test_a_client_that_leaves_while_it_waits_is_never_sent(start: Start) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER])
    first = await begun(proxy)
    second = await waiting(proxy)
    second.cancel()
    await until(lambda: proxy.state.routing.router.queued == 0)
    proxy.replicas[0].release.set()
    assert (await first).status_code == 200
    await proxy.idle()
    assert len(proxy.replicas[0].seen) == 1


async def test_two_requests_of_one_id_wait_side_by_side(start: Start) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER])
    first = await begun(proxy)
    same = {"x-request-id": "twice"}
    others = [await waiting(proxy, count, **same) for count in (1, 2)]
    proxy.replicas[0].release.set()
    answers = await asyncio.gather(first, *others)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert [answer.headers["x-request-id"] for answer in answers[1:]] == ["twice", "twice"]
    await proxy.idle()


async def test_one_request_too_many_is_told_when_to_come_back(start: Start) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER], queue_max_requests=1)
    first = await begun(proxy)
    second = await waiting(proxy)
    refused = await proxy.client.post(CHAT, content=chat(stream=True))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    proxy.replicas[0].release.set()
    await asyncio.gather(first, second)


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"])
async def test_a_request_whose_deadline_cannot_be_met_is_turned_away(start: Start, header: str) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER])
    first = await begun(proxy)
    refused = await proxy.client.post(CHAT, content=chat(stream=True), headers={header: "150"})
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "deadline_unreachable"
    assert int(refused.headers["retry-after"]) >= 1
    assert "gorgo_rejects_total" in (await proxy.client.get("/metrics")).text
    proxy.replicas[0].release.set()
    await first
    # Who obeys gets through.
    assert (await proxy.client.post(CHAT, content=chat(), headers={header: "150"})).status_code == 200


async def test_a_deadline_of_the_configuration_holds_where_there_is_no_header(start: Start) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER], slo_ttft_ms=150.0)
    first = await begun(proxy)
    assert (await proxy.client.post(CHAT, content=chat(stream=True))).status_code == 429
    proxy.replicas[0].release.set()
    await first


async def test_a_request_that_nobody_may_take_waits_and_is_a_503(start: Start) -> None:
    proxy = await fleet(start, [ANSWER], no_replica_wait_s=0.05)
    assert (await proxy.admin.post("/admin/replicas/r0/drain", json={"drain": True})).status_code == 200
    refused = await proxy.client.post(CHAT, content=chat())
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_replica"
    assert "retry-after" in refused.headers


async def test_a_replica_that_comes_back_gets_who_waited_for_anybody(start: Start) -> None:
    proxy = await fleet(start, [ANSWER], no_replica_wait_s=20.0)
    await proxy.admin.post("/admin/replicas/r0/drain", json={"drain": True})
    request = await waiting(proxy)
    await proxy.admin.post("/admin/replicas/r0/drain", json={"drain": False})
    assert (await request).status_code == 200


async def test_stopping_answers_those_who_wait(start: Start) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER])
    proxy.state.limits = replace(proxy.state.limits, shutdown_grace_s=0.05)
    await begun(proxy)
    second = await waiting(proxy)
    await proxy.stop()
    assert (await second).status_code == 503


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-slo-ttft-ms", "soon"),
        ("x-slo-ttft-ms", "-1"),
        ("x-slo-ttft-ms", "0"),
        ("x-slo-ttft-ms", "nan"),
        ("x-slo-ttft-ms", "1e9"),
        ("x-llm-d-slo-ttft-ms", ""),
        ("x-slo-ttft-ms", "1" * 400),
        ("x-gorgo-priority", "urgent"),
        ("x-gorgo-priority", "101"),
        ("x-gorgo-priority", "--1"),
        ("x-gorgo-priority", "1.5"),
    ],
)
async def test_a_header_that_says_nothing_is_a_400_that_says_what_was_expected(
    start: Start, header: str, value: str
) -> None:
    proxy = await fleet(start, [ANSWER])
    refused = await proxy.client.post(CHAT, content=chat(), headers={header: value})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "invalid_header"
    assert header in error["message"]
    assert proxy.replicas[0].seen == []


async def test_priorities_order_those_who_wait(start: Start) -> None:
    proxy = await fleet(start, [hang(ROLE, delta("a"), rest=(DONE,)), ANSWER])
    first = await begun(proxy)
    low = await waiting(proxy, 1, **{"x-gorgo-priority": "low", "x-request-id": "low"})
    normal = await waiting(proxy, 2, **{"x-request-id": "normal"})
    high = await waiting(proxy, 3, **{"x-gorgo-priority": "7", "x-request-id": "high"})
    proxy.replicas[0].release.set()
    await asyncio.gather(first, low, normal, high)
    order = [seen.header("x-request-id")[0] for seen in proxy.replicas[0].seen[1:]]
    assert order == ["high", "normal", "low"]
    assert all(seen.header("x-gorgo-priority") == [] for seen in proxy.replicas[0].seen)


# --- Bodies that are on their way are open requests of their client.


KEYS = "\n".join(f"{name}:{sha256(name.encode()).hexdigest()}" for name in ("team-a", "team-b"))
A, B = "authorization: Bearer team-a", {"authorization": "Bearer team-b"}


async def test_slow_bodies_of_one_key_are_bounded_and_keep_nobody_else_out(start: Start, tmp_path: Path) -> None:
    replica = await start.replica(answer(200))
    path = tmp_path / "clients.keys"
    path.write_text(KEYS)
    clients = ClientsConfig(keys_file=str(path), max_in_flight=2)
    fleet = await start.proxy(replace(config_for([replica], max_in_flight=3), clients=clients), [replica])
    body = chat()
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connected(fleet.addresses.data)) for _ in range(2)]
        for client in slow:
            await client.post(CHAT, body[:5], A, length=len(body))
        await until(lambda: len(fleet.state.routing.uploads) == 2)
        one_more = await stack.enter_async_context(connected(fleet.addresses.data))
        await one_more.post(CHAT, body[:5], A, length=len(body))
        assert b" 429 " in await one_more.head()
        assert b"client_concurrency" in await one_more.rest()
        assert (await fleet.client.post(CHAT, content=body, headers=B)).status_code == 200
        # One is completed, one leaves: both places are free again.
        slow[0].writer.write(body[5:])
        assert b" 200 " in await slow[0].head()
        slow[1].reset()
        await until(lambda: not fleet.state.exchanges)
        assert (await fleet.client.post(CHAT, content=body, headers={"x-api-key": "team-a"})).status_code == 200
    assert len(fleet.state.routing.uploads) == 0
    await fleet.idle()
