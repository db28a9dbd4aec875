"""Times between tokens, as (gap, how often) pairs: quantiles without a number per token.

Owns the log of one engine's decode iterations, from which each request's gaps are read at its end, and the histogram
that pools them. A run of iterations counts as so many gaps of its mean length; they differ by microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, exp, log

import numpy as np

#: Bins grow by 1 %, so a quantile is right within 1 %; from a microsecond to three hours in 19 kB.
_GROWTH = 1.01
_LOW_S, _HIGH_S = 1e-6, 1e4
_PER_LOG = 1.0 / log(_GROWTH)
_BINS = int(log(_HIGH_S / _LOW_S) * _PER_LOG) + 1
#: Bins of so many latest gaps are remembered: those of one run of iterations are added for each of its requests.
_REMEMBERED = 8192
#: The log of an engine that is never idle is cut back when it is this long: a day of decoding has millions.
_LOG_ENTRIES = 8192

Pairs = Sequence[tuple[float, int]]


class ItlHistogram:
    """Pooled gaps, s.

    Example
    -------
    >>> pooled = ItlHistogram()
    >>> pooled.add([(0.010, 98), (0.500, 2)])
    >>> pooled.count, round(pooled.mean_s, 4), round(pooled.quantile_s(0.5), 3), round(pooled.quantile_s(0.99), 1)
    (100, 0.0198, 0.01, 0.5)
    """

    def __init__(self) -> None:
        self._bins = [0] * _BINS
        self._sum_s = 0.0
        self.count = 0
        self._places: dict[float, int] = {}

    def add(self, pairs: Pairs) -> None:
        bins, sum_s, count = self._bins, self._sum_s, self.count
        for gap_s, times in pairs:
            place = self._places.get(gap_s)
            bins[self._place(gap_s) if place is None else place] += times
            sum_s += gap_s * times
            count += times
        self._sum_s, self.count = sum_s, count

    def _place(self, gap_s: float) -> int:
        if len(self._places) == _REMEMBERED:
            self._places.clear()
        place = int(log(gap_s / _LOW_S) * _PER_LOG) if gap_s > _LOW_S else 0
        place = self._places[gap_s] = min(place, _BINS - 1)
        return place

    @property
    def mean_s(self) -> float:
        """Exact; NaN without a gap."""
        return self._sum_s / self.count if self.count else float("nan")

    def quantile_s(self, share: float) -> float:
        """The middle of the bin in which it lies; NaN without a gap."""
        if not self.count:
            return float("nan")
        place = int(np.searchsorted(np.cumsum(self._bins), ceil(share * self.count)))
        return _LOW_S * exp((place + 0.5) / _PER_LOG)


def p95_s(pairs: Iterable[tuple[float, int]]) -> float | None:
    """The least gap that 95 % do not exceed, as the proxy reckons it; None without one."""
    longest_first = sorted(pairs, reverse=True)
    count = sum([times for _, times in longest_first])
    if not count:
        return None
    above = count - ceil(0.95 * count)
    for gap_s, times in longest_first:
        above -= times
        if above < 0:
            return gap_s
    raise AssertionError("95 % of something is somewhere")


class DecodeTimeline:
    """The decode iterations of one engine, in order: when each run began and ended, and how many there were.

    Example
    -------
    >>> decoded = DecodeTimeline()
    >>> mark = decoded.mark()  # a first token came at 1.0
    >>> decoded.add(1.5, 1.6, 10)
    >>> [(round(gap, 3), times) for gap, times in decoded.gaps(mark, first_token_s=1.0)]
    [(0.51, 1), (0.01, 9)]
    """

    def __init__(self) -> None:
        #: Start, end, number of iterations, and their mean length.
        self._runs: list[tuple[float, float, int, float]] = []
        #: How many were cut off at the front.
        self._cut = 0

    def mark(self) -> int:
        """Where the log stands; for `gaps`."""
        return self._cut + len(self._runs)

    def add(self, started_s: float, ended_s: float, iterations: int) -> None:
        self._runs.append((started_s, ended_s, iterations, (ended_s - started_s) / iterations))

    def gaps(self, mark: int, *, first_token_s: float) -> list[tuple[float, int]]:
        """Record a request that was in every run since `mark`: its wait before a run is part of its first gap."""
        pairs: list[tuple[float, int]] = []
        last_s = first_token_s
        for started_s, ended_s, iterations, gap_s in self._runs[mark - self._cut :]:
            if started_s - last_s > 1e-9:
                pairs.append((started_s - last_s + gap_s, 1))
                iterations -= 1
            if iterations:
                pairs.append((gap_s, iterations))
            last_s = ended_s
        return pairs

    @property
    def is_long(self) -> bool:
        """Worth a call of `forget`."""
        return len(self._runs) > _LOG_ENTRIES

    def forget(self, marks: Iterable[int]) -> None:
        """Drop the runs before all `marks` of the decoding requests."""
        oldest = min(marks, default=self.mark())
        del self._runs[: oldest - self._cut]
        self._cut = oldest
