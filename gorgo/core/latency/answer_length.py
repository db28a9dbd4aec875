"""The mean length of a replica's answers, as their usage reports it: so long a request in flight slows the others.

Theory of operation. A request that joins a batch makes each step longer: for itself until it ends, a mean length, and
for each other one until either ends, half a mean length. (Of one that is met in flight t tokens are left with the
density P(length > t) / mean; its overlap with a new one is the integral of P(left > t) P(length > t), which is half
the mean for any distribution.) So without knowing a length the price grows with the mean. It is one over the last
`MEMORY` answers, with a prior that weighs as much as `PRIOR_WEIGHT` answers: a few long ones at the start move little.
"""

from __future__ import annotations

#: Mean tokens of an answer while unknown: those for which the prices of `gorgo-ms` were measured.
PRIOR_TOKENS = 128.0
#: Weight of the prior in answers: about one batch of a replica.
PRIOR_WEIGHT = 32.0
#: Answers after which one weighs 1 / e. Lengths spread as much as their mean, so the mean is known to some 5 %.
MEMORY = 256.0


class AnswerLength:
    """The mean of one replica.

    Example
    -------
    >>> length = AnswerLength()
    >>> for _ in range(1000):
    ...     length.add(256)
    >>> round(length.mean_tokens, 1)
    255.7
    """

    __slots__ = ("_tokens", "_weight", "mean_tokens")

    def __init__(self) -> None:
        self.mean_tokens = PRIOR_TOKENS
        self._weight = PRIOR_WEIGHT
        self._tokens = PRIOR_WEIGHT * PRIOR_TOKENS

    def add(self, tokens: int) -> None:
        """Count a whole answer of so many tokens."""
        decay = 1.0 - 1.0 / MEMORY
        self._weight = decay * self._weight + 1.0
        self._tokens = decay * self._tokens + tokens
        self.mean_tokens = self._tokens / self._weight
