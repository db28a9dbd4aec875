"""Who gets which action of the Router, and when the Router is woken, in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from gorgo.core.messages.actions import (
    Action,
    Cancel,
    Dispatch,
    FleetEvent,
    HealthChanged,
    Hedge,
    Hold,
    RegionChanged,
    Reject,
)
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from gorgo.live.event_loop import EpochClock, RouterGateway, ahead_s
from tests.lab.sim.live_shell import VirtualLoop

LEFT = Outcome(AttemptResult.CLIENT_DISCONNECTED)


def dispatch(request_id: str, attempt: int = 1) -> Dispatch:
    """Only who it is for matters here."""
    return Dispatch(request_id, f"{request_id}/{attempt}", attempt, "", "", cast(Decision, None))


def reject(request_id: str) -> Reject:
    return Reject(request_id, 503, "no_replica", "no replica", None)


@dataclass
class ScriptedRouter:
    """Answers each event with the actions that a test has put there, and wants to be woken when it says."""

    own: Action | None = None
    actions: list[Action] = field(default_factory=list)
    due_s: float | None = None
    events: list[tuple[Any, ...]] = field(default_factory=list)
    fleet_events: deque[FleetEvent] = field(default_factory=deque)
    queued: int = 0
    reported: list[FleetEvent] = field(default_factory=list)

    def _happened(self, *event: Any) -> list[Action]:
        self.events.append(event)
        actions, self.actions = self.actions, []
        return actions

    def submit(self, request: str, *, now: float) -> tuple[Action | None, list[Action]]:
        return self.own, self._happened("submit", request, now)

    def abandon(self, request_id: str, *, now: float) -> list[Action]:
        return self._happened("abandon", request_id, now)

    def on_first_token(self, attempt_id: str, *, now: float) -> list[Action]:
        return self._happened("first token", attempt_id, now)

    def on_finish(self, attempt_id: str, outcome: Outcome, *, now: float) -> tuple[Action | None, list[Action]]:
        return self.own, self._happened("finish", attempt_id, outcome.result, now)

    def on_served_elsewhere(
        self, attempt_id: str, replica: str, *, now: float, refused: bool
    ) -> tuple[Action | None, list[Action]]:
        return self.own, self._happened("served elsewhere", attempt_id, replica, refused, now)

    def handle_timer(self, *, now: float) -> list[Action]:
        self.due_s = None
        return self._happened("timer", now)

    def next_timer(self) -> float | None:
        return self.due_s


@dataclass
class Exchange:
    """Notes what it is to do."""

    received: list[Action] = field(default_factory=list)

    def deliver(self, action: Action) -> None:
        self.received.append(action)


def virtually(test: Callable[[ScriptedRouter, RouterGateway], Awaitable[None]]) -> None:
    async def run() -> None:
        router = ScriptedRouter()
        gateway = RouterGateway(cast(Router, router), asyncio.get_running_loop().time, router.reported.append)
        await test(router, gateway)
        gateway.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


@dataclass
class Connections:
    """Of one replica; puts itself among the events."""

    events: list[tuple[Any, ...]]

    def refresh(self) -> None:
        self.events.append(("connections",))


def test_changed_connections_are_reported_before_each_event_that_may_dispatch() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        def events_of(event: Callable[[], object]) -> list[str]:
            router.events.clear()
            gateway.stale_connections.append(Connections(router.events))
            event()
            gateway.stale_connections.clear()
            return [name for name, *_ in router.events]

        completed, failed = Outcome(AttemptResult.COMPLETED), Outcome(AttemptResult.FAILED_BEFORE_CONTENT)
        assert events_of(lambda: gateway.submit(cast(RouteRequest, "own"))) == ["connections", "submit"]
        assert events_of(lambda: gateway.finish(dispatch("own"), failed)) == ["connections", "finish"]
        assert events_of(gateway.run_timer) == ["connections", "timer"]
        assert events_of(lambda: gateway.finish(dispatch("own"), completed)) == ["finish"]
        assert events_of(lambda: gateway.first_token("own/1", now=0.0)) == ["first token"]
        router.queued = 1
        assert events_of(lambda: gateway.finish(dispatch("own"), completed)) == ["connections", "finish"]
        assert events_of(lambda: gateway.first_token("own/1", now=0.0)) == ["connections", "first token"]

    virtually(test)


def test_submit_returns_the_action_of_the_request_and_delivers_the_others() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        other = Exchange()
        gateway.register("other", other)
        router.own, router.actions = Hold("own"), [reject("other")]
        assert gateway.submit(cast(RouteRequest, "own")) == Hold("own")
        assert other.received == [reject("other")]

    virtually(test)


def test_finish_returns_the_next_action_of_the_request_and_delivers_the_others() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        own, other = Exchange(), Exchange()
        gateway.register("own", own)
        gateway.register("other", other)
        for router.own in (dispatch("own", 2), reject("own"), None):
            router.actions = [reject("other")]
            assert gateway.finish(dispatch("own"), Outcome(AttemptResult.BUSY)) is router.own
        assert (own.received, other.received) == ([], [reject("other")] * 3)

    virtually(test)


def test_cancel_of_another_attempt_is_delivered_after_a_failure_too() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        own = Exchange()
        gateway.register("own", own)
        router.actions = [Cancel("own", "own/2")]
        assert gateway.finish(dispatch("own"), Outcome(AttemptResult.BUSY)) is None
        assert own.received == [Cancel("own", "own/2")]

    virtually(test)


def test_each_dispatch_is_observed_whoever_it_is_for() -> None:
    """By submit, by a retry, by an action for another request, and as a hedge."""

    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        observed: list[Dispatch] = []
        gateway.on_dispatch = observed.append
        gateway.register("other", Exchange())
        sent = [dispatch("own"), dispatch("own", 2), dispatch("other"), dispatch("other", 2)]
        router.own = sent[0]
        gateway.submit(cast(RouteRequest, "own"))
        router.own, router.actions = sent[1], [sent[2], Hedge("other", sent[3])]
        gateway.finish(sent[0], Outcome(AttemptResult.BUSY))
        router.own, router.actions = Hold("next"), [reject("other")]
        gateway.submit(cast(RouteRequest, "next"))
        assert observed == [sent[0], sent[2], sent[3], sent[1]]

    virtually(test)


def test_served_elsewhere_returns_the_attempt_there_and_delivers_the_others() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        other = Exchange()
        gateway.register("other", other)
        router.own, router.actions = dispatch("own", 2), [reject("other")]
        assert gateway.served_elsewhere(dispatch("own"), "b", refused=True) is router.own
        assert router.events == [("served elsewhere", "own/1", "b", True, 0.0)]
        assert other.received == [reject("other")]

    virtually(test)


@pytest.mark.parametrize("event", ["abandon", "first token", "apply", "run_timer"])
def test_actions_of_any_event_are_delivered(event: str) -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        exchange = Exchange()
        gateway.register("r", exchange)
        await asyncio.sleep(5.0)
        router.actions = [reject("r")]
        if event == "abandon":
            gateway.abandon("x")
            assert router.events == [("abandon", "x", 5.0)]
        elif event == "first token":
            gateway.first_token("x/1", now=4.5)
            assert router.events == [("first token", "x/1", 4.5)]
        elif event == "run_timer":
            gateway.run_timer()
            assert router.events == [("timer", 5.0)]
        else:
            gateway.apply([reject("r")])
        assert exchange.received == [reject("r")]

    virtually(test)


@pytest.mark.parametrize("event", ["submit", "finish", "apply"])
def test_changes_of_the_fleet_are_reported_in_order_and_once(event: str) -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        router.own = Hold("r")
        changes: list[FleetEvent] = [RegionChanged("far", reachable=False), HealthChanged("a", "ejected")]
        router.fleet_events.extend(changes)
        for _ in range(2):
            if event == "submit":
                gateway.submit(cast(RouteRequest, "r"))
            elif event == "finish":
                gateway.finish(dispatch("r"), LEFT)
            else:
                gateway.apply([])
        assert router.reported == changes

    virtually(test)


def test_id_that_is_open_already_gets_another_name_until_it_is_free() -> None:
    async def test(_: ScriptedRouter, gateway: RouterGateway) -> None:
        names = [gateway.register("r", Exchange()) for _ in range(3)]
        assert names == ["r", "r+2", "r+3"]
        gateway.unregister("r")
        assert gateway.register("r", Exchange()) == "r"
        gateway.register("r+4", Exchange())
        assert gateway.register("r", Exchange()) == "r+5"

    virtually(test)


def test_what_was_reserved_for_nobody_is_given_back() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        gateway.apply([dispatch("a"), Hedge("b", dispatch("b", 2)), reject("c"), Cancel("d", "d/1")])
        assert router.events == [("finish", "a/1", LEFT.result, 0.0), ("finish", "b/2", LEFT.result, 0.0)]

    virtually(test)


def test_what_giving_back_makes_possible_is_delivered_too() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        exchange = Exchange()
        gateway.register("r", exchange)
        router.actions = [dispatch("r")]
        gateway.apply([dispatch("nobody")])
        assert [action.request_id for action in exchange.received] == ["r"]

    virtually(test)


def woken(router: ScriptedRouter) -> list[float]:
    return [event[1] for event in router.events if event[0] == "timer"]


def test_router_is_woken_when_it_wants_to_be() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        router.due_s = 3.0
        gateway.apply([])
        await asyncio.sleep(2.9)
        assert woken(router) == []
        await asyncio.sleep(0.2)
        assert woken(router) == [3.0]
        router.due_s = 10.0
        gateway.apply([])
        await asyncio.sleep(20.0)
        assert woken(router) == [3.0, 10.0]

    virtually(test)


def test_sooner_time_stands_in_for_a_later_one_and_not_the_other_way() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        for router.due_s in (9.0, 5.0, 7.0):
            gateway.apply([])
        await asyncio.sleep(20.0)
        assert woken(router) == [5.0]

    virtually(test)


def test_time_that_is_over_is_told_in_the_next_turn_and_not_in_the_same() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        await asyncio.sleep(5.0)
        router.due_s = 1.0
        gateway.apply([])
        assert woken(router) == []
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert woken(router) == [5.0]

    virtually(test)


def test_nobody_is_woken_after_the_end() -> None:
    async def test(router: ScriptedRouter, gateway: RouterGateway) -> None:
        router.due_s = 1.0
        gateway.apply([])
        gateway.close()
        gateway.apply([])
        await asyncio.sleep(5.0)
        assert woken(router) == []

    virtually(test)


# -- the clock


def test_clock_goes_on_through_a_step_of_the_system_s_clock_and_knows_how_far_it_is_ahead() -> None:
    wall, steady = [1000.0], [50.0]
    clock = EpochClock(wall=lambda: wall[0], steady=lambda: steady[0])
    assert (clock.now(), clock.ahead_s()) == (1000.0, 0.0)
    steady[0] += 10.0
    wall[0] = 90_000.0
    assert (clock.now(), ahead_s(clock.now)) == (1010.0, 88_990.0)
    assert ahead_s(lambda: 3.0) == 0.0
