"""The last probes of each replica, for the status page. The Router stores only their average."""

from __future__ import annotations

from collections import OrderedDict, deque

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
        self._of: OrderedDict[str, deque[ProbeTime]] = OrderedDict()

    def record(self, replica: str, rtt_s: float | None, *, now: float) -> None:
        """Record a probe; `rtt_s` is `None` if it failed."""
        trips = self._of.get(replica)
        if trips is None:
            trips = self._of[replica] = deque(maxlen=MAX_PROBES)
            if len(self._of) > MAX_REPLICAS:
                self._of.popitem(last=False)
        self._of.move_to_end(replica)
        trips.append((now, rtt_s))

    def for_replica(self, replica: str) -> tuple[ProbeTime, ...]:
        """Return the probes of a replica, oldest first."""
        return tuple(self._of.get(replica, ()))
