"""Two attempts at once over real sockets: the first content wins, the other connection is closed, nothing is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gorgo.config.model import Overload
from gorgo.core.request import Ending
from tests.proxy.conftest import QUIET, Running, Start, config_for, until
from tests.proxy.fakes import DONE, ROLE, FakeReplica, Script, answer, chat, delta, hang, stream

PREDICTS = replace(QUIET, policy="gorgo-ms")
ON_BOTH_LOOPS = True
CHAT = "/v1/chat/completions"


def words(word: str) -> Script:
    return stream(ROLE, delta(word), DONE)


async def hedging(start: Start, stuck: Script, other: Script, **overload: Any) -> tuple[Running, FakeReplica]:
    """A proxy in front of two replicas. Answers the one that the next request goes to, which is `stuck` there."""
    replicas = [await start.replica(words("warm")), await start.replica(words("warm"))]
    settings = {"hold": False, "hedge_share": 0.5, "hedge_late_ms": 30.0, **overload}
    proxy = await start.proxy(replace(config_for(replicas, PREDICTS), overload=Overload(**settings)), replicas)
    for _ in range(4):  # the budget is of requests
        await proxy.client.post(CHAT, content=chat(stream=True))
    # The one with the prompt in its cache is the cheapest for the same prompt, if the tie-break left it any warmth.
    proxy.state.router.drain("r1", now=proxy.state.clock())
    await proxy.client.post(CHAT, content=chat(stream=True))
    near, far = replicas
    near.scripts[:], far.scripts[:] = [stuck], [other]
    for replica in replicas:
        replica.seen.clear()
        replica.arrived.clear()
    return proxy, near


async def send_to_near(proxy: Running, **fields: Any) -> asyncio.Task[Any]:
    """The request goes to r0, and r1 may be asked from then on."""
    task = asyncio.create_task(proxy.client.post(CHAT, content=chat(stream=True, **fields)))
    await until(lambda: proxy.replicas[0].arrived.is_set())
    proxy.state.router.drain("r1", False, now=proxy.state.clock())
    return task


async def test_a_silent_replica_loses_to_a_second_one(start: Start) -> None:
    proxy, near = await hedging(start, hang(), words("second"))
    response = await (await send_to_near(proxy))
    assert "second" in response.text
    assert response.text.count("[DONE]") == 1
    assert response.headers["x-gorgo-replica"] == "r1"
    await asyncio.wait_for(near.dropped.wait(), 10)
    await until(lambda: near.aborted)
    assert near.aborted == near.seen[0].header("x-override-rid")
    assert proxy.replicas[1].aborted == []
    await proxy.idle()
    *_, sample = proxy.state.router.samples
    assert (sample.hedged, sample.replica, sample.status, sample.retries) == (True, "r1", 200, 0)
    metrics = (await proxy.client.get("/metrics")).text
    assert 'gorgo_hedges_total{region="here",replica="r1"} 1.0' in metrics
    assert f'ending="{Ending.SUPERSEDED.value}"' in metrics


async def test_the_first_replica_may_still_win(start: Start) -> None:
    proxy, near = await hedging(start, hang(rest=(ROLE, delta("first"), DONE)), hang())
    request = await send_to_near(proxy)
    far = proxy.replicas[1]
    await until(lambda: far.arrived.is_set())
    near.release.set()
    response = await request
    assert "first" in response.text
    assert response.headers["x-gorgo-replica"] == "r0"
    await asyncio.wait_for(far.dropped.wait(), 10)
    await proxy.idle()


async def test_a_failing_second_one_leaves_the_first_alone(start: Start) -> None:
    proxy, near = await hedging(start, hang(rest=(ROLE, delta("first"), DONE)), answer(500, b"no"))
    request = await send_to_near(proxy)
    await until(lambda: proxy.replicas[1].arrived.is_set())
    near.release.set()
    response = await request
    assert (response.status_code, "first" in response.text) == (200, True)
    await proxy.idle()


async def test_a_failing_first_one_waits_for_the_second(start: Start) -> None:
    proxy, near = await hedging(start, hang(), hang(rest=(ROLE, delta("second"), DONE)))
    request = await send_to_near(proxy)
    far = proxy.replicas[1]
    await until(lambda: far.arrived.is_set())
    near.release.set()  # it ends without any content
    await until(lambda: proxy.state.router.in_flight == 1)
    far.release.set()
    response = await request
    assert (response.status_code, "second" in response.text) == (200, True)
    await proxy.idle()


async def test_a_refusal_of_the_second_one_is_the_answer_if_it_comes_first(start: Start) -> None:
    proxy, near = await hedging(start, hang(), answer(400, b'{"error": {"message": "no"}}'))
    response = await (await send_to_near(proxy))
    assert response.status_code == 400
    await asyncio.wait_for(near.dropped.wait(), 10)
    await proxy.idle()


async def test_a_client_that_leaves_ends_both(start: Start) -> None:
    proxy, near = await hedging(start, hang(), hang())
    request = await send_to_near(proxy)
    far = proxy.replicas[1]
    await until(lambda: far.arrived.is_set())
    request.cancel()
    await asyncio.wait_for(near.dropped.wait(), 10)
    await asyncio.wait_for(far.dropped.wait(), 10)
    await proxy.idle()


@pytest.mark.parametrize("fields", [{"store": True}])
async def test_what_is_kept_at_the_replica_is_not_asked_twice(start: Start, fields: dict[str, Any]) -> None:
    proxy, near = await hedging(start, hang(rest=(ROLE, delta("first"), DONE)), words("second"))
    request = await send_to_near(proxy, **fields)
    now = proxy.state.clock()
    proxy.state.desk.told(proxy.state.router.handle_timer(now=now + 100.0))  # long past any evidence
    near.release.set()
    assert "first" in (await request).text
    assert proxy.replicas[1].seen == []
    await proxy.idle()


async def test_stopping_ends_both(start: Start) -> None:
    proxy, _ = await hedging(start, hang(), hang())
    proxy.state.limits = replace(proxy.state.limits, shutdown_grace_s=0.05)
    request = await send_to_near(proxy)
    await until(lambda: proxy.replicas[1].arrived.is_set())
    await proxy.stop()
    assert (await request).status_code == 503
    proxy.check()
