"""Busy replicas: a pause after each 429 or 503 of an engine, and ejection after so many without an answer.

Theory of operation. An engine that is full refuses at once, so its load falls and it looks free: without a pause it
would draw every request. The first pause is short, because a slot may be free after the next token; each further
refusal doubles it, and `Retry-After` may extend it. A burst is one fact: of requests dispatched before the end of a
pause, none counts. An answer ends the count. A pause never leaves a request without a replica: where all candidates
pause, none of the pauses counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gorgo.core.backoff import backoff_s
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.replica import Replica

#: First pause, s: some decode iterations of a full batch.
FIRST_PAUSE_S = 0.25
#: Refusals in a row, each after a pause, that eject: 8 s without one answer, where the longest prefills take less.
MOST_IN_A_ROW = 6


@dataclass(slots=True)
class BusyStreak:
    """Refusals of one replica since its last answer."""

    count: int = 0
    #: End of the pause by the count, and of the longest one, which may be by `Retry-After`.
    counted_until_s: float = float("-inf")
    until_s: float = float("-inf")


class BusyPauses:
    """Pauses of replicas whose engines are busy."""

    __slots__ = ("_last_s", "_streaks")

    def __init__(self) -> None:
        self._streaks: dict[Replica, BusyStreak] = {}
        #: End of the last pause: after it nothing is excluded.
        self._last_s = float("-inf")

    def on_busy(self, replica: Replica, *, dispatched_s: float, retry_after_s: float | None, now: float) -> None:
        """Record a 429 or 503 of the engine, and eject the replica after `MOST_IN_A_ROW`."""
        streak = self._streaks.setdefault(replica, BusyStreak())
        if dispatched_s >= streak.counted_until_s:
            streak.count += 1
            if replica.health.attempt_busy(streak.count >= MOST_IN_A_ROW, dispatched_s=dispatched_s, now=now):
                del self._streaks[replica]
                return
            streak.counted_until_s = now + backoff_s(streak.count, first_s=FIRST_PAUSE_S, longest_s=inf)
        # Bounded like a back-off: an engine may not remove itself for a day.
        wanted_s = now + min(retry_after_s or 0.0, replica.health.limits.max_s)
        streak.until_s = max(streak.until_s, streak.counted_until_s, wanted_s)
        self._last_s = max(self._last_s, streak.until_s)

    def on_answer(self, replica: Replica) -> None:
        """End the count. A pause in progress ends on time: `Retry-After` still holds."""
        if self._streaks and (streak := self._streaks.get(replica)) is not None:
            streak.count = 0

    def is_open(self, replica: Replica, *, now: float) -> bool:
        """Return whether the replica is in no pause."""
        streak = self._streaks.get(replica)
        return streak is None or now >= streak.until_s

    def remaining_s(self, replica: Replica, *, now: float) -> float | None:
        """Return the time to the end of the pause; `None` outside."""
        streak = self._streaks.get(replica)
        return None if streak is None or now >= streak.until_s else streak.until_s - now

    def exclude_paused(self, eligible: CandidateSet, *, now: float) -> CandidateSet:
        """Return the candidates outside a pause, or all if none is."""
        if now >= self._last_s:
            return eligible
        paused = [replica for replica, streak in self._streaks.items() if now < streak.until_s and replica in eligible]
        if not paused or len(paused) == len(eligible.replicas):
            return eligible
        return eligible.excluding_some(paused, "busy")

    def on_fleet_change(self) -> None:
        """Forget replicas that left."""
        self._streaks = {replica: streak for replica, streak in self._streaks.items() if replica.slot >= 0}
