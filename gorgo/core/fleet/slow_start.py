"""Slow start: a concurrency limit for a replica that has joined or was readmitted.

The limit doubles at a fixed pace, from a few requests to more than any engine runs at once, so it always ends. It never
leaves a request without a replica: where all candidates are at their limit, the limit does not count.
"""

from __future__ import annotations

from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Replica

#: First limit: two, so that one long prefill does not hide whether the replica works.
INITIAL = 2.0
#: Last limit: any engine's running batch.
FINAL = 256.0


class SlowStart:
    """Replicas in slow start.

    Parameters
    ----------
    fleet:
        The Router's.
    ramp_s:
        From `INITIAL` to `FINAL`, s; 0 is no ramp. May be replaced.
    """

    __slots__ = ("_fleet", "_since", "ramp_s")

    def __init__(self, fleet: Fleet, *, ramp_s: float) -> None:
        self._fleet = fleet
        self.ramp_s = ramp_s
        self._since: dict[Replica, float] = {}
        fleet.on_readmitted = self.begin

    def begin(self, replica: Replica, *, now: float) -> None:
        """Start the ramp of a replica."""
        if self.ramp_s > 0.0:
            self._since[replica] = now

    def allowed(self, replica: Replica, *, now: float) -> float:
        """Return the concurrency limit; infinite off the ramp."""
        since_s = self._since.get(replica)
        if since_s is None or now - since_s >= self.ramp_s:
            return float("inf")
        return float(INITIAL * (FINAL / INITIAL) ** (max(0.0, now - since_s) / self.ramp_s))

    def remaining_s(self, replica: Replica, *, now: float) -> float | None:
        """Return the time to the end of the ramp; `None` off it."""
        since_s = self._since.get(replica)
        return None if since_s is None or now - since_s >= self.ramp_s else self.ramp_s - (now - since_s)

    def exclude_full(self, eligible: CandidateSet, *, now: float) -> CandidateSet:
        """Return the candidates below their limit, or all if none is."""
        if not self._since:
            return eligible
        in_flight = self._fleet.columns.in_flight_requests
        for replica in [replica for replica, since_s in self._since.items() if now - since_s >= self.ramp_s]:
            del self._since[replica]
        full = [
            replica
            for replica in self._since
            if replica in eligible and in_flight[replica.slot] + 1 > self.allowed(replica, now=now)
        ]
        if not full or len(full) == len(eligible.replicas):
            return eligible
        return eligible.excluding_some(full, "slow_start")
