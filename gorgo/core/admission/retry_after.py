"""When a request that is turned away is told to come back.

Owns that one time. How long what is there already takes is `front_door`'s.

Theory of operation. What waits and what was sent takes a time that is known, but there need be no room then: as long as
more comes than can be done, others will wait, and the shortest of them go first. How long that goes on nobody knows.
The best guess for what has lasted t is that it lasts t more, so this is said where it is more. An overload lasts from
its first refusal on, and is over when nobody was turned away until the last time that somebody was told: then there
was room when it was said.
"""

from __future__ import annotations

#: Least time to tell a client to stay away, s.
MIN_RETRY_S = 1.0
#: The longest, s: what is predicted beyond a minute is not known.
MAX_RETRY_S = 60.0


class RetryAfter:
    """Of one proxy.

    Example
    -------
    >>> after = RetryAfter()
    >>> after.seconds(2.0, now=100.0), after.seconds(2.0, now=101.5), after.seconds(2.0, now=103.5)
    (2.0, 2.0, 3.5)
    >>> after.seconds(2.0, now=108.0)  # nobody was turned away at 107, when there was to be room
    2.0
    """

    __slots__ = ("_began_s", "_until_s")

    def __init__(self) -> None:
        #: When the overload under way began, and until when clients were told that it lasts.
        self._began_s = 0.0
        self._until_s = float("-inf")

    def seconds(self, work_s: float, *, now: float) -> float:
        """For one that is turned away now, while `work_s` of work is before it."""
        if now > self._until_s:
            self._began_s = now
        told_s = min(MAX_RETRY_S, max(MIN_RETRY_S, work_s, now - self._began_s))
        self._until_s = max(self._until_s, now + told_s)
        return told_s
