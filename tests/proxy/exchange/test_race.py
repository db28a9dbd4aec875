"""Two attempts, one answer: who is stopped, when, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gorgo.proxy.exchange.exchange import NextStep, Race

ON_BOTH_LOOPS = True


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
