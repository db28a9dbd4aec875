"""The proxy's one clock: monotonic seconds, anchored to the epoch once, at start.

Differences are never wrong after a step of the system's clock, and a time in a log or a sample is still a date.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, time

Clock = Callable[[], float]


def epoch_clock() -> Clock:
    """A new clock; call it for the time now, s since the epoch as it was at start."""
    offset_s = time() - monotonic()

    def now() -> float:
        return monotonic() + offset_s

    return now
