"""The health of replicas for an operator: log lines and counts for changes of the fleet, and the last probes.

Owns `HealthLog`, for a replica or a region lost or back and an engine that restarted, and `ProbeHistory`. A loss is a
warning, a recovery is not.
"""

from __future__ import annotations

import logging
from collections import deque

from gorgo.core.lru import Lru
from gorgo.core.messages.actions import FleetEvent, HealthChanged, RegionChanged, ReplicaRestarted
from gorgo.live.logs import log
from gorgo.live.telemetry.metrics import Metrics

#: Event of a state, and its level.
_HEALTH = {
    "healthy": ("replica_readmitted", logging.INFO),
    "ejected": ("replica_ejected", logging.WARNING),
    "half_open": ("replica_on_trial", logging.INFO),
}


class HealthLog:
    """Logs each fleet event and counts restarts."""

    __slots__ = ("_metrics",)

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __call__(self, event: FleetEvent) -> None:
        match event:
            case HealthChanged():
                name, level = _HEALTH[event.state]
                known = {"by": event.by, "why": event.why, "for_s": event.for_s}
                log(name, level=level, replica=event.replica, **{key: each for key, each in known.items() if each})
            case RegionChanged(reachable=True):
                log("region_reachable", region=event.region)
            case RegionChanged():
                log("region_unreachable", level=logging.WARNING, region=event.region)
            case ReplicaRestarted():
                log("replica_restarted", level=logging.WARNING, replica=event.replica)
                self._metrics.replica_restarted(event.replica, event.region)


# The last probes of each replica, for the status page. The Router stores only their average.


#: An hour of probes every 30 s.
MAX_PROBES = 120
#: More than any fleet has at once; bounds memory of a proxy whose fleet changes for months.
MAX_REPLICAS = 1024

#: Time of a probe (s since the epoch) and its round trip, s; `None` if it failed.
ProbeTime = tuple[float, float | None]


class ProbeHistory:
    """The newest probes of each replica.

    Example
    -------
    >>> probes = ProbeHistory()
    >>> probes.record("us-0", 0.002, now=10.0)
    >>> probes.record("us-0", None, now=40.0)
    >>> probes.for_replica("us-0"), probes.for_replica("unknown")
    (((10.0, 0.002), (40.0, None)), ())
    """

    def __init__(self) -> None:
        self._of = Lru[str, deque[ProbeTime]](MAX_REPLICAS)

    def record(self, replica: str, rtt_s: float | None, *, now: float) -> None:
        """Record a probe; `rtt_s` is `None` if it failed."""
        trips = self._of.use(replica)
        if trips is None:
            trips = deque(maxlen=MAX_PROBES)
            self._of.put(replica, trips)
        trips.append((now, rtt_s))

    def for_replica(self, replica: str) -> tuple[ProbeTime, ...]:
        """Return the probes of a replica, oldest first."""
        return tuple(self._of.get(replica, ()))
