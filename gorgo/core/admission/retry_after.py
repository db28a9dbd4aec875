"""Retry-After: when a rejected client should come again.

Theory of operation. The queued and the dispatched work takes a known time, but there need be no capacity then: while
more arrives than can be served, others are queued, and the shortest of them are served first. The end of an overload is
unknown; the best guess for one that has lasted t is that it lasts t more, so the answer is at least that. An overload
begins with its first rejection. It has ended when no request was rejected until the last Retry-After was over.
"""

from __future__ import annotations

#: Least Retry-After, s.
MIN_RETRY_S = 1.0
#: The longest, s: a prediction beyond a minute is no information.
MAX_RETRY_S = 60.0


class RetryAfter:
    """Grows with the age of an overload.

    Example
    -------
    >>> after = RetryAfter()
    >>> after.seconds(2.0, now=100.0), after.seconds(2.0, now=101.5), after.seconds(2.0, now=103.5)
    (2.0, 2.0, 3.5)
    >>> after.seconds(2.0, now=108.0)  # none was rejected until 107: that overload has ended
    2.0
    """

    __slots__ = ("_began_s", "_until_s")

    def __init__(self) -> None:
        #: Start of the present overload, and the latest Retry-After that was answered in it.
        self._began_s = 0.0
        self._until_s = float("-inf")

    def seconds(self, work_s: float, *, now: float) -> float:
        """Return the Retry-After of a request rejected now, with `work_s` of work before it."""
        if now > self._until_s:
            self._began_s = now
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, work_s, now - self._began_s))
        self._until_s = max(self._until_s, now + retry_s)
        return retry_s
