"""When subscriptions have the event loop: all together, and for a bounded part of each turn.

Messages of many engines come one by one, and a wake of the loop costs half as much as the events of one. So the loop
does not watch sockets that are in use: it looks at all of them after an interval, and handles what has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter

#: Time after which the next step waits for another turn of the event loop; a step takes about as much.
TURN_S = 0.001
#: Between two looks at the sockets, about the time between two steps of an engine.
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
    """Looks at sockets that have had messages: at the first one at once, later at all together, `GATHER_S` apart."""

    def __init__(self) -> None:
        self._looks: list[Callable[[], bool]] = []
        self._is_due = False
        self._looked_s = float("-inf")

    def add(self, look: Callable[[], bool]) -> None:
        """Call `look` until it returns false."""
        self._looks.append(look)
        if not self._is_due:
            loop = asyncio.get_running_loop()
            self._is_due = True
            loop.call_later(max(0.0, self._looked_s + GATHER_S - loop.time()), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due, self._looked_s = False, loop.time()
        looks, self._looks = self._looks, []
        for look in looks:
            if look():
                self.add(look)
