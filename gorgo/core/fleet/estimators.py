"""What turns noisy figures into the ones that a policy sees: smoothing and age.

Owns the two rules; the fleet owns the cells that they write. Unknown is NaN.
"""

from __future__ import annotations


def ewma(previous: float, sample: float, alpha: float) -> float:
    """Exponentially weighted moving average; the first sample stands for itself.

    Parameters
    ----------
    previous:
        The average so far, NaN before the first sample.
    alpha:
        Weight of the new sample, in (0, 1]; 1 keeps no memory.

    Example
    -------
    >>> ewma(float("nan"), 0.2, 0.3), round(ewma(0.1, 0.2, 0.3), 3)
    (0.2, 0.13)
    """
    if previous != previous:  # NaN is the only number unequal to itself
        return sample
    return previous + alpha * (sample - previous)


def is_stale(observed_s: float | None, *, now: float, after_s: float) -> bool:
    """Return whether a signal observed at `observed_s` is too old to use. None is unknown, not stale."""
    return observed_s is not None and now >= observed_s + after_s
