"""One timer per event loop for the timeouts of all requests, each extended by assigning a float.

Theory of operation. Nearly no timeout expires, and a timer of its own costs a request as much as reading its head. So
one timer is set to the earliest deadline. When it fires, it reads all deadlines, of which most have moved or ended, and
is set to the earliest one: about once per deadline's length.
"""

from __future__ import annotations

import asyncio
from math import inf
from time import monotonic
from types import TracebackType
from typing import Any


class ResettableTimeout:
    """Cancels a task's wait, the current one's by default, once `deadline` (monotonic s) has passed, and turns it into
    `TimeoutError`.

    Used as a context manager. A later `deadline` may just be assigned. `extend(limit_s)` may also move it nearer.
    `last` (monotonic s) bounds every `deadline`.
    """

    __slots__ = ("_cancelling", "_task", "_timer", "deadline", "expired", "last")

    def __init__(self, limit_s: float, *, last: float = inf, task: asyncio.Task[Any] | None = None) -> None:
        self.deadline = monotonic() + limit_s
        self.last = last
        self.expired = False
        self._task = task
        self._timer: _SharedTimer | None = None
        self._cancelling = 0

    @property
    def timed_out(self) -> bool:
        """Whether it expired because of `last`."""
        return self.expired and monotonic() >= self.last

    def extend(self, limit_s: float) -> None:
        """Set the deadline to `limit_s` from now."""
        self.deadline = deadline = monotonic() + limit_s
        if self._timer is not None and deadline < self._timer.due_s:
            self._timer.set(deadline)

    def __enter__(self) -> ResettableTimeout:
        if self._task is None:
            self._task = asyncio.current_task()
        assert self._task is not None, "a timeout belongs to a task"
        self._cancelling = self._task.cancelling()
        # The task knows its loop; the running one is looked up by a system call in Python 3.11.
        self._timer = timer = _timer_of(self._task.get_loop())
        timer.entered.add(self)
        due_s = self.deadline if self.deadline < self.last else self.last
        if due_s < timer.due_s:
            timer.set(due_s)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.entered.discard(self)
            self._timer = None
        if not self.expired or self._task is None:
            return
        # If the task was also cancelled by another (the client disconnected), that cancellation passes.
        if self._task.uncancel() <= self._cancelling and exc_type is asyncio.CancelledError:
            raise TimeoutError from exc

    def expire(self) -> None:
        """Cancel the task's wait."""
        self.expired = True
        assert self._task is not None, "it is entered"
        self._task.cancel()


class _SharedTimer:
    """Expires the timeouts of one event loop that are entered; `due_s` is when it looks for them next."""

    __slots__ = ("_handle", "due_s", "entered", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.entered: set[ResettableTimeout] = set()
        self.due_s = inf
        self._handle: asyncio.TimerHandle | None = None

    def set(self, due_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self.due_s = due_s
        self._handle = self.loop.call_later(max(0.0, due_s - monotonic()), self._fire)

    def _fire(self) -> None:
        self._handle, self.due_s = None, inf
        now, next_s = monotonic(), inf
        for timeout in tuple(self.entered):
            due_s = min(timeout.deadline, timeout.last)
            if due_s > now:
                next_s = min(next_s, due_s)
            else:
                self.entered.discard(timeout)
                timeout.expire()
        if next_s < inf:
            self.set(next_s)


#: Of the loop that entered a timeout last; an entered timeout has a reference of its own. A process has one loop.
_latest: _SharedTimer | None = None


def _timer_of(loop: asyncio.AbstractEventLoop) -> _SharedTimer:
    global _latest
    timer = _latest
    if timer is None or timer.loop is not loop:
        timer = _latest = _SharedTimer(loop)
    return timer
