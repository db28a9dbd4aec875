"""Round trips of the last probes, by replica: the Router keeps their average alone, and an operator wants their course.

Owns a bounded ring per replica. Probes tell it, the status reads it.
"""

from __future__ import annotations

from collections import OrderedDict, deque

#: An hour of probes every 30 s.
PROBES_KEPT = 120
#: Names, for a proxy whose fleet changes for months; more than any fleet has at once.
REPLICAS_KEPT = 1024

#: When a probe came back, s since the epoch, and its round trip, s; `None` if it failed.
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
        """A probe came back, or failed."""
        trips = self._of.get(replica)
        if trips is None:
            trips = self._of[replica] = deque(maxlen=PROBES_KEPT)
            if len(self._of) > REPLICAS_KEPT:
                self._of.popitem(last=False)
        self._of.move_to_end(replica)
        trips.append((now, rtt_s))

    def for_replica(self, replica: str) -> tuple[ProbeTime, ...]:
        """Oldest first."""
        return tuple(self._of.get(replica, ()))
