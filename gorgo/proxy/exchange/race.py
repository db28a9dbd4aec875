"""The open attempts of one request, at most two, and which of them is the answer.

Owns who has to stop and how. What an attempt does is `exchange`'s.

Theory of operation. The first attempt runs in the task of its exchange, so that a request without a second one pays
nothing. A second one has a task of its own. Before anything is sent to the client an attempt claims it, in one step
that also cancels the other's task: a task that was cancelled runs no further line of its own, so two never write. One
whose task has not begun is not cancelled, because then it never would begin, and nobody would give back what is
reserved for it: it finds itself beaten as its first act.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from gorgo.proxy.exchange.pending import Resolution

#: Answers what the Router wants after it, taken in the step in which it was said: who waits for it wakes later.
_HedgeTask = asyncio.Task[Resolution | None]


class Race:
    """Attempts by id."""

    __slots__ = ("_tasks", "hedge_task", "winner")

    def __init__(self) -> None:
        #: Open attempts and their tasks; none for one that has yet to begin.
        self._tasks: dict[str, asyncio.Task[object] | None] = {}
        #: Which attempt the client is sent, once that is known.
        self.winner: str | None = None
        #: The task of the second attempt, until it has been joined.
        self.hedge_task: _HedgeTask | None = None

    def __contains__(self, attempt_id: object) -> bool:
        """Open and not beaten."""
        return attempt_id in self._tasks

    def begin(self, attempt_id: str) -> None:
        """It runs in the current task."""
        self._tasks[attempt_id] = asyncio.current_task()

    def done(self, attempt_id: str) -> None:
        """It has ended, however."""
        self._tasks.pop(attempt_id, None)

    def add(self, attempt_id: str, run: Coroutine[object, object, Resolution | None]) -> None:
        """A second attempt, in a task of its own, which begins after this step."""
        assert self.hedge_task is None, "a request has two attempts at most"
        self._tasks[attempt_id] = None
        self.hedge_task = asyncio.create_task(run)

    def claim(self, attempt_id: str) -> None:
        """This one is the answer: the other has to stop."""
        assert self.winner in (None, attempt_id), "two attempts answer"
        self.winner = attempt_id
        for other in [other for other in self._tasks if other != attempt_id]:
            self._stop(other)

    def cancel(self, attempt_id: str) -> None:
        """Another one is the answer, so this one has to stop."""
        if attempt_id in self._tasks and attempt_id != self.winner:
            self._stop(attempt_id)

    async def join(self) -> Resolution | None:
        """What the Router wants after the second attempt, which is waited for."""
        assert self.hedge_task is not None, "there is a second one"
        # Not awaited itself: who waits may be cancelled, and it is to end in its own way.
        await asyncio.wait((self.hedge_task,))
        second, self.hedge_task = self.hedge_task, None
        return second.result()

    async def end(self) -> Resolution | BaseException | None:
        """The request is over: stop whoever is left. Answers what the second attempt failed by, or what the Router
        wanted after it and nobody will do.
        """
        if self.hedge_task is None:
            return None
        for attempt_id in list(self._tasks):
            self._stop(attempt_id)
        await asyncio.wait((self.hedge_task,))
        second, self.hedge_task = self.hedge_task, None
        return None if second.cancelled() else second.exception() or second.result()

    def _stop(self, attempt_id: str) -> None:
        task = self._tasks.pop(attempt_id)
        if task is not None:
            task.cancel()
