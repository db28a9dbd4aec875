"""Times at which the proxy acts by itself: the Router's own, and time-outs of attempts without content.

Owns their events. One is for all time-outs: attempts wait equally long, so the one sent first is due first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from gorgo.config.constants import FIRST_TOKEN_TIMEOUT_S
from gorgo.sim.engine.driver import SimAttempt
from gorgo.sim.event_queue import EventQueue
from gorgo.sim.remote_replica import RemoteReplica


class FirstTokenTimeouts:
    """Time-outs of attempts without a first token."""

    def __init__(self, kernel: EventQueue) -> None:
        self._kernel = kernel
        #: In the order of their times; those that have ended go when they are first, so it holds what was sent in the
        #: last two minutes at most.
        self._waiting: deque[tuple[float, SimAttempt, RemoteReplica]] = deque()

    def watch(self, sending: SimAttempt, site: RemoteReplica) -> None:
        """An attempt is sent to `site` now."""
        due_s = self._kernel.now + FIRST_TOKEN_TIMEOUT_S
        self._waiting.append((due_s, sending, site))
        if len(self._waiting) == 1:
            self._kernel.at(due_s, self._check)

    def _check(self) -> None:
        waiting, now = self._waiting, self._kernel.now
        late: list[tuple[SimAttempt, RemoteReplica]] = []
        while waiting and (_is_settled(waiting[0][1]) or waiting[0][0] <= now):
            _, sending, site = waiting.popleft()
            if not _is_settled(sending):
                late.append((sending, site))
        if waiting:
            self._kernel.at(waiting[0][0], self._check)
        for sending, site in late:
            site.time_out(sending)


def _is_settled(sending: SimAttempt) -> bool:
    return sending.done or sending.has_first_token


class RouterTimer:
    """Wakes the Router at its next time.

    Parameters
    ----------
    kernel:
        The event queue.
    next_s:
        Returns when it is to be woken, `None`: not at all. Any event can change it.
    wake:
        Called then.
    """

    def __init__(self, kernel: EventQueue, next_s: Callable[[], float | None], wake: Callable[[], None]) -> None:
        self._kernel = kernel
        self._next_s = next_s
        self._wake = wake
        self._due_s: float | None = None

    def arm(self) -> None:
        """Schedule the next time; called after every event that can bring it forward."""
        due_s = self._next_s()
        if due_s is not None and (self._due_s is None or due_s < self._due_s):
            self._due_s = due_s
            self._kernel.at(max(due_s, self._kernel.now), partial(self._expire, due_s))

    def _expire(self, due_s: float) -> None:
        if due_s == self._due_s:  # Else it was to be woken earlier, and was.
            self._due_s = None
            self._wake()
