"""One timer per request that costs a float assignment to push back, instead of a timer per chunk.

Owns the conversion of an expiry into `TimeoutError`; leaves to its user what a late chunk means.
"""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from types import TracebackType


class ResettableTimeout:
    """Cancels the current task's wait once `deadline` (monotonic s) has passed, and turns that into `TimeoutError`.

    Used as a context manager. Who moves `deadline` later may just assign it: the timer looks at it when it fires, and
    re-arms itself for what is left. `push(limit_s)` may also move it nearer. `last` (monotonic s) is the end, wherever
    `deadline` is moved to.
    """

    __slots__ = ("_armed_for", "_cancelling", "_handle", "_task", "deadline", "expired", "last")

    def __init__(self, limit_s: float, *, last: float = inf) -> None:
        self.deadline = monotonic() + limit_s
        self.last = last
        self.expired = False
        self._task: asyncio.Task[object] | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for = min(self.deadline, last)
        self._cancelling = 0

    @property
    def timed_out(self) -> bool:
        """It has expired, and no later deadline would have helped."""
        return self.expired and monotonic() >= self.last

    def extend(self, limit_s: float) -> None:
        """From now on, `limit_s` more."""
        self.deadline = monotonic() + limit_s
        if self._handle is not None and self.deadline < self._armed_for:
            self._handle.cancel()
            self._arm()

    def __enter__(self) -> ResettableTimeout:
        self._task = asyncio.current_task()
        assert self._task is not None, "a watchdog guards a task"
        self._cancelling = self._task.cancelling()
        self._arm()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if not self.expired or self._task is None:
            return
        # Someone else may have cancelled too (the client left): then theirs is the one that counts.
        if self._task.uncancel() <= self._cancelling and exc_type is asyncio.CancelledError:
            raise TimeoutError from exc

    def _arm(self) -> None:
        self._armed_for = min(self.deadline, self.last)
        wait_s = max(0.0, self._armed_for - monotonic())
        self._handle = asyncio.get_running_loop().call_later(wait_s, self._check)

    def _check(self) -> None:
        if monotonic() < min(self.deadline, self.last):
            self._arm()
            return
        self.expired = True
        assert self._task is not None
        self._task.cancel()
