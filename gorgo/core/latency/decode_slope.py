"""How much longer a token takes for each request that is decoded beside it: learned from answers that ended.

Owns the one figure of a replica, as a share of the time that a token takes alone. What follows for how many it may have
at a time is `batch_bound`.

Theory of operation. A step of a mixture of experts reads more experts the more requests are in it, and takes twice as
long for some 16; a dense model reads all its weights for one as for many, and takes hundreds. Nobody tells which of the
two an engine is, but its answers do: time is a line over the number beside, token by token, and each answer is so many
tokens at one point of it. The line is fitted by least squares with a memory of `MEMORY` answers. While the number
hardly varies no slope can be fitted. So the fit contains the prior with the weight of `PRIOR_WEIGHT` answers, as
if the number varied by its mean (Poisson arrivals).

What else holds a request up and is not known here, prefills that take longer than predicted above all, also grows with
the number there. So a fit is too steep if anything, and one steeper than the usual is not believed.
"""

from __future__ import annotations

#: Of the time alone, for each request beside, while nothing is known: a mixture of experts.
PRIOR = 1 / 16
#: Answers that the usual growth counts for: as many as a replica has at a time, as a rule, in one change of its batch.
PRIOR_WEIGHT = 32.0
#: Answers after which one weighs 1 / e: the growth is the engine's, and changes only with what it is asked.
MEMORY = 512.0
#: What is believed: from no growth within any batch to the usual.
LEAST, MOST = 1 / 1024, PRIOR


class DecodeSlope:
    """One replica's.

    Example
    -------
    >>> slope = DecodeSlope()
    >>> for number in range(400):  # 10 ms a token, and 0.1 ms for each beside
    ...     slope.learn((0.01 + 0.0001 * (number % 50)) * 200, tokens=200, beside=number % 50)
    >>> 1 / 110 < slope.value < 1 / 80
    True
    """

    __slots__ = ("_concurrency", "_product_s", "_responses", "_spent_s", "_squares", "_tokens", "value")

    def __init__(self) -> None:
        self.value = PRIOR
        #: Faded sums over answers: how many, their tokens, tokens x beside, tokens x beside^2, time, time x beside.
        self._responses = self._tokens = self._concurrency = self._squares = 0.0
        self._spent_s = self._product_s = 0.0

    def learn(self, spent_s: float, *, tokens: int, beside: float) -> None:
        """An answer of so many tokens took so long, prefills of others aside, among so many."""
        decay = 1.0 - 1.0 / MEMORY
        self._responses = decay * self._responses + 1.0
        self._tokens = decay * self._tokens + tokens
        self._concurrency = decay * self._concurrency + tokens * beside
        self._squares = decay * self._squares + tokens * beside * beside
        self._spent_s = decay * self._spent_s + spent_s
        self._product_s = decay * self._product_s + spent_s * beside
        self.value = self._fitted()

    def _fitted(self) -> float:
        tokens, spent_s = self._tokens, self._spent_s
        mean = self._concurrency / tokens
        usual_s = PRIOR * spent_s / (tokens + PRIOR * self._concurrency)
        weight = PRIOR_WEIGHT * tokens / self._responses * max(1.0, mean)
        varied = max(0.0, self._squares - mean * self._concurrency)
        each_s = (self._product_s - mean * spent_s + weight * usual_s) / (varied + weight)
        alone_s = spent_s / tokens - each_s * mean
        return MOST if alone_s <= 0.0 else min(max(each_s / alone_s, LEAST), MOST)
