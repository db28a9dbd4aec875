"""Two attempts at once: the first content wins, the other connection is closed, nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gorgo.config.model import OverloadConfig
from gorgo.config.router_settings import replica_spec
from gorgo.core.messages.actions import Action, Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.event_loop import RouterGateway
from gorgo.live.state import LiveState
from gorgo.proxy.exchange.exchange import NextStep, Race
from gorgo.proxy.exchange.response import ClientResponse
from tests.proxy.conftest import QUIET, Running, Start, config_for, until
from tests.proxy.fakes import DONE, ROLE, FakeReplica, Script, answer, chat, delta, hang, stream

# --- Two attempts at once over real sockets: the first content wins, the other connection is closed, nothing is left.


PREDICTS = replace(QUIET, policy="gorgo-ms")
ON_BOTH_LOOPS = True
CHAT = "/v1/chat/completions"
#: A first token is late after so long, s: no test on a busy machine takes it.
LATE_S = 60.0


def words(word: str) -> Script:
    return stream(ROLE, delta(word), DONE)


async def hedging(start: Start, stuck: Script, *others: Script, **overload: Any) -> tuple[Running, FakeReplica]:
    """A proxy in front of several replicas. Answers the one that the next request goes to, which is `stuck` there; all
    others drain.
    """
    replicas = [await start.replica(words("warm")) for _ in (stuck, *others)]
    settings = {"queue_enabled": False, "hedge_budget_ratio": 0.5, **overload}
    proxy = await start.proxy(replace(config_for(replicas, PREDICTS), overload=OverloadConfig(**settings)), replicas)
    limits = proxy.state.routing.router.settings.limits
    hedging = replace(limits.hedging, delay_s=LATE_S)
    proxy.state.routing.router.settings.set_limits(replace(limits, hedging=hedging), now=proxy.state.routing.clock())
    for _ in range(4):  # the budget is of requests
        await proxy.client.post(CHAT, content=chat(stream=True))
    # The one with the prompt in its cache is the cheapest for the same prompt, if the tie-break left it any warmth.
    for number in range(1, len(replicas)):
        proxy.state.routing.router.replicas.drain(f"r{number}", now=proxy.state.routing.clock())
    await proxy.client.post(CHAT, content=chat(stream=True))
    for replica, script in zip(replicas, (stuck, *others), strict=True):
        replica.scripts[:] = [script]
        replica.seen.clear()
        replica.arrived.clear()
    return proxy, replicas[0]


async def send_to_near(proxy: Running, **fields: Any) -> asyncio.Task[Any]:
    """The request goes to r0 and is late as soon as r1 may be asked: a request is evaluated once."""
    task = asyncio.create_task(proxy.client.post(CHAT, content=chat(stream=True, **fields)))
    await until(lambda: proxy.replicas[0].arrived.is_set())
    now = proxy.state.routing.clock()
    proxy.state.routing.router.replicas.drain("r1", False, now=now)
    proxy.state.routing.gateway.apply(proxy.state.routing.router.handle_timer(now=now + 2 * LATE_S))
    return task


async def test_a_silent_replica_loses_to_a_second_one(start: Start) -> None:
    proxy, near = await hedging(start, hang(), words("second"))
    response = await (await send_to_near(proxy))
    assert "second" in response.text
    assert response.text.count("[DONE]") == 1
    assert response.headers["x-gorgo-replica"] == "r1"
    await asyncio.wait_for(near.dropped.wait(), 10)
    assert not proxy.replicas[1].dropped.is_set()
    await proxy.idle()
    *_, sample = proxy.state.routing.router.samples
    assert (sample.hedged, sample.replica, sample.status, sample.retries) == (True, "r1", 200, 0)
    metrics = (await proxy.client.get("/metrics")).text
    assert 'gorgo_hedges_total{region="here",replica="r1"} 1.0' in metrics
    assert f'result="{AttemptResult.SUPERSEDED.value}"' in metrics


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
    await until(lambda: proxy.state.routing.router.in_flight == 1)
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
    now = proxy.state.routing.clock()
    proxy.state.routing.gateway.apply(
        proxy.state.routing.router.handle_timer(now=now + 100.0)
    )  # long past any evidence
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


async def both_fail(
    start: Start, monkeypatch: pytest.MonkeyPatch, then: Callable[[Running], None]
) -> tuple[Running, httpx.Response]:
    """Two attempts fail one after the other. `then` happens in the very step in which the Router has the request go on
    to a third replica, before whoever waits for the second attempt has heard of it.
    """
    proxy, near = await hedging(start, hang(), hang(), words("third"))
    request = await send_to_near(proxy)
    far = proxy.replicas[1]
    await until(lambda: far.arrived.is_set())
    proxy.state.routing.router.replicas.drain("r2", False, now=proxy.state.routing.clock())
    near.release.set()
    await until(lambda: proxy.state.routing.router.in_flight == 1)
    finish = RouterGateway.finish

    def finished(desk: RouterGateway, dispatch: Dispatch, outcome: Outcome) -> Action | None:
        action = finish(desk, dispatch, outcome)
        if isinstance(action, Dispatch):
            then(proxy)
        return action

    monkeypatch.setattr(RouterGateway, "finish", finished)
    far.release.set()
    return proxy, await request


async def test_two_that_fail_are_followed_by_a_third_even_if_it_leaves_the_fleet_then(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reload(proxy: Running) -> None:
        state = proxy.state
        rows = state.config.replicas[:2]
        state.routing.router.replicas.set_fleet([replica_spec(row) for row in rows], now=state.routing.clock())
        state.replicas.draining_targets.add(state.replicas.targets["r2"])
        asyncio.get_running_loop().call_soon(leave, state)

    def leave(state: LiveState) -> None:
        state.replicas.targets = {name: target for name, target in state.replicas.targets.items() if name != "r2"}

    proxy, response = await both_fail(start, monkeypatch, reload)
    assert (response.status_code, response.headers["x-gorgo-replica"]) == (200, "r2")
    await proxy.idle()


async def test_a_request_that_is_cut_as_its_second_attempt_is_to_go_on_leaves_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(proxy: Running) -> None:
        """As at the end of the grace."""
        proxy.state.stopping = True
        for task in proxy.state.exchanges:
            task.cancel()

    proxy, response = await both_fail(start, monkeypatch, cut)
    assert response.status_code == 503
    await proxy.idle()
    assert proxy.replicas[2].seen == []


async def test_nobody_speaks_beside_the_last_words(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    open_attempts: list[int] = []
    cut_short = ClientResponse.abort

    async def watched(answer: ClientResponse) -> None:
        open_attempts.append(proxy.state.routing.router.in_flight)
        await cut_short(answer)

    monkeypatch.setattr(ClientResponse, "abort", watched)
    proxy, near = await hedging(start, hang(), hang(ROLE, delta("second")))
    proxy.state.limits = replace(proxy.state.limits, shutdown_grace_s=0.05)
    request = await send_to_near(proxy)
    await until(lambda: proxy.replicas[1].arrived.is_set())
    await until(lambda: near.dropped.is_set())  # it has lost, and its task waits for the answer's
    await proxy.stop()
    assert "stopping" in (await request).text
    assert open_attempts == [0]


async def test_a_plain_answer_of_a_replica_that_probes_eject_comes_from_another_one(start: Start) -> None:
    second = answer(200, b'{"choices": [], "from": "second"}')
    proxy, near = await hedging(start, hang(), second, hedge_budget_ratio=0.01)
    task = asyncio.create_task(proxy.client.post(CHAT, content=chat()))
    await until(lambda: near.arrived.is_set())
    routing = proxy.state.routing
    routing.router.replicas.drain("r1", False, now=routing.clock())
    for _ in range(3):
        routing.gateway.apply(routing.router.replicas.on_probe("r0", None, now=routing.clock()))
    response = await asyncio.wait_for(task, 10)
    assert (response.status_code, response.json()["from"]) == (200, "second")
    assert response.headers["x-gorgo-replica"] == "r1"
    await asyncio.wait_for(near.dropped.wait(), 10)
    await proxy.idle()


# --- Two attempts, one answer: who is stopped, when, and that nobody is forgotten.


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class Second:
    """A second attempt as an exchange writes it."""

    def __init__(self, race: Race) -> None:
        self.race = race
        self.said: list[str] = []

    async def run(self) -> NextStep | None:
        if "r/2" not in self.race:
            self.said.append("beaten before it began")
            return None
        self.race.track("r/2", this_task())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.said.append("stopped" if "r/2" not in self.race else "cancelled")
            this_task().uncancel()
        return None


async def begun() -> tuple[Race, Second]:
    race = Race()
    race.track("r/1", this_task())
    second = Second(race)
    race.start_second("r/2", second.run())
    return race, second


async def test_a_second_attempt_that_is_beaten_before_it_begins_still_runs_to_its_end() -> None:
    race, second = await begun()
    race.claim("r/1")
    assert await race.join() is None
    assert second.said == ["beaten before it began"]


async def test_the_answer_stops_the_other_and_is_not_stopped_itself() -> None:
    race, second = await begun()
    await asyncio.sleep(0)
    race.claim("r/1")
    race.cancel("r/1")
    assert "r/1" in race
    await race.join()
    assert second.said == ["stopped"]


async def test_there_is_one_answer() -> None:
    race, _ = await begun()
    race.claim("r/1")
    race.claim("r/1")
    with pytest.raises(AssertionError, match="two attempts claim"):
        race.claim("r/2")
    await race.join()


async def test_the_end_of_the_request_stops_whoever_is_left_even_the_answer() -> None:
    race, second = await begun()
    await asyncio.sleep(0)
    race.done("r/1")
    race.winner = "r/2"
    assert await race.end() == []
    assert second.said == ["stopped"]


async def test_the_end_waits_for_one_that_has_not_begun() -> None:
    race, second = await begun()
    race.done("r/1")
    await race.end()
    assert second.said == ["beaten before it began"]


async def test_a_fault_of_the_second_attempt_is_told() -> None:
    async def broken() -> NextStep | None:
        raise ValueError("a fault")

    race = Race()
    race.start_second("r/2", broken())
    assert [type(left) for left in await race.end()] == [ValueError]


async def test_without_a_second_attempt_nothing_is_waited_for() -> None:
    race = Race()
    race.track("r/1", this_task())
    assert await race.end() == []
