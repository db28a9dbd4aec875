"""The health of replicas and of the last requests for an operator.

Owns `HealthLog`, for a replica or a region lost or back and an engine that restarted, `ProbeHistory`, and the
statistics of the last finished requests (`RecentStats`, `ttft_series`). A loss is a warning, a recovery is not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor

from gorgo.core.lru import Lru
from gorgo.core.messages.actions import FleetEvent, HealthChanged, RegionChanged, ReplicaRestarted
from gorgo.core.messages.request import Sample
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
                details = {"by": event.by, "why": event.why, "for_s": event.for_s}
                log(name, level=level, replica=event.replica, **{key: each for key, each in details.items() if each})
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


#: Window of recent requests: long enough for a p95 at one request a second, short enough to show an incident at once.
RECENT_S = 300.0
#: Evaluated once a second beside live traffic: about a millisecond.
RECENT_SAMPLES = 1000
#: Bins of TTFT over time: 5 s each, less after a start.
BINS = 60
_SPANS_S = (60.0, 120.0, RECENT_S)


@dataclass(frozen=True, slots=True)
class RecentStats:
    """Statistics of finished requests; `None` without data.

    `failed` are those that ended with 5xx, a broken stream included. `error_ms_p50` is the median distance between
    predicted and observed TTFT. Shares are of prompt tokens: found in cache by the engines' reports, and as estimated
    at the decision for the same requests.
    """

    n: int
    failed: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    error_ms_p50: float | None
    cached_share: float | None
    estimated_share: float | None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> RecentStats:
        ttft = sorted(sample.ttft_ms for sample in samples if sample.ttft_ms is not None)
        off = sorted(
            abs(sample.predicted_ttft_ms - sample.ttft_ms)
            for sample in samples
            if sample.predicted_ttft_ms is not None and sample.ttft_ms is not None
        )
        reported = [sample for sample in samples if sample.cached_tokens is not None]
        prompt_tokens = sum(sample.input_tokens for sample in reported)
        return cls(
            n=len(samples),
            failed=sum(sample.status >= 500 for sample in samples),
            ttft_ms_p50=quantile(ttft, 0.5),
            ttft_ms_p95=quantile(ttft, 0.95),
            error_ms_p50=quantile(off, 0.5),
            cached_share=_share((sample.cached_tokens or 0 for sample in reported), prompt_tokens),
            estimated_share=_share((sample.estimated_cached_tokens for sample in reported), prompt_tokens),
        )


@dataclass(frozen=True, slots=True)
class TimeBin:
    """Requests that finished within `length_s` from `start_s` (since the epoch)."""

    start_s: float
    length_s: float
    n: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None


def recent_stats(newest_first: Iterable[Sample], *, now: float) -> list[Sample]:
    """Return the requests of the window, newest first."""
    return [sample for sample in newest_first if now - sample.finished_s <= RECENT_S]


def ttft_series(samples: Iterable[Sample], *, now: float, up_s: float) -> list[TimeBin]:
    """Return TTFT over the window, oldest bin first. Bins begin at multiples of their length, so they do not move."""
    length_s = next((span_s for span_s in _SPANS_S if up_s <= span_s), RECENT_S) / BINS
    first = floor(now / length_s) - BINS + 1
    times: list[list[float]] = [[] for _ in range(BINS)]
    for sample in samples:
        index = floor(sample.finished_s / length_s) - first
        if 0 <= index < BINS and sample.ttft_ms is not None:
            times[index].append(sample.ttft_ms)
    return [_bin((first + index) * length_s, length_s, sorted(ttft)) for index, ttft in enumerate(times)]


def quantile(ordered: Sequence[float], q: float) -> float | None:
    """Return a quantile, linear between neighbours as numpy's; `None` of no values.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0, 4.0], 0.75), quantile([], 0.5)
    (2.0, 3.0, None)
    """
    if not ordered:
        return None
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _bin(start_s: float, length_s: float, ttft_ms: Sequence[float]) -> TimeBin:
    return TimeBin(start_s, length_s, len(ttft_ms), quantile(ttft_ms, 0.5), quantile(ttft_ms, 0.95))


def _share(tokens: Iterable[int], of: int) -> float | None:
    return sum(tokens) / of if of else None
