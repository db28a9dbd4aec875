"""Holding, shedding and deadlines over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gorgo.config.model import OverloadConfig
from tests.proxy.conftest import QUIET, Running, Start, config_for, until
from tests.proxy.fakes import DONE, ROLE, FakeReplica, Script, chat, delta, hang, stream

PREDICTS = replace(QUIET, policy="gorgo-ms")
ANSWER = stream(ROLE, delta("hello"), DONE)
CHAT = "/v1/chat/completions"


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
