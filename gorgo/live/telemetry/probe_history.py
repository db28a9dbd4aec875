"""The last probes of each replica, for the status page. The Router stores only their average."""

from __future__ import annotations

from collections import deque

from gorgo.core.lru import Lru

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
