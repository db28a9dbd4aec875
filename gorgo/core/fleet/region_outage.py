"""A region that is cut off is one event, not one per replica.

Owns which regions are cut off. A region is when each of its replicas failed its last probe within one window: then the
way there is broken, not the engines. Waiting for three failures of each would send requests into it for minutes, so
where it has several replicas all are ejected at once, with one back-off, and all may be tried as soon as any of them
answers again. A region with a single replica cannot be told from that replica: it is ejected by its own count,
and then named here.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.outlier import HealthState
from gorgo.core.fleet.replica import Replica


class RegionOutages:
    """Which regions are cut off.

    Parameters
    ----------
    fleet:
        Whose members are looked at.
    window_s:
        Within which all of a region must have failed, s. May be replaced.
    """

    __slots__ = ("_failed_s", "_fleet", "_unreachable", "window_s")

    def __init__(self, fleet: Fleet, *, window_s: float) -> None:
        self._fleet = fleet
        self.window_s = window_s
        self._failed_s: dict[Replica, float] = {}
        self._unreachable: set[str] = set()

    @property
    def unreachable(self) -> frozenset[str]:
        return frozenset(self._unreachable)

    def probe_failed(self, member: Replica, *, now: float) -> None:
        self._failed_s[member] = now
        region = member.spec.region
        members = list(self._of(region))
        if region in self._unreachable or not all(self._failed(other, now) for other in members):
            return
        if len(members) == 1 and member.health.state is HealthState.HEALTHY:
            return
        self._unreachable.add(region)
        if len(members) > 1:
            for other in members:
                self._fleet.invalidate(other.health.region_unreachable(now=now))

    def probe_succeeded(self, member: Replica, *, now: float) -> None:
        if not self._failed_s and not self._unreachable:
            return
        self._failed_s.pop(member, None)
        region = member.spec.region
        if region in self._unreachable:
            self._unreachable.discard(region)
            members = list(self._of(region))
            for other in members if len(members) > 1 else ():
                self._fleet.invalidate(other.health.region_reachable(now=now))

    def on_fleet_change(self) -> None:
        """The fleet is another one: whoever left is forgotten, and so are regions without a replica."""
        members = set(self._fleet.replicas.values())
        self._failed_s = {member: at for member, at in self._failed_s.items() if member in members}
        self._unreachable &= {member.spec.region for member in members}

    def _of(self, region: str) -> Iterator[Replica]:
        return (member for member in self._fleet.replicas.values() if member.spec.region == region)

    def _failed(self, member: Replica, now: float) -> bool:
        failed_s = self._failed_s.get(member)
        return failed_s is not None and now - failed_s <= self.window_s
