"""The share of subscriptions in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from gorgo.live.kv_events import sockets as turns
from gorgo.live.kv_events.sockets import Arrivals, Turn


class Now:
    """A clock of the module that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        monkeypatch.setattr(turns, "perf_counter", lambda: self.s)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


def stepping(now: Now, steps: list[str], name: str, times: int, lasts_s: float) -> Callable[[], bool]:
    """A step to be called so many times."""

    def step() -> bool:
        steps.append(name)
        now.s += lasts_s
        return steps.count(name) < times

    return step


async def test_a_turn_of_the_loop_has_the_steps_of_all_subscriptions_within_its_time(now: Now) -> None:
    turn, steps, by_turn = Turn(), list[str](), []
    for name in "abc":
        turn.add(stepping(now, steps, name, 2, 0.6 * turns.TURN_S))
    while len(steps) < 6:
        before = len(steps)
        await asyncio.sleep(0)
        by_turn.append("".join(steps[before:]))
    assert by_turn == ["ab", "ca", "bc"]


async def test_a_turn_with_other_work_has_no_step_until_the_longest_wait(now: Now) -> None:
    turn, steps, waited_s = Turn(), list[str](), now.s
    turn.add(stepping(now, steps, "a", 3, 0.0))
    began_s = []
    while len(steps) < 3:
        before, now.s = len(steps), now.s + 2 * turns.OTHER_WORK_S  # a request
        await asyncio.sleep(0)
        if len(steps) > before:
            began_s.append(now.s - waited_s)
            waited_s = now.s
    assert len(began_s) == 1, "one step is short, so that a turn has several"
    assert began_s == [pytest.approx(turns.MAX_WAIT_S, abs=2 * turns.OTHER_WORK_S)]


async def test_without_other_work_a_step_is_in_the_next_turn(now: Now) -> None:
    turn, steps = Turn(), list[str]()
    for _ in range(3):
        now.s += 1.0  # work before the step waits is no reason
        turn.add(stepping(now, steps, "a", 1, 0.0))
        await asyncio.sleep(0)
        assert steps.pop() == "a"


async def test_coroutines_have_a_turn_in_order_and_who_has_left_none() -> None:
    turn, order = Turn(), list[str]()

    async def subscribed(name: str) -> None:
        await turn.pause()
        order.append(name)

    tasks = {name: asyncio.create_task(subscribed(name)) for name in "abcd"}
    await asyncio.sleep(0)
    tasks["b"].cancel()
    await asyncio.wait(tasks.values())
    assert order == ["a", "c", "d"]
    assert not turn._waiting


async def test_sockets_in_use_are_looked_at_together_after_an_interval() -> None:
    loop, arrivals, looks, done = asyncio.get_running_loop(), Arrivals(), list[str](), asyncio.Event()

    def look(name: str, times: int) -> bool:
        looks.append(name)
        if len(looks) == 6:
            done.set()
        return looks.count(name) < times

    began_s = loop.time()
    for name, times in (("a", 1), ("b", 3), ("c", 2)):
        arrivals.add(partial(look, name, times))
    assert not looks
    await asyncio.wait_for(done.wait(), timeout=10)
    assert looks == ["a", "b", "c", "b", "c", "b"]
    assert loop.time() - began_s >= 2.9 * turns.MIN_GATHER_S


@pytest.mark.parametrize(("sockets", "gather_s"), [(1, 0.02), (3, 0.02), (5, 0.03), (64, 0.05)])
def test_many_sockets_are_looked_at_less_often(sockets: int, gather_s: float) -> None:
    arrivals, later = Arrivals(), list[float]()
    loop = cast(asyncio.AbstractEventLoop, SimpleNamespace(call_later=lambda delay_s, *_: later.append(delay_s)))
    arrivals._polls = [lambda: True] * sockets
    arrivals._poll_all(loop)
    assert later == [pytest.approx(gather_s)]


async def test_a_wake_waits_for_the_next_look_while_any_socket_is_in_use() -> None:
    arrivals = Arrivals()
    assert arrivals.may_wake()
    arrivals.add(lambda: False)
    assert not arrivals.may_wake()


def test_wakes_of_the_loop_are_bounded_by_a_rate(now: Now) -> None:
    arrivals = Arrivals()
    assert sum(arrivals.may_wake() for _ in range(100)) == turns.MAX_WAKES
    now.s += 5.5 / turns.WAKES_PER_S
    assert sum(arrivals.may_wake() for _ in range(100)) == 5
    now.s += 3600.0
    assert sum(arrivals.may_wake() for _ in range(100)) == turns.MAX_WAKES
