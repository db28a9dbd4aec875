"""One timer per request, extended by assigning a float, instead of a timer per chunk."""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from types import TracebackType
from typing import Any


class ResettableTimeout:
    """Cancels a task's wait, the current one's by default, once `deadline` (monotonic s) has passed, and turns it into
    `TimeoutError`.

    Used as a context manager. A later `deadline` may just be assigned: the timer reads it when it fires, and re-arms
    itself for the rest. `extend(limit_s)` may also move it nearer. `last` (monotonic s) bounds every `deadline`.
    """

    __slots__ = ("_armed_for", "_cancelling", "_handle", "_task", "deadline", "expired", "last")

    def __init__(self, limit_s: float, *, last: float = inf, task: asyncio.Task[Any] | None = None) -> None:
        self.deadline = monotonic() + limit_s
        self.last = last
        self.expired = False
        self._task = task
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for = min(self.deadline, last)
        self._cancelling = 0

    @property
    def timed_out(self) -> bool:
        """Whether it expired because of `last`."""
        return self.expired and monotonic() >= self.last

    def extend(self, limit_s: float) -> None:
        """Set the deadline to `limit_s` from now."""
        self.deadline = monotonic() + limit_s
        if self._handle is not None and self.deadline < self._armed_for:
            self._handle.cancel()
            self._arm()

    def __enter__(self) -> ResettableTimeout:
        if self._task is None:
            self._task = asyncio.current_task()
        assert self._task is not None, "a timeout belongs to a task"
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
        # If the task was also cancelled by another (the client disconnected), that cancellation passes.
        if self._task.uncancel() <= self._cancelling and exc_type is asyncio.CancelledError:
            raise TimeoutError from exc

    def _arm(self) -> None:
        self._armed_for = min(self.deadline, self.last)
        wait_s = max(0.0, self._armed_for - monotonic())
        assert self._task is not None, "it is entered"
        # The task knows its loop; the running one is looked up by a system call in Python 3.11.
        self._handle = self._task.get_loop().call_later(wait_s, self._check)

    def _check(self) -> None:
        if monotonic() < min(self.deadline, self.last):
            self._arm()
            return
        self.expired = True
        assert self._task is not None
        self._task.cancel()
