"""Hedging: a second attempt on evidence that the first one is stuck, within a budget.

Owns the times at which requests are late and the rules of a hedge (`Hedger`), and the budget of hedges and retries
(`RatioBudget`). Leaves the reservation of a hedge to `dispatch.dispatcher` and retries to `dispatch.lifecycle`.

Theory of operation. A request is late when its first token is later than predicted by `delay_s` or by the prediction,
whichever is more. It is superseded on its replica when a request dispatched there after it has its first token, while
its own was due as well: the delay is then its own, on the path or in the engine. The latter is evaluated after a
moment's grace for tokens of one step, which come in any order. A hedge goes only to a replica with capacity, so that an
overloaded fleet gets no more work. While there is none, no budget or no other replica, the request is evaluated again.
After the first token there is no hedge, and a request has one hedge at most.

When probes eject a replica, it has most likely hung, and what it has not begun to answer is sent elsewhere: also
answers in one piece, and without a budget, since it had so many requests and gets no more. If it answers after all
before the other does, that is the answer.

Times are in a heap; entries of attempts with a first token are skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import floor

from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.fleet.request_filter import RequestFilter, SaturationDetector
from gorgo.core.limits import HedgeLimits
from gorgo.core.messages.actions import Hedge

# A share of requests over a sliding window: how many retries or hedges there may be.
#
# Owns the counting. Two windows of buckets are enough for it: what is spent and what it is a share of.


#: Steps in which the window moves: a tenth of it is as exact as a budget needs.
_BUCKETS = 10
_NEVER = -(1 << 62)


class RatioBudget:
    """At most `share` of the requests of the last `window_s`, and `minimum` in any case.

    Parameters
    ----------
    share:
        Of the requests noted in the window.
    minimum:
        Allowed in each window however few requests there were.
    window_s:
        What counts, s.

    Example
    -------
    >>> budget = RatioBudget(share=0.5, minimum=1, window_s=10.0)
    >>> [budget.try_spend(now=0.0) for _ in range(2)]  # the minimum
    [True, False]
    >>> for _ in range(4):
    ...     budget.record(now=1.0)
    >>> [budget.try_spend(now=1.0) for _ in range(2)]
    [True, False]
    """

    __slots__ = ("_bucket_s", "_buckets", "_newest", "_requests", "_spent", "minimum", "ratio")

    def __init__(self, *, share: float, minimum: int, window_s: float) -> None:
        self.ratio = share
        self.minimum = minimum
        self._bucket_s = window_s / _BUCKETS
        #: (number of the bucket, requests, spent), oldest first; at most `_BUCKETS + 1`.
        self._buckets: deque[list[int]] = deque()
        #: The last of them; none yet.
        self._newest = [_NEVER, 0, 0]
        self._requests = self._spent = 0

    def record(self, *, now: float) -> None:
        """One more request."""
        bucket = self._newest
        if bucket[0] < now // self._bucket_s:
            bucket = self._current(now)
        bucket[1] += 1
        self._requests += 1

    def available(self, *, now: float) -> bool:
        self._current(now)
        return self._spent + 1 <= max(self.minimum, floor(self.ratio * self._requests))

    def try_spend(self, *, now: float) -> bool:
        """Take one out of the budget if it is there."""
        if not self.available(now=now):
            return False
        self._buckets[-1][2] += 1
        self._spent += 1
        return True

    def _current(self, now: float) -> list[int]:
        number = int(now // self._bucket_s)
        buckets = self._buckets
        if buckets and buckets[-1][0] >= number:
            return buckets[-1]
        while buckets and buckets[0][0] <= number - _BUCKETS:
            _, requests, spent = buckets.popleft()
            self._requests -= requests
            self._spent -= spent
        self._newest = [number, 0, 0]
        buckets.append(self._newest)
        return self._newest


#: Pause before a hedge for which no replica has capacity is evaluated again, s; and one without a budget or a replica.
_AGAIN_S, _LATER_S = 0.25, 1.0


class Hedger:
    """Finds late requests and hedges them.

    Parameters
    ----------
    dispatcher, saturation, request_filter:
        The Router's.
    limits, max_attempts:
        May be replaced by `set_limits`; `max_attempts` bounds the attempts of one request.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        saturation: SaturationDetector,
        request_filter: RequestFilter,
        limits: HedgeLimits,
        *,
        max_attempts: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._saturation = saturation
        self._filter = request_filter
        #: Attempts by the time at which they count as late, a heap; some have their first token or have ended.
        self.watched: list[tuple[float, int, Attempt]] = []
        self._number = 0
        self.set_limits(limits, max_attempts=max_attempts)

    def set_limits(self, limits: HedgeLimits, *, max_attempts: int) -> None:
        self._limits, self._max_attempts = limits, max_attempts
        self.on = limits.budget_ratio > 0.0
        self._dispatcher.on_reserved = self.watch if self.on else None
        self._budget = RatioBudget(share=limits.budget_ratio, minimum=limits.budget_minimum, window_s=limits.window_s)

    def record_request(self, *, now: float) -> None:
        """Add a request to the budget."""
        self._budget.record(now=now)

    def watch(self, attempt: Attempt) -> None:
        """Set the time at which a reserved attempt counts as late."""
        predicted_s, request = _predicted_s(attempt), attempt.request
        if predicted_s is not None and request.streamed and request.idempotent:
            self._evaluate(attempt.dispatched_s + predicted_s + max(self._limits.delay_s, predicted_s), attempt)

    def on_superseded(self, attempts: list[Attempt], *, now: float) -> None:
        """Record that a request dispatched to the same replica after `attempts` has its first token."""
        for other in attempts:
            predicted_s = _predicted_s(other)
            if predicted_s is not None and self._may_hedge(other):
                due_s = max(now, other.dispatched_s + predicted_s) + self._limits.grace_s
                self._evaluate(due_s, other)

    def on_ejected(self, attempts: Iterable[Attempt], *, now: float) -> None:
        """Send elsewhere what a replica has not begun to answer that does not answer probes."""
        for attempt in attempts if self.on else ():
            attempt.stranded = True
            if self._may_hedge(attempt):
                self._evaluate(now, attempt)

    def next_timer_s(self) -> float | None:
        """Return when to call `due_hedges`."""
        times = self.watched
        while times:
            due_s, _, attempt = times[0]
            # Most have their first token or have ended; the others are checked when they are due.
            if attempt.first_token_s is None and attempt in attempt.state.open_attempts:
                return due_s
            heappop(times)
        return None

    def due_hedges(self, *, now: float) -> list[Hedge]:
        """Dispatch hedges for late requests."""
        hedges: list[Hedge] = []
        while (due_s := self.next_timer_s()) is not None and due_s <= now:
            attempt = heappop(self.watched)[2]
            hedge = self._hedge(attempt, now) if self._may_hedge(attempt) else None
            if hedge is not None:
                hedges.append(hedge)
        return hedges

    # -- helpers

    def _may_hedge(self, attempt: Attempt) -> bool:
        """Return whether the request may have a second attempt, a budget aside."""
        state = attempt.state
        request = state.request
        return (
            attempt.first_token_s is None
            and not state.hedged
            and not state.closed
            and state.attempts < self._max_attempts
            and len(state.open_attempts) == 1
            and state.open_attempts[0] is attempt
            and (request.streamed or attempt.stranded)
            and request.idempotent
            and request.pinned_replica is None
        )

    def _hedge(self, attempt: Attempt, now: float) -> Hedge | None:
        state = attempt.state
        if not self.on:
            return None
        if not attempt.stranded and not self._budget.available(now=now):
            self._evaluate(now + _LATER_S, attempt)
            return None
        untried = self._filter.eligible(state.request, now).excluding(state.tried_replicas)
        if not untried.replicas:
            self._evaluate(now + _LATER_S, attempt)
            return None
        evaluation = self._dispatcher.evaluate(state.request, untried, now=now)
        if not self._saturation.has_capacity(evaluation.replica, now=now):
            self._evaluate(now + _AGAIN_S, attempt)
            return None
        if not attempt.stranded:
            self._budget.try_spend(now=now)
        state.hedged = True
        dispatch = self._dispatcher.dispatch(state, evaluation, now=now)
        return Hedge(state.request.request_id, dispatch)

    def _evaluate(self, due_s: float, attempt: Attempt) -> None:
        self._number += 1
        heappush(self.watched, (due_s, self._number, attempt))
        if self._number % 4096 == 0:  # entries of ended attempts would pile up
            self.watched = [entry for entry in self.watched if self._may_hedge(entry[2])]
            heapify(self.watched)


def _predicted_s(attempt: Attempt) -> float | None:
    """Return the predicted time from dispatch to first token."""
    predicted_s = attempt.decision.predicted_ttft_s
    if predicted_s is None:
        return None
    return predicted_s - (attempt.dispatched_s - attempt.request.received_s)
