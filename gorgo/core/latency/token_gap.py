"""The learned time per output token of a replica, and the requests that decode there.

Theory of operation. An answer of so many tokens took so long after its first one, among so many requests that decode. A
step takes longer the more requests are in it, so the time is divided by 1 + `SHARE` for each of them, and what is
learned is the time of a request alone. Without this the estimate would be half too large while a burst begins, since no
answer of the burst has ended. Sums decay with each answer; a long answer weighs more than a short one.

The number that decodes is integrated over time, so that its mean during an answer takes one subtraction.
"""

from __future__ import annotations

from math import nan

from gorgo.core.latency.decode_slope import PRIOR

#: Of the time per token alone, for each request that decodes.
SHARE = PRIOR
#: Answers after which one weighs 1 / e: some of a batch.
MEMORY = 8.0
_DECAY = 1.0 - 1.0 / MEMORY


class TokenGap:
    """The gap of one replica.

    Example
    -------
    >>> gap = TokenGap()
    >>> mark = gap.begin(now=5.0)
    >>> gap.end(now=7.125)
    >>> gap.on_answer(2.125, tokens=201, mark=mark)
    >>> round(gap.alone_s, 6)
    0.01
    """

    __slots__ = ("_integral", "_now", "_spent_s", "_tokens", "alone_s", "decoding")

    def __init__(self) -> None:
        #: Time per token of a request alone, s. NaN before the first answer.
        self.alone_s = nan
        #: Requests between their first token and their end.
        self.decoding = 0
        self._integral = self._now = 0.0
        self._spent_s = self._tokens = 0.0

    def begin(self, *, now: float) -> float:
        """Count a request with its first token; return the mark of its answer."""
        self._advance(now)
        self.decoding += 1
        return self._integral

    def end(self, *, now: float) -> None:
        """Count a request no longer."""
        self._advance(now)
        self.decoding -= 1

    def on_answer(self, spent_s: float, *, tokens: int, mark: float) -> None:
        """Record a whole answer of two or more tokens that has just ended, `spent_s` from the first to the last."""
        beside = (self._integral - mark) / spent_s if spent_s > 0.0 else 1.0
        self._spent_s = _DECAY * self._spent_s + spent_s
        self._tokens = _DECAY * self._tokens + (tokens - 1) * (1.0 + SHARE * beside)
        self.alone_s = self._spent_s / self._tokens

    def _advance(self, now: float) -> None:
        self._integral += self.decoding * (now - self._now)
        self._now = now
