"""A request that waits at the proxy, and the one word that ends its wait.

Owns the hand-over between the event that decides and the task that waits: what is told is never lost, even if the
client leaves in between.
"""

from __future__ import annotations

import asyncio

from gorgo.core.messages.actions import Action
from gorgo.proxy.upstream.target import Target

#: What the Router decided, and the replica's process of that moment, already in use.
Resolution = tuple[Action, Target | None]


class PendingDispatch:
    """One wait.

    Parameters
    ----------
    since_s:
        When it began.
    """

    __slots__ = ("enqueued_s", "told")

    def __init__(self, since_s: float) -> None:
        self.enqueued_s = since_s
        self.told: asyncio.Future[Resolution] = asyncio.get_running_loop().create_future()

    def resolve(self, action: Action, target: Target | None) -> bool:
        """End the wait. False if nobody waits any more."""
        if self.told.done():
            return False
        self.told.set_result((action, target))
        return True

    def unclaimed(self) -> Resolution | None:
        """What was told to someone who was cancelled before they could act on it."""
        return self.told.result() if self.told.done() and not self.told.cancelled() else None
