"""Replicas whose answers are short in a row while those of others are not: they get a trial at times.

Where a gateway carries the bytes, a short answer cannot be withheld and tried elsewhere: nothing is proven, and nobody
is ejected. The next requests go to others. A longer answer to a request after the first short one ends it. Off while
more than half of the replicas are doubtful: then the requests are like that.
"""

from __future__ import annotations

from gorgo.core.backoff import backoff_s
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.replica import SUSPECT_AFTER, Replica

#: From a short answer to the next trial, s; doubled by each trial.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0


class ShortAnswers:
    """Doubtful replicas, and their pauses."""

    __slots__ = ("_paused", "_short")

    def __init__(self) -> None:
        #: Doubtful ones, after short answers in a row: single ones come from every replica.
        self._short: set[Replica] = set()
        #: End of the pause, and the trials so far.
        self._paused: dict[Replica, tuple[float, int]] = {}

    def on_short(self, replica: Replica, *, doubtful: bool, now: float) -> None:
        """Record a short answer, of a replica that was `doubtful` at its dispatch."""
        if replica.slot < 0:
            return
        if replica.short_answers >= SUSPECT_AFTER:
            self._short.add(replica)
        until_s, trials = self._paused.get(replica, (now, 0))
        if doubtful and until_s <= now:
            pause_s = backoff_s(trials + 1, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            self._paused[replica] = now + pause_s, trials + 1

    def on_longer(self, replica: Replica) -> None:
        """Record an answer of more than a token."""
        if self._short:
            self._short.discard(replica)
            self._paused.pop(replica, None)

    def exclude_paused(self, eligible: CandidateSet, *, now: float) -> CandidateSet:
        """Return the candidates without those that pause, or all if most answer like them."""
        if not self._paused or 2 * len(self._short) > len(eligible.replicas):
            return eligible
        paused = [replica for replica, (until_s, _) in self._paused.items() if now < until_s and replica in eligible]
        return eligible.excluding_some(paused, "answers shortly") if paused else eligible

    def on_fleet_change(self) -> None:
        """Forget replicas that left."""
        for replica in [each for each in self._short if each.slot < 0]:
            self.on_longer(replica)
