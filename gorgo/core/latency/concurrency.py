"""The learned concurrency limit of a replica: the number in flight at which most requests per second end in time.

Owns the learning for one replica. See `fleet.saturation` for its use, `decode_slope` for decoding in a larger batch.

Theory of operation. A larger batch slows all its requests in two ways. Every prefill stalls those that decode: the
prefills dispatched while a request was there are known here. And every step decodes more: the rest of the stay grows
as 1 + g n, with the slope g learned from answers. So each ended request says how long it would have stayed among any
other number n. The last `WINDOW` together say how many would have ended in time, and how many a second: n over their
mean stay (Little's law), times the share of them in time. The limit is the n at which most end in time per second. An
error of the slope is corrected by the next ends.

Before any request has ended the prefills are known all the same: a stay then is n of them, and may take `FIRST_SHARE`
of the goal; decoding has the rest. That weighs less with each request that ends, because short requests end first.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from gorgo.core.latency.decode_slope import DecodeSlope
from gorgo.core.record import record

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
        known = self._completions / FULL_TRUST if self._completions >= MIN_SAMPLES else 0.0
        if known >= 1.0:
            return self._limit
        first = FIRST_SHARE * goal_s / self._typical_s if self._typical_s > 0.0 else inf
        first = max(float(_NUMBERS[0]), first)
        return first if known == 0.0 else known * self._limit + (1.0 - known) * first

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
