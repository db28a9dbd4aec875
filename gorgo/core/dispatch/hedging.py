"""A second attempt on evidence that the first one is stuck, within a budget.

Owns what counts as evidence, the times at which to look for it, and the budget. Whose first content comes first is the
shell's to see, and the loser's end the Router's to ask for.

Theory of operation. A request is late when its first token is later than predicted by `late_s` or by as much as was
predicted, whichever is more. It is overtaken when one that was sent to the same replica after it has its first token,
while its own should have come as well: what was lost is then its own, on the path or in the engine, and there is no
reason to wait for more. Both are looked at once, with a moment's grace for tokens of one step that come in any order.
It is sent to another replica only if that one is open, so that a fleet with too much to do does not get more. After
content there is nothing to hedge, and nobody is asked twice over.

Times wait in a heap; those of attempts that have their first token are passed over.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from gorgo.core.dispatch.budget import RatioBudget
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.fleet.saturation import SaturationDetector
from gorgo.core.limits import HedgeLimits
from gorgo.core.messages.actions import Hedge

#: A hedge for which nobody is open is looked at again after this, s.
_AGAIN_S = 0.25


class Hedger:
    """Looks for late requests.

    Parameters
    ----------
    placer, doors:
        The Router's.
    request_filter:
        Candidates of a request.
    limits, max_attempts:
        May be replaced by `set_limits`; replicas that one request may be sent to.
    """

    def __init__(
        self,
        placer: Dispatcher,
        doors: SaturationDetector,
        request_filter: RequestFilter,
        limits: HedgeLimits,
        *,
        max_attempts: int,
    ) -> None:
        self._dispatcher = placer
        self._saturation = doors
        self._filter = request_filter
        self._times: list[tuple[float, int, Attempt]] = []
        self._number = 0
        self.set_limits(limits, max_attempts=max_attempts)

    def set_limits(self, limits: HedgeLimits, *, max_attempts: int) -> None:
        self._limits, self._max_attempts = limits, max_attempts
        self._dispatcher.on_reserved = self.watch if self.on else None
        self._budget = RatioBudget(share=limits.budget_ratio, minimum=0, window_s=limits.window_s)

    @property
    def on(self) -> bool:
        return self._limits.budget_ratio > 0.0

    def record_request(self, *, now: float) -> None:
        """One more request, of which a share may be hedged."""
        self._budget.record(now=now)

    def watch(self, attempt: Attempt) -> None:
        """Set the time at which a reserved attempt counts as late."""
        predicted_s, request = _predicted_s(attempt), attempt.state.request
        if predicted_s is not None and request.streamed and request.idempotent:
            self._evaluate(attempt.dispatched_s + predicted_s + max(self._limits.delay_s, predicted_s), attempt)

    def on_overtaken(self, attempts: list[Attempt], *, now: float) -> None:
        """One that was sent to their replica after them has its first token."""
        for other in attempts:
            predicted_s = _predicted_s(other)
            if predicted_s is not None and self._has_budget(other):
                due_s = max(now, other.dispatched_s + predicted_s) + self._limits.grace_s
                self._evaluate(due_s, other)

    def next_timer_s(self) -> float | None:
        """When `look` is next of use."""
        times = self._times
        while times:
            due_s, _, attempt = times[0]
            # Most have their first token by now, or have ended; the rest is asked when it is due.
            if attempt.first_token_s is None and attempt in attempt.state.open_attempts:
                return due_s
            heappop(times)
        return None

    def due_hedges(self, *, now: float) -> list[Hedge]:
        """Send those again whose time is up."""
        hedges: list[Hedge] = []
        while (due_s := self.next_timer_s()) is not None and due_s <= now:
            attempt = heappop(self._times)[2]
            hedge = self._hedge(attempt, now) if self._has_budget(attempt) else None
            if hedge is not None:
                hedges.append(hedge)
        return hedges

    # -- helpers

    def _has_budget(self, attempt: Attempt) -> bool:
        state = attempt.state
        request = state.request
        return (
            attempt.first_token_s is None
            and not state.hedged
            and not state.closed
            and state.attempts < self._max_attempts
            and len(state.open_attempts) == 1
            and state.open_attempts[0] is attempt
            and request.streamed
            and request.idempotent
            and request.pinned_replica is None
        )

    def _hedge(self, attempt: Attempt, now: float) -> Hedge | None:
        state = attempt.state
        if not self._budget.available(now=now):
            return None
        left = self._filter.eligible(state.request, now).excluding(state.tried_replicas)
        if not left.replicas:
            return None
        placement = self._dispatcher.evaluate(state.request, left, now=now)
        if not self._saturation.has_capacity(placement.replica, now=now):
            self._evaluate(now + _AGAIN_S, attempt)
            return None
        self._budget.try_spend(now=now)
        state.hedged = True
        dispatch = self._dispatcher.dispatch(state, placement, now=now)
        return Hedge(state.request.request_id, dispatch)

    def _evaluate(self, due_s: float, attempt: Attempt) -> None:
        self._number += 1
        heappush(self._times, (due_s, self._number, attempt))
        if self._number % 4096 == 0:  # what is over long before its time would pile up
            self._times = [entry for entry in self._times if self._has_budget(entry[2])]
            heapify(self._times)


def _predicted_s(attempt: Attempt) -> float | None:
    """From its dispatch to its first token."""
    predicted_s = attempt.decision.predicted_ttft_s
    if predicted_s is None:
        return None
    return predicted_s - (attempt.dispatched_s - attempt.state.request.received_s)
