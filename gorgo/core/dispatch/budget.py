"""A share of requests over a sliding window: how many retries or hedges there may be.

Owns the counting. Two windows of buckets are enough for it: what is spent and what it is a share of.
"""

from __future__ import annotations

from collections import deque
from math import floor

#: Steps in which the window moves: a tenth of it is as exact as a budget needs.
_BUCKETS = 10
_NEVER = -(1 << 62)


class RatioBudget:
    """At most `share` of the requests of the last `window_s`, and `minimum` in any case.

    Parameters
    ----------
    share:
        Of the requests noted in the window.
    minimum:
        Allowed in each window however few requests there were.
    window_s:
        What counts, s.

    Example
    -------
    >>> budget = RatioBudget(share=0.5, minimum=1, window_s=10.0)
    >>> [budget.try_spend(now=0.0) for _ in range(2)]  # the minimum
    [True, False]
    >>> for _ in range(4):
    ...     budget.record(now=1.0)
    >>> [budget.try_spend(now=1.0) for _ in range(2)]
    [True, False]
    """

    __slots__ = ("_bucket_s", "_buckets", "_newest", "_requests", "_spent", "minimum", "ratio")

    def __init__(self, *, share: float, minimum: int, window_s: float) -> None:
        self.ratio = share
        self.minimum = minimum
        self._bucket_s = window_s / _BUCKETS
        #: (number of the bucket, requests, spent), oldest first; at most `_BUCKETS + 1`.
        self._buckets: deque[list[int]] = deque()
        #: The last of them; none yet.
        self._newest = [_NEVER, 0, 0]
        self._requests = self._spent = 0

    def record(self, *, now: float) -> None:
        """One more request."""
        bucket = self._newest
        if bucket[0] < now // self._bucket_s:
            bucket = self._current(now)
        bucket[1] += 1
        self._requests += 1

    def available(self, *, now: float) -> bool:
        self._current(now)
        return self._spent + 1 <= max(self.minimum, floor(self.ratio * self._requests))

    def try_spend(self, *, now: float) -> bool:
        """Take one out of the budget if it is there."""
        if not self.available(now=now):
            return False
        self._buckets[-1][2] += 1
        self._spent += 1
        return True

    def _current(self, now: float) -> list[int]:
        number = int(now // self._bucket_s)
        buckets = self._buckets
        if buckets and buckets[-1][0] >= number:
            return buckets[-1]
        while buckets and buckets[0][0] <= number - _BUCKETS:
            _, requests, spent = buckets.popleft()
            self._requests -= requests
            self._spent -= spent
        self._newest = [number, 0, 0]
        buckets.append(self._newest)
        return self._newest
