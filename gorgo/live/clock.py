"""The proxy's one clock: monotonic seconds, anchored to the epoch at start.

Differences stay right after a step of the system's clock, and a time in a log or a sample is still a date.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, time

Clock = Callable[[], float]


def epoch_clock() -> Clock:
    """Return a clock: s since the epoch as the system knew it at start."""
    offset_s = time() - monotonic()

    def now() -> float:
        return monotonic() + offset_s

    return now
