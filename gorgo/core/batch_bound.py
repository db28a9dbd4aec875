"""How many requests a replica may have in flight if their answers are to end in time: learned from those that ended.

Owns the estimate of one replica. Whether it counts, and beside which other bounds, is `overload`.

Theory of operation. A batch that grows gets slower for all who are in it: decode steps read more, and every prefill
stalls them. How long requests stay in a batch of n is taken from those that ended: the mean of their stay, S, and of
how many were in flight when they were sent, n. While S is above what is wanted, T, the bound is n * T / S; while it is
below and the bound has been reached, the bound grows by the same rule. For a stay that grows linearly in n this
converges to the n at which S = T from either side. A replica that was never too slow has no bound.
"""

from __future__ import annotations

from math import inf

#: Weight of one end: the mean is over about as many requests as an engine has running.
WEIGHT = 1 / 16
#: Share of the goal that the mean stay may take: then nineteen of twenty answers of common traffic end within it.
MEAN_SHARE = 0.5
#: An engine that decodes fewer at a time than this reads its weights for nothing.
LEAST = 8.0
#: Reached is a bound from which so much is left at most.
_REACHED = 0.8


class BatchBound:
    """One replica's.

    Example
    -------
    >>> bound = BatchBound()
    >>> for _ in range(100):
    ...     bound.ended(stayed_s=20.0, beside=64, goal_s=10.0)
    >>> round(bound.most)  # five seconds wanted, twenty taken: a quarter of the batch
    16
    """

    __slots__ = ("_beside", "_stay_s", "most")

    def __init__(self) -> None:
        self._stay_s: float | None = None
        self._beside = 0.0
        #: Requests in flight at most; infinite while there is no reason for less.
        self.most = inf

    def ended(self, *, stayed_s: float, beside: float, goal_s: float) -> None:
        """A request has ended that stayed so long and was one of so many when it was sent; `goal_s` is for answers."""
        if self._stay_s is None:
            self._stay_s, self._beside = stayed_s, beside
        self._stay_s += WEIGHT * (stayed_s - self._stay_s)
        self._beside += WEIGHT * (beside - self._beside)
        wanted_s = MEAN_SHARE * goal_s
        fits = max(LEAST, self._beside * wanted_s / max(self._stay_s, 1e-9))
        if self._stay_s > wanted_s:
            self.most = min(self.most, fits)
        elif self._beside >= _REACHED * self.most:
            self.most = max(self.most, fits)
