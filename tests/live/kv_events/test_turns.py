"""The share of subscriptions in the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
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
    assert set(steps.values()) == {2}
    assert steps.total() == 12


async def test_the_first_message_wakes_its_subscription_at_once_and_the_next_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, arrivals = asyncio.get_running_loop(), Arrivals()
    monkeypatch.setattr(turns, "GATHER_S", 3600.0)
    first = loop.create_future()
    arrivals.add(first)
    await asyncio.wait_for(first, timeout=10)
    began_s = loop.time()
    monkeypatch.setattr(turns, "GATHER_S", 0.02)
    second, third, gone = (loop.create_future() for _ in range(3))
    gone.cancel()
    for waiter in (second, third, gone):
        arrivals.add(waiter)
    third.add_done_callback(lambda _: order.append(second.done()))
    order: list[bool] = []
    await asyncio.gather(second, third)
    assert order == [True]
    assert loop.time() - began_s >= 0.01
