"""What passes between a request and its attempts: leases, the wait of a queued request, the race of two attempts.

Owns the hand-over from the event that decides to the task that waits: a decision is not lost if the client disconnects
in between. Owns which of the open attempts, at most two, the client is sent, and how the other one has to stop. Leaves
an attempt's work to `exchange`.

Theory of operation. The first attempt runs in the task of its exchange, so that a request without a hedge pays nothing.
A hedge has a task of its own. Before anything is sent to the client an attempt claims it, in one step that also cancels
the other's task. A cancelled task runs no further line of its own, so two attempts never write. A task that has not
begun is not cancelled: it would then never begin, nor release its reservation. Its first act is to check that it is
open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import field
from typing import Any

from gorgo.core.messages.actions import Dispatch, Forward, Reject
from gorgo.core.record import mutable_record
from gorgo.live.upstream.target import Target


@mutable_record
class Lease:
    """A dispatch, and the replica's process at that moment, in use until the end of the attempt.

    Made in the step of the dispatch: a reload may replace the process afterwards.
    """

    dispatch: Dispatch
    target: Target
    #: The metrics have the attempt.
    counted: bool = False


#: The next step of a request.
NextStep = Lease | Reject | Forward


class PendingDispatch:
    """One wait, which began at `enqueued_s`."""

    __slots__ = ("_resolved", "enqueued_s")

    def __init__(self, enqueued_s: float) -> None:
        self.enqueued_s = enqueued_s
        self._resolved: asyncio.Future[NextStep] = asyncio.get_running_loop().create_future()

    async def wait(self) -> NextStep:
        return await self._resolved

    def resolve(self, step: NextStep) -> bool:
        """End the wait. Return False if it was cancelled."""
        if self._resolved.done():
            return False
        self._resolved.set_result(step)
        return True

    def unclaimed(self) -> NextStep | None:
        """Return the step that a cancelled wait did not take; None if it was not resolved."""
        return self._resolved.result() if self._resolved.done() and not self._resolved.cancelled() else None


_HedgeTask = asyncio.Task[NextStep | None]


@mutable_record
class Race:
    """Attempts by id."""

    #: Open attempts and their tasks; None for one that has yet to begin.
    _tasks: dict[str, asyncio.Task[Any] | None] = field(default_factory=dict)
    #: The attempt that the client is sent, once known.
    winner: str | None = None
    #: The task of the hedge, until it has been joined.
    hedge_task: _HedgeTask | None = None

    def __contains__(self, attempt_id: object) -> bool:
        """Whether the attempt is open and not stopped."""
        return attempt_id in self._tasks

    def track(self, attempt_id: str, task: asyncio.Task[Any]) -> None:
        """Record that the attempt runs in `task`."""
        self._tasks[attempt_id] = task

    def done(self, attempt_id: str) -> None:
        """Record the end of an attempt."""
        self._tasks.pop(attempt_id, None)

    def start_hedge(self, attempt_id: str, run: Coroutine[object, object, NextStep | None]) -> None:
        """Start a second attempt in a task of its own, which begins after this step."""
        assert self.hedge_task is None, "a request has two attempts at most"
        self._tasks[attempt_id] = None
        self.hedge_task = asyncio.create_task(run)

    def claim(self, attempt_id: str) -> None:
        """Make this attempt the winner, and stop the other."""
        assert self.winner in (None, attempt_id), "two attempts claim the response"
        self.winner = attempt_id
        for other in [other for other in self._tasks if other != attempt_id]:
            self._stop(other)

    def cancel(self, attempt_id: str) -> None:
        """Stop an attempt because another is the winner."""
        if attempt_id in self._tasks and attempt_id != self.winner:
            self._stop(attempt_id)

    async def join(self) -> NextStep | None:
        """Wait for the hedge; return its next step."""
        hedge = await self._wait_for_hedge()
        return hedge.result()

    async def end(self) -> NextStep | BaseException | None:
        """Stop all attempts at the end of the request. Return the hedge's failure, or its next step, never taken."""
        if self.hedge_task is None:
            return None
        for attempt_id in list(self._tasks):
            self._stop(attempt_id)
        hedge = await self._wait_for_hedge()
        return None if hedge.cancelled() else hedge.exception() or hedge.result()

    async def _wait_for_hedge(self) -> _HedgeTask:
        assert self.hedge_task is not None, "there is a hedge"
        # Not awaited itself: a cancelled wait would cancel it too.
        await asyncio.wait((self.hedge_task,))
        hedge, self.hedge_task = self.hedge_task, None
        return hedge

    def _stop(self, attempt_id: str) -> None:
        task = self._tasks.pop(attempt_id)
        if task is not None:
            task.cancel()
