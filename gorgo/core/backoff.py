"""The wait after failures in a row: it doubles up to a bound, and chance spreads it.

Owns the formula alone. Each caller counts its failures, and ends the count with the first success.
"""

from __future__ import annotations

#: Doublings after which the wait is past any bound in use; more would leave the range of a float.
_MOST_DOUBLINGS = 32


def backoff_s(failures: int, *, first_s: float, longest_s: float, chance: float = 1.0) -> float:
    """Return the wait after the given number of failures in a row, from 1, in seconds.

    `chance` from [0, 1) draws from the upper half of the wait, so that many clients of one server do not return in step
    and none returns at once; 1, the default, is the whole wait.

    Example
    -------
    >>> [backoff_s(failures, first_s=0.5, longest_s=3.0) for failures in (1, 2, 3, 4, 5000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    >>> backoff_s(2, first_s=0.5, longest_s=3.0, chance=0.0)
    0.5

    References
    ----------
    M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: "equal jitter".
    """
    return min(first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s) * (0.5 + chance / 2.0)
