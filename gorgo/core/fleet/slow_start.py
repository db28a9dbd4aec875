"""A replica that has just come, or come back, is not given everything at once.

Owns the ramp: how many requests may be in flight there, so long after. It doubles by a fixed pace from a few to more
than any engine runs at once, so it always ends; and it never leaves a request without a replica, because where all who
are left are at their bound the bound does not count.
"""

from __future__ import annotations

from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Replica

#: In flight on a replica that has just come: two, so that one long prefill does not hide whether it works.
INITIAL = 2.0
#: In flight at the end of the ramp: any engine's running batch.
FINAL = 256.0


class SlowStart:
    """Replicas on their ramp.

    Parameters
    ----------
    fleet:
        Whose counts are read.
    ramp_s:
        From `FIRST` to `FINAL`, s; 0 is no ramp. May be replaced.
    """

    __slots__ = ("_fleet", "_since", "ramp_s")

    def __init__(self, fleet: Fleet, *, ramp_s: float) -> None:
        self._fleet = fleet
        self.ramp_s = ramp_s
        self._since: dict[Replica, float] = {}
        fleet.on_readmitted = self.begin

    def begin(self, replica: Replica, *, now: float) -> None:
        """It is cold, or was ill."""
        if self.ramp_s > 0.0:
            self._since[replica] = now

    def allowed(self, replica: Replica, *, now: float) -> float:
        """Requests that may be in flight there; infinite off the ramp."""
        since_s = self._since.get(replica)
        if since_s is None or now - since_s >= self.ramp_s:
            return float("inf")
        return float(INITIAL * (FINAL / INITIAL) ** (max(0.0, now - since_s) / self.ramp_s))

    def remaining_s(self, replica: Replica, *, now: float) -> float | None:
        """Time to the end of its ramp; `None` off it."""
        since_s = self._since.get(replica)
        return None if since_s is None or now - since_s >= self.ramp_s else self.ramp_s - (now - since_s)

    def exclude_full(self, eligible: CandidateSet, *, now: float) -> CandidateSet:
        """Without those that have as many as they may, unless nobody is left."""
        if not self._since:
            return eligible
        in_flight = self._fleet.columns.in_flight_requests
        for replica in [replica for replica, since_s in self._since.items() if now - since_s >= self.ramp_s]:
            del self._since[replica]
        full = {
            replica.spec.name
            for replica in eligible.replicas
            if replica in self._since and in_flight[replica.slot] + 1 > self.allowed(replica, now=now)
        }
        if not full or len(full) == len(eligible.replicas):
            return eligible
        return eligible.excluding(full, "slow_start")
