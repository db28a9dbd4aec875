"""When subscriptions have the event loop: in turns without other work, and for a bounded part of each.

Messages of many engines come one by one, and a wake of an idle process costs half as much as the events of one. So the
loop watches sockets that are quiet, up to a rate of wakes. It does not watch those in use: all of them are looked at
together after an interval.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

#: Time after which the next step waits for another turn of the event loop; most steps take as much, so that a turn has
#: one. A request takes several turns, so more time in each of them delays its first byte by as much.
TURN_S = 0.00005
#: A turn of the event loop that took longer had other work: requests go first.
OTHER_WORK_S = 0.00005
#: Longest wait for a turn without other work. A loop that is busy all the time has a tenth for events.
MAX_WAIT_S = 0.001
#: Between two looks at the sockets in use: about a step of an engine, and more of many engines, whose looks cost more
#: than the time is worth.
MIN_GATHER_S, GATHER_S_PER_SOCKET, MAX_GATHER_S = 0.02, 0.006, 0.05
#: Wakes of the loop a second, by all sockets that it watches, and at once. Between two engines of vLLM events are few,
#: and each request asks for what the one before it evicted.
WAKES_PER_S, MAX_WAKES = 100.0, 20.0


class Turn:
    """The share of the event loop that all subscriptions may use together."""

    def __init__(self) -> None:
        #: Steps in order; one of a coroutine is a future.
        self._waiting: deque[Callable[[], bool] | asyncio.Future[None]] = deque()
        self._is_due = False
        #: End of the last step or look at the loop, and since when a step waits.
        self._left_s = self._since_s = 0.0

    def add(self, step: Callable[[], bool]) -> None:
        """Call `step` in turns of the loop, until it returns false."""
        self._waiting.append(step)
        self._run_soon()

    async def pause(self) -> None:
        """Wait for a turn in which a step may begin; call it before each step."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._run_soon()
        await waiter

    def _run_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._left_s = self._since_s = perf_counter()
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Run steps, unless there was other work since the last call."""
        now = perf_counter()
        if now - self._left_s <= OTHER_WORK_S or now - self._since_s >= MAX_WAIT_S:
            self._run_steps(now + TURN_S)
            self._since_s = now = perf_counter()
        self._left_s = now
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._run)

    def _run_steps(self, end_s: float) -> None:
        while self._waiting:
            step = self._waiting.popleft()
            if isinstance(step, asyncio.Future):
                if not step.done():
                    step.set_result(None)
                    return  # its step is behind this one
            elif step():
                self._waiting.append(step)
            if perf_counter() >= end_s:
                return


class Arrivals:
    """Looks at the sockets in use, all together; bounds the wakes by all others."""

    def __init__(self) -> None:
        self._polls: list[Callable[[], bool]] = []
        self._is_due = False
        self._wakes, self._counted_s = MAX_WAKES, perf_counter()

    def may_wake(self) -> bool:
        """Count a wake of the loop; return whether the rate allows it, and nothing else is looked at anyway."""
        if self._polls:
            return False
        now = perf_counter()
        self._wakes = min(self._wakes + (now - self._counted_s) * WAKES_PER_S, MAX_WAKES)
        self._counted_s = now
        if self._wakes < 1.0:
            return False
        self._wakes -= 1.0
        return True

    def add(self, poll: Callable[[], bool]) -> None:
        """Call `poll` at an interval, until it returns false."""
        self._polls.append(poll)
        if not self._is_due:
            self._is_due = True
            self._poll_later(asyncio.get_running_loop())

    def _poll_later(self, loop: asyncio.AbstractEventLoop) -> None:
        gather_s = min(max(MIN_GATHER_S, GATHER_S_PER_SOCKET * len(self._polls)), MAX_GATHER_S)
        loop.call_later(gather_s, self._poll_all, loop)

    def _poll_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._polls = [poll for poll in self._polls if poll()]
        self._is_due = bool(self._polls)
        if self._is_due:
            self._poll_later(loop)
