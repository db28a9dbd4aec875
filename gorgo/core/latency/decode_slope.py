"""The decode slope of a replica: how much longer a token takes per request beside it, learned from ended answers.

The value is a share of the time of a token alone. See `concurrency` for the limit that follows.

Theory of operation. A step of a mixture of experts reads more experts the more requests are in it, and takes twice as
long for some 16; a dense model reads all its weights for one as for many, and takes hundreds. Engines do not report it,
but its answers show it: time is a line over the number beside, token by token, and each answer is so many tokens at
one point of it. The line is fitted by least squares with a memory of `MEMORY` answers. While the number hardly varies
no slope can be fitted. So the fit contains the prior with the weight of `PRIOR_WEIGHT` answers, as if the number varied
by its mean (Poisson arrivals).

Other delays, such as prefills longer than predicted, also grow with the number there. So a fit is too steep if
anything, and is cut at the prior.
"""

from __future__ import annotations

#: Share of the time alone, for each request beside, while unknown: a mixture of experts.
PRIOR = 1 / 16
#: Weight of the prior in answers: about one batch of a replica.
PRIOR_WEIGHT = 32.0
#: Answers after which one weighs 1 / e: the slope is the engine's, and changes only with its traffic.
MEMORY = 512.0
#: Bounds: from no growth within any batch to the prior.
LEAST, MOST = 1 / 1024, PRIOR


class DecodeSlope:
    """The slope of one replica.

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
        #: Decayed sums over answers: count, tokens, tokens x beside, tokens x beside^2, time, time x beside.
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
