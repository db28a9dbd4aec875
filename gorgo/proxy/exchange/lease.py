"""A dispatch with its replica in use, and the wait of a queued request for one.

Owns the hand-over from the event that decides to the task that waits: a decision is not lost if the client disconnects
in between.
"""

from __future__ import annotations

import asyncio

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
