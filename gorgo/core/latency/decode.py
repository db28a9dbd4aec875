"""Decoding on a replica, learned from its answers: time per token, its growth with the batch, and the limit.

Owns what is learned of one replica's decoding. Leaves prefills to `core.latency.prefill`, and the use of the limit to
`fleet.request_filter`.

- `DecodeSlope` is how much longer a token takes per request beside it.
- `TokenGap` is the time per output token, and the requests that decode.
- `DecodeTimes` are the times between tokens as clients see them, for operators, and how they compare with the fleet's.
- `ConcurrencyLimit` is the number in flight at which most requests end in time.

The paragraphs below are the theory of `TokenGap`; that of the others stands before each.

Theory of operation. An answer of so many tokens took so long after its first one, among so many requests that decode. A
step takes longer the more requests are in it, so the time is divided by 1 + `SHARE` for each of them, and what is
learned is the time of a request alone. Without this the estimate would be half too large while a burst begins, since no
answer of the burst has ended. Sums decay with each answer; a long answer weighs more than a short one.

The number that decodes is integrated over time, so that its mean during an answer takes one subtraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record

# The decode slope of a replica: how much longer a token takes per request beside it, learned from ended answers.
#
# The value is a share of the time of a token alone. See `ConcurrencyLimit` for its use.
#
# Theory of operation. A step of a mixture of experts reads more experts the more requests are in it, and takes twice
# as long for some 16; a dense model reads all its weights for one as for many, and takes hundreds. Engines do not
# report it, but its answers show it: time is a line over the number beside, token by token, and each answer is so many
# tokens at one point of it. The line is fitted by least squares with a memory of `SLOPE_MEMORY` answers. While the
# number hardly varies no slope can be fitted. So the fit contains the prior with the weight of `PRIOR_WEIGHT` answers,
# as if the number varied by its mean (Poisson arrivals).
#
# Other delays, such as prefills longer than predicted, also grow with the number there. So a fit is too steep if
# anything, and is cut at the prior.


#: Share of the time alone, for each request beside, while unknown: a mixture of experts.
PRIOR = 1 / 16
#: Weight of the prior in answers: about one batch of a replica.
PRIOR_WEIGHT = 32.0
#: Answers after which one weighs 1 / e: the slope is the engine's, and changes only with its traffic.
SLOPE_MEMORY = 512.0
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
        decay = 1.0 - 1.0 / SLOPE_MEMORY
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


#: Of the time per token alone, for each request that decodes.
SHARE = PRIOR
#: Answers after which one weighs 1 / e: some of a batch.
GAP_MEMORY = 8.0
_DECAY = 1.0 - 1.0 / GAP_MEMORY


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


# The times between tokens of a replica's streams, as they ended lately: what an operator compares, and no policy reads.
#
# They contain stalls and the batch, and so differ by some factor between replicas under different load. One that is
# `SLOW_DECODE` times slower than the median of the others with its models and accelerator is slow for another reason.


#: Streams after which one weighs 1 / e, and those before which nothing is said.
DECODE_MEMORY, FIRST_STREAMS = 8.0, 4
#: Times the fleet's median that no load explains.
SLOW_DECODE = 3.0


class DecodeTimes:
    """Time per output token (TPOT) of one replica and the 95th percentile of its inter-token times (ITL), s.

    Example
    -------
    >>> times = DecodeTimes()
    >>> for _ in range(FIRST_STREAMS):
    ...     times.on_stream(2.0, tokens=201, itl_s_p95=0.02)
    >>> times.tpot_s, times.itl_s_p95
    (0.01, 0.02)
    """

    __slots__ = ("_itl_s", "_itls", "_streams", "_tpot_s")

    def __init__(self) -> None:
        self._tpot_s = self._itl_s = 0.0
        self._streams = self._itls = 0

    def on_stream(self, spent_s: float, *, tokens: int | None, itl_s_p95: float | None) -> None:
        """Record a whole stream of so many tokens, `spent_s` from its first to its last."""
        if tokens is not None and tokens > 1:
            self._streams += 1
            self._tpot_s += (spent_s / (tokens - 1) - self._tpot_s) / min(self._streams, DECODE_MEMORY)
        if itl_s_p95 is not None:
            self._itls += 1
            self._itl_s += (itl_s_p95 - self._itl_s) / min(self._itls, DECODE_MEMORY)

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token; `None` before some streams."""
        return self._tpot_s if self._streams >= FIRST_STREAMS else None

    @property
    def itl_s_p95(self) -> float | None:
        """Return the mean 95th percentile of inter-token times; `None` before some streams."""
        return self._itl_s if self._itls >= FIRST_STREAMS else None


def relative_to_others(values: Sequence[float]) -> list[float | None]:
    """Return each value over the median of the others; `None` for a lone one.

    Example
    -------
    >>> relative_to_others([0.01, 0.1, 0.01]), relative_to_others([0.01])
    ([0.18181818181818182, 10.0, 0.18181818181818182], [None])
    """
    if len(values) < 2:
        return [None] * len(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked = [values[index] for index in order]
    ratios: list[float | None] = [None] * len(values)
    lower, upper = (len(values) - 2) // 2, (len(values) - 1) // 2
    for rank, index in enumerate(order):
        # The two in the middle of what is left without this one.
        middle = [ranked[position + (position >= rank)] for position in (lower, upper)]
        median = sum(middle) / 2
        ratios[index] = ranked[rank] / median if median > 0.0 else None
    return ratios


# The learned concurrency limit of a replica: the number in flight at which most requests per second end in time.
#
# Owns the learning for one replica. See `fleet.request_filter` for its use, `DecodeSlope` for a larger batch.
#
# Theory of operation. A larger batch slows all its requests in two ways. Every prefill stalls those that decode: the
# prefills dispatched while a request was there are known here. And every step decodes more: the rest of the stay grows
# as 1 + g n, with the slope g learned from answers. So each ended request says how long it would have stayed among any
# other number n. The last `WINDOW` together say how many would have ended in time, and how many a second: n over their
# mean stay (Little's law), times the share of them in time. The limit is the n at which most end in time per second.
# An error of the slope is corrected by the next ends.
#
# Before any request has ended the prefills are known all the same: a stay then is n of them, and may take
# `FIRST_SHARE` of the goal; decoding has the rest. That weighs less with each request that ends, because short
# requests end first.


#: Ended requests retained: as many as engines commonly run, so a few changes of the batch.
WINDOW = 64
#: Share of the goal for prefills while decoding is unknown.
FIRST_SHARE = 0.4
#: Ended requests after which the start has no weight.
FULL_TRUST = 32
#: Ended requests below which they have no weight.
MIN_SAMPLES = 4
#: Numbers in flight that are compared, an eighth apart: from 2 to more than any engine runs.
_NUMBERS = 2.0 * 1.125 ** np.arange(48)
#: A mean counts its first values alike, and each later one with the weight that the last of these had.
_ALIKE = 16
_WEIGHT = 1 / _ALIKE


@record
class Checkpoint:
    """A replica's sums at a dispatch: requests x seconds in flight, and seconds of prefill."""

    in_flight_s: float = 0.0
    prefill_s: float = 0.0


EMPTY_CHECKPOINT = Checkpoint()


class ConcurrencyLimit:
    """The limit of one replica.

    Example
    -------
    >>> concurrency = ConcurrencyLimit()
    >>> marks = [concurrency.on_dispatched(prefill_s=0.4, now=0.0) for _ in range(20)]
    >>> round(concurrency.limit(10.0), 9)  # ten prefills take what they may of ten seconds
    10.0
    """

    __slots__ = (
        "_at_s",
        "_completions",
        "_departed_at",
        "_departures",
        "_duration_s",
        "_durations",
        "_growth",
        "_in_flight",
        "_in_flight_s",
        "_limit",
        "_prefill_s",
        "_sent",
        "_typical_s",
    )

    def __init__(self) -> None:
        self._in_flight = 0
        self._in_flight_s = 0.0
        self._prefill_s = 0.0
        self._at_s = 0.0
        #: How many have left, where the account stood when the last one did, and how long they stay as a rule.
        self._departures = 0
        self._departed_at = 0.0
        self._duration_s = 0.0
        self._sent = 0
        #: Mean prefill of what was sent lately.
        self._typical_s = 0.0
        self._growth = DecodeSlope()
        #: Of each request that ended: what it waited at the proxy, its stay without prefills, how many were there
        #: meanwhile, and what prefills took of its stay for each of them.
        self._durations = np.zeros((4, WINDOW))
        self._completions = 0
        self._limit = inf

    def limit(self, goal_s: float) -> float:
        """Requests in flight at most, if answers should end within `goal_s`; infinite while there is no reason."""
        trust = self._completions / FULL_TRUST if self._completions >= MIN_SAMPLES else 0.0
        if trust >= 1.0:
            return self._limit
        first = FIRST_SHARE * goal_s / self._typical_s if self._typical_s > 0.0 else inf
        first = max(float(_NUMBERS[0]), first)
        return first if trust == 0.0 else trust * self._limit + (1.0 - trust) * first

    @property
    def slot_wait_s(self) -> float:
        """Mean time until a slot is free; 0 if unknown."""
        return self._duration_s / self._in_flight if self._in_flight else 0.0

    def on_dispatched(self, *, prefill_s: float, now: float) -> Checkpoint:
        """Count a dispatched request with its predicted prefill; return the checkpoint for its end."""
        self._pass(now)
        mark = Checkpoint(self._in_flight_s, self._prefill_s)
        self._in_flight += 1
        self._prefill_s += prefill_s
        self._sent += 1
        self._typical_s += _weight(self._sent) * (prefill_s - self._typical_s)
        return mark

    def on_left(self, *, now: float) -> None:
        """Count a request that has left, whatever its result."""
        self._pass(now)
        self._departures += 1
        # Between two ends the sum grows by one stay; idle time adds nothing.
        self._duration_s += _weight(self._departures) * (self._in_flight_s - self._departed_at - self._duration_s)
        self._departed_at = self._in_flight_s
        self._in_flight -= 1

    def on_completed(
        self, mark: Checkpoint, *, stayed_s: float, waited_s: float, goal_s: float, tokens: int | None = None
    ) -> None:
        """Learn from a complete answer, by its time in the queue and on the replica.

        `goal_s` is for both together. `tokens` are those of the answer, where reported.
        """
        if stayed_s <= 0.0:
            return
        beside = max(1.0, (self._in_flight_s - mark.in_flight_s) / stayed_s)
        stalled_s = min(stayed_s, self._prefill_s - mark.prefill_s)
        if tokens:
            self._growth.learn(stayed_s - stalled_s, tokens=tokens, beside=beside)
        self._durations[:, self._completions % WINDOW] = waited_s, stayed_s - stalled_s, beside, stalled_s / beside
        self._completions += 1
        if self._completions >= MIN_SAMPLES:
            self._limit = _best(self._durations[:, : self._completions], self._growth.value, goal_s)

    def _pass(self, now: float) -> None:
        self._in_flight_s += self._in_flight * (now - self._at_s)
        self._at_s = now


def _weight(count: int) -> float:
    """Return the weight of the last of so many: that of a mean of all at first."""
    return _WEIGHT if count > _ALIKE else 1 / count


def _best(stays: NDArray[np.float64], growth: float, goal_s: float) -> float:
    """The number at which most would have ended in time per second; infinite if none would at any."""
    waited_s, decoded_s, beside, stalled_s = stays[:, :, None]
    alone_s = decoded_s / (1.0 + growth * beside)
    stayed_s = alone_s + (growth * alone_s + stalled_s) * _NUMBERS
    in_time = (waited_s + stayed_s <= goal_s).mean(axis=0)
    per_s = in_time * _NUMBERS / stayed_s.mean(axis=0)
    best = int(per_s.argmax())
    return float(_NUMBERS[best]) if per_s[best] > 0.0 else inf
