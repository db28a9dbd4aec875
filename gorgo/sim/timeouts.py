"""How long the proxy waits for the first content of an attempt, in virtual time.

Owns the one event for all attempts: they wait equally long, so the one sent first is due first.
"""

from __future__ import annotations

from collections import deque

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
