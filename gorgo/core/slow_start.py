"""A replica that has just come, or come back, is not given everything at once.

Owns the ramp: how many requests may be in flight there, so long after. It doubles by a fixed pace from a few to more
than any engine runs at once, so it always ends; and it never leaves a request without a replica, because where all who
are left are at their bound the bound does not count.
"""

from __future__ import annotations

from gorgo.core.eligible import Eligible
from gorgo.core.fleet import Fleet
from gorgo.core.member import Member

#: In flight on a replica that has just come: two, so that one long prefill does not hide whether it works.
FIRST = 2.0
#: In flight at the end of the ramp: any engine's running batch.
LAST = 256.0


class SlowStart:
    """Replicas on their ramp.

    Parameters
    ----------
    fleet:
        Whose counts are read.
    ramp_s:
        From `FIRST` to `LAST`, s; 0 is no ramp. May be replaced.
    """

    __slots__ = ("_fleet", "_since", "ramp_s")

    def __init__(self, fleet: Fleet, *, ramp_s: float) -> None:
        self._fleet = fleet
        self.ramp_s = ramp_s
        self._since: dict[Member, float] = {}

    def begin(self, member: Member, *, now: float) -> None:
        """It is cold, or was ill."""
        if self.ramp_s > 0.0:
            self._since[member] = now

    def allowed(self, member: Member, *, now: float) -> float:
        """Requests that may be in flight there; infinite off the ramp."""
        since_s = self._since.get(member)
        if since_s is None or now - since_s >= self.ramp_s:
            return float("inf")
        return float(FIRST * (LAST / FIRST) ** (max(0.0, now - since_s) / self.ramp_s))

    def left_s(self, member: Member, *, now: float) -> float | None:
        """Time to the end of its ramp; `None` off it."""
        since_s = self._since.get(member)
        return None if since_s is None or now - since_s >= self.ramp_s else self.ramp_s - (now - since_s)

    def eased(self, eligible: Eligible, *, now: float) -> Eligible:
        """Without those that have as many as they may, unless nobody is left."""
        if not self._since:
            return eligible
        in_flight = self._fleet.columns.in_flight_requests
        for member in [member for member, since_s in self._since.items() if now - since_s >= self.ramp_s]:
            del self._since[member]
        full = {
            member.spec.name
            for member in eligible.members
            if member in self._since and in_flight[member.slot] + 1 > self.allowed(member, now=now)
        }
        if not full or len(full) == len(eligible.members):
            return eligible
        return eligible.without(full, "slow_start")
