"""When subscriptions have the event loop: all together, and for a bounded part of each turn.

Messages of many engines come one by one, and a wake of the loop costs half as much as the events of one. So messages
that come soon after others wait, and are handled with the next ones.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

#: Time after which the next step waits for another turn of the event loop; a step takes about as much.
TURN_S = 0.001
#: Least time between two wakes of subscriptions, about that between two steps of an engine.
GATHER_S = 0.02


class Turn:
    """The share of one turn of the event loop that all subscriptions may use together."""

    def __init__(self) -> None:
        #: `None` until something has been done in this turn.
        self._began_s: float | None = None

    def begin_step(self) -> bool:
        """Return whether a step may begin now: `TURN_S` of this turn is not used up."""
        now = perf_counter()
        if self._began_s is None:
            self._began_s = now
            asyncio.get_running_loop().call_soon(self._end)
        return now - self._began_s <= TURN_S

    async def pause(self) -> None:
        """Wait for a turn in which a step may begin; call it before each step."""
        while not self.begin_step():  # noqa: ASYNC110 - a turn, no event
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._began_s = None


class Arrivals:
    """Wakes the subscriptions whose sockets have messages: the first at once, later ones together after `GATHER_S`."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._is_due = False
        self._woken_s = float("-inf")

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Set the result of `waiter` when its subscription may receive."""
        self._waiting.append(waiter)
        if not self._is_due:
            self._is_due = True
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._woken_s + GATHER_S - loop.time()), self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due, self._woken_s = False, loop.time()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
