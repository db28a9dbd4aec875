"""Region outages: all replicas of a region that fail their probes together are one event.

A region is unreachable when each of its replicas failed its last probe within one window: then the path is broken, not
the engines. Waiting for three failures of each would send requests into it for minutes. So a region with several
replicas has all of them ejected at once, with one back-off, and all are tried as soon as any answers again. A region
with one replica is that replica: it is ejected by its own count, and the region is reported then.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import HealthState, Replica
from gorgo.core.messages.actions import RegionChanged


class RegionOutages:
    """Finds unreachable regions.

    Parameters
    ----------
    fleet:
        The Router's.
    window_s:
        Time within which all replicas of a region must fail, s. May be replaced.
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

    def probe_failed(self, replica: Replica, *, now: float) -> None:
        self._failed_s[replica] = now
        region = replica.spec.region
        replicas = list(self._of(region))
        if region in self._unreachable or not all(self._failed(other, now) for other in replicas):
            return
        if len(replicas) == 1 and replica.health.state is HealthState.HEALTHY:
            return
        self._unreachable.add(region)
        self._fleet.events.append(RegionChanged(region, reachable=False))
        if len(replicas) > 1:
            for other in replicas:
                other.health.region_unreachable(now=now)

    def probe_succeeded(self, replica: Replica, *, now: float) -> None:
        if not self._failed_s and not self._unreachable:
            return
        self._failed_s.pop(replica, None)
        region = replica.spec.region
        if region in self._unreachable:
            self._unreachable.discard(region)
            self._fleet.events.append(RegionChanged(region, reachable=True))
            replicas = list(self._of(region))
            for other in replicas if len(replicas) > 1 else ():
                other.health.region_reachable(now=now)

    def on_fleet_change(self) -> None:
        """Forget replicas that left and regions without a replica."""
        replicas = set(self._fleet.replicas.values())
        self._failed_s = {replica: at for replica, at in self._failed_s.items() if replica in replicas}
        left = self._unreachable - {replica.spec.region for replica in replicas}
        self._unreachable -= left
        self._fleet.events.extend(RegionChanged(region, reachable=True) for region in sorted(left))

    def _of(self, region: str) -> Iterator[Replica]:
        return (replica for replica in self._fleet.replicas.values() if replica.spec.region == region)

    def _failed(self, replica: Replica, now: float) -> bool:
        failed_s = self._failed_s.get(replica)
        return failed_s is not None and now - failed_s <= self.window_s
