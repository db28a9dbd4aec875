"""The share of subscriptions in the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from itertools import count

import pytest

from gorgo.live.kv_events import turns
from gorgo.live.kv_events.turns import Arrivals, Turn


async def test_a_turn_of_the_loop_has_the_steps_of_all_subscriptions_within_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(turns, "perf_counter", lambda: now)
    numbers, turn, steps = count(), Turn(), Counter[int]()

    async def subscribed() -> None:
        nonlocal now
        for _ in range(3):
            await turn.pause()
            now += 0.6 * turns.TURN_S
            steps[current] += 1

    tasks = [asyncio.create_task(subscribed()) for _ in range(4)]
    while not all(task.done() for task in tasks):
        current = next(numbers)
        await asyncio.sleep(0)
    assert list(steps.values()) == [2] + 10 * [1]


async def test_who_waits_for_a_turn_has_one_in_order_and_who_has_left_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", -1.0)
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


async def test_the_first_message_is_looked_for_at_once_and_the_next_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, arrivals = asyncio.get_running_loop(), Arrivals()
    looks: list[str] = []
    looked = asyncio.Event()

    def look(name: str, times: int) -> bool:
        looks.append(name)
        looked.set()
        return looks.count(name) < times

    monkeypatch.setattr(arrivals, "_gather_s", 3600.0)
    arrivals.add(partial(look, "first", 1))
    await asyncio.wait_for(looked.wait(), timeout=10)
    began_s = loop.time()
    arrivals.add(partial(look, "second", 3))
    arrivals.add(partial(look, "third", 2))
    while len(looks) < 6:
        looked.clear()
        await asyncio.wait_for(looked.wait(), timeout=10)
    assert looks == ["first", "second", "third", "second", "third", "second"]
    assert loop.time() - began_s >= 0.05


@pytest.mark.parametrize(("sockets", "gather_s"), [(1, 0.02), (3, 0.02), (5, 0.03), (64, 0.05)])
async def test_many_sockets_are_looked_at_less_often(sockets: int, gather_s: float) -> None:
    arrivals = Arrivals()
    looked = asyncio.Event()

    def look() -> bool:
        looked.set()
        return False

    for _ in range(sockets):
        arrivals.add(look)
    await asyncio.wait_for(looked.wait(), timeout=10)
    assert arrivals._gather_s == pytest.approx(gather_s)
