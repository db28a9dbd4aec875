"""The learned gap between two output tokens of a replica, by the answers that ended there.

Theory of operation. An answer of so many tokens took so long after its first one. Sums of both decay with each answer,
so that the gap follows the load of the replica; a long answer weighs more than a short one.
"""

from __future__ import annotations

from math import nan

#: Answers after which one weighs 1 / e: a fraction of a batch, because the gap changes with the batch.
MEMORY = 8.0
_DECAY = 1.0 - 1.0 / MEMORY


class TokenGap:
    """The gap of one replica.

    Example
    -------
    >>> gap = TokenGap()
    >>> gap.on_answer(1.0, tokens=101)
    >>> gap.value_s
    0.01
    """

    __slots__ = ("_spent_s", "_tokens", "value_s")

    def __init__(self) -> None:
        #: NaN before the first answer.
        self.value_s = nan
        self._spent_s = self._tokens = 0.0

    def on_answer(self, spent_s: float, *, tokens: int) -> None:
        """Record an answer of two or more tokens, `spent_s` from the first to the last."""
        self._spent_s = _DECAY * self._spent_s + spent_s
        self._tokens = _DECAY * self._tokens + (tokens - 1)
        self.value_s = self._spent_s / self._tokens
