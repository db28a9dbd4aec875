"""Who goes to a replica now, who waits at the proxy, and who is turned away.

Owns the life of a request before its first dispatch: one look on arrival, further looks while it waits, and its end.
The rules are `overload`, the order `waiting_room`, the choice and the reservation `placing`.

Theory of operation. A request goes to the replica that is cheapest of all, if that one is open; if not it waits for it,
and later ones may pass. How long a place in a full batch takes to come is in no cost, and how many places there are is
a guess for each replica; so one without a place is left for the next best that has one and has as much of the prompt
cached, if that costs no more than the time in which one place comes free. Where less is cached, or it costs more, the
place is waited for: going elsewhere would take time of the engines from all who wait.

Whatever can open a replica (a first token, an end, time) has the room walked in order until nobody who was looked at
can go. A walk looks at so many at most, and not again within a moment at who wants a replica that is still closed, so
that an event costs a bounded time however many wait; who was left out is next. A request that arrives is looked at
alone: everything open has been offered to those who were there before.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from gorgo.core.admission.deadline import misses_deadline, shed_at_s
from gorgo.core.admission.queue import FairQueue, QueuedRequest
from gorgo.core.admission.retry_after import MIN_RETRY_S, RetryAfter
from gorgo.core.dispatch.dispatcher import Dispatcher, Evaluation
from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.dispatch.outcomes import deadline_exceeded, no_replica, queue_full
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.fleet.saturation import SaturationDetector
from gorgo.core.limits import OverloadLimits
from gorgo.core.messages.actions import AdmissionAction, Dispatch, Hold, Reject
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.choice import Prediction

#: Looks per walk: two milliseconds at 30 us each.
MAX_EVALUATIONS = 64
#: Who wants a closed replica is not looked at again for so long, s: costs drift slowly, and by events that are fewer.
REEVALUATE_S = 0.05

#: Who waited, and how that ended.
AdmissionResult = tuple[RequestState, Dispatch | Reject]


class AdmissionController:
    """Decides between Dispatch, Hold and Reject.

    Parameters
    ----------
    fleet, placer:
        The Router's.
    request_filter:
        Candidates of a request.
    limits:
        May be replaced by `set_limits`.
    """

    def __init__(self, fleet: Fleet, placer: Dispatcher, request_filter: RequestFilter, limits: OverloadLimits) -> None:
        self._fleet = fleet
        self._placer = placer
        self._filter = request_filter
        self.saturation = SaturationDetector(fleet, limits)
        self.queue = FairQueue()
        self._retry_after = RetryAfter()
        self._limits = limits
        #: (time, number, who) at which a time may be over; those who have left are passed over.
        self._shed_timers: list[tuple[float, int, QueuedRequest]] = []
        self._drained_s = float("-inf")
        #: When the look at all began that a walk had to break off; `None` if the last one came to the end.
        self._sweep_s: float | None = None
        #: Something happened that may have opened a replica, and the room has not been walked since.
        self.needs_drain = False

    def set_limits(self, limits: OverloadLimits) -> None:
        self._limits = self.saturation.limits = limits
        self.needs_drain = True

    def admit(self, state: RequestState, *, now: float) -> AdmissionAction:
        """A new request: where to, or that it waits, or that it is turned away."""
        request = state.request
        eligible = self._filter.eligible(request, now)
        if not eligible.replicas:
            return self._queue_without_replica(state, now)
        placement = self._placer.evaluate(request, eligible, now=now)
        forecast = placement.choice.prediction
        if forecast is None or not self._limits.queue_enabled:
            return self._placer.dispatch(state, placement, now=now)
        placement = self._prefer_free_slot(request, placement, now)
        opened = self.saturation.has_capacity(placement.replica, now=now)
        deadline_s = self._deadline_s(request)
        if opened and deadline_s is None:
            return self._placer.dispatch(state, placement, now=now)
        predicted = forecast()
        waited_s = now - request.received_s
        if deadline_s is not None and misses_deadline(
            predicted, waited_s=waited_s, deadline_s=deadline_s, limits=self._limits
        ):
            return deadline_exceeded(request, self._retry_after_s(now))
        if opened:
            return self._placer.dispatch(state, placement, now=now)
        held = QueuedRequest(state, float(predicted.prefill_s.min()), enqueued_s=now)
        held.preferred, held.evaluated_s = placement.replica.spec.name, now
        held.shed_at_s = self._shed_at_s(request, predicted, deadline_s)
        return self._enqueue(held, now)

    def drain_queue(self, *, now: float) -> list[AdmissionResult]:
        """Offer what is open to those who wait, in order, and turn away whose time is over."""
        self.needs_drain = False
        if not self.queue:
            self._shed_timers.clear()
            return []
        self._drained_s = now
        actions = self._shed_late(now)
        looks, closed = 0, self._is_saturated(now)
        began_s = now if self._sweep_s is None else self._sweep_s
        if closed and len(closed) == len(self._fleet.replicas):
            return actions
        for held in list(self.queue):
            if held.preferred in closed and (now - held.evaluated_s < REEVALUATE_S or held.evaluated_s >= began_s):
                continue
            if looks == MAX_EVALUATIONS:
                self._sweep_s = began_s
                return actions
            action = self._reevaluate(held, now)
            if isinstance(action, Dispatch):
                closed = self._is_saturated(now)
            if action is not None:
                actions.append((held.state, action))
            looks += held.no_replica_since_s is None  # who has nobody to go to is asked nothing
            if closed and len(closed) == len(self._fleet.replicas):
                break
        self._sweep_s = None
        return actions

    def cancel(self, request_id: str) -> RequestState | None:
        """Its client is gone. The request, if it waited."""
        held = self.queue.get(request_id)
        if held is None:
            return None
        self.queue.remove(held)
        return held.state

    def next_timer_s(self, *, now: float) -> float | None:
        """When `walk` is next of use; `None` while nobody waits."""
        if not self.queue:
            return None
        if self.needs_drain:
            return now
        due = [
            at
            for member in self._fleet.replicas.values()
            if (at := self.saturation.free_at_s(member, now=now)) is not None
        ]
        if self._limits.queue_enabled and len(self._is_saturated(now)) < len(self._fleet.replicas):
            due.append(self._drained_s + REEVALUATE_S)
        while self._shed_timers and not self._is_queued(self._shed_timers[0][2]):
            heappop(self._shed_timers)
        if self._shed_timers:
            due.append(self._shed_timers[0][0])
        return min(due, default=None)

    # -- helpers

    def _prefer_free_slot(self, request: RouteRequest, best: Evaluation, now: float) -> Evaluation:
        """`best`, or the next best that has a place and as much of the prompt, where that costs less than waiting."""
        cost, row, eligible = best.choice.cost, best.choice.row, best.eligible
        if cost is None or self._placer.policy.unit != "ms" or self.saturation.has_slot(best.replica):
            return best
        cached = best.matched[eligible.slots]
        fit = [
            other
            for other, member in enumerate(eligible.replicas)
            if cached[other] >= cached[row] and self.saturation.has_slot(member)
        ]
        dearer_s = min((float(cost[other] - cost[row]) for other in fit), default=inf) / 1e3
        if dearer_s > best.replica.concurrency.slot_wait_s:
            return best
        unfit = set(eligible.names) - {eligible.names[other] for other in fit}
        return self._placer.evaluate(request, eligible.excluding(unfit, "full"), now=now)

    def _enqueue(self, held: QueuedRequest, now: float) -> Hold | Reject:
        request = held.state.request
        if not self.queue:
            # Whatever happened before, this one was asked after it.
            self.needs_drain, self._drained_s = False, now
        if len(self.queue) >= self._limits.queue_max_requests:
            return queue_full(request, self._limits.queue_max_requests, self._retry_after_s(now))
        self.queue.add(held)
        self._arm_timer(held)
        return Hold(request.request_id)

    def _queue_without_replica(self, state: RequestState, now: float) -> Hold | Reject:
        """Nobody can take it, open or not."""
        if self._limits.no_replica_wait_s <= 0.0:
            return no_replica(state.request, self._readmission_s(now))
        held = QueuedRequest(state, self._least_prefill_s(state.request), enqueued_s=now, no_replica_since_s=now)
        held.shed_at_s = self._give_up_at_s(held)
        return self._enqueue(held, now)

    def _least_prefill_s(self, request: RouteRequest) -> float:
        """By the priors, of a request that no policy is asked about: by it clients take turns."""
        tokens = request.prompt_tokens
        told = (
            member.prior.seconds(tokens, 0) * member.prefill_queue.speed.factor
            for member in self._fleet.replicas.values()
        )
        return min(told, default=0.0)

    def _reevaluate(self, held: QueuedRequest, now: float) -> Dispatch | Reject | None:
        request = held.state.request
        eligible = self._filter.eligible(request, now)
        if not eligible.replicas:
            return self._without_replica(held, now)
        held.no_replica_since_s = None
        placement = self._placer.evaluate(request, eligible, now=now)
        forecast = placement.choice.prediction
        if not self._limits.queue_enabled or forecast is None:
            return self._dispatch(held, placement, now)
        placement = self._prefer_free_slot(request, placement, now)
        held.preferred, held.evaluated_s = placement.replica.spec.name, now
        predicted, deadline_s = forecast(), self._deadline_s(request)
        if deadline_s is not None:
            waited_s = now - request.received_s
            if misses_deadline(predicted, waited_s=waited_s, deadline_s=deadline_s, limits=self._limits):
                return self._shed(held, now)
        if self.saturation.has_capacity(placement.replica, now=now):
            return self._dispatch(held, placement, now)
        self._set_shed_timer(held, self._shed_at_s(request, predicted, deadline_s))
        return None

    def _dispatch(self, held: QueuedRequest, placement: Evaluation, now: float) -> Dispatch:
        self.queue.pop(held)
        return self._placer.dispatch(held.state, placement, now=now)

    def _shed(self, held: QueuedRequest, now: float) -> Reject:
        self.queue.remove(held)
        return deadline_exceeded(held.state.request, self._retry_after_s(now))

    def _without_replica(self, held: QueuedRequest, now: float) -> Reject | None:
        if held.no_replica_since_s is None:
            held.no_replica_since_s = now
        over_s = self._give_up_at_s(held)
        if now < over_s:
            held.preferred, held.evaluated_s = None, now
            self._set_shed_timer(held, over_s)
            return None
        self.queue.remove(held)
        return no_replica(held.state.request, self._readmission_s(now))

    def _give_up_at_s(self, held: QueuedRequest) -> float:
        """How long it waits for anybody at all; not beyond its deadline."""
        assert held.no_replica_since_s is not None, "it has somewhere to go"
        over_s, deadline_s = (
            held.no_replica_since_s + self._limits.no_replica_wait_s,
            self._deadline_s(held.state.request),
        )
        return over_s if deadline_s is None else min(over_s, held.state.request.received_s + deadline_s)

    def _shed_late(self, now: float) -> list[AdmissionResult]:
        """Those whose time may be over are looked at out of turn."""
        actions: list[AdmissionResult] = []
        while self._shed_timers and self._shed_timers[0][0] <= now:
            held = heappop(self._shed_timers)[2]
            if self._is_queued(held) and held.shed_at_s <= now:
                action = self._reevaluate(held, now)
                if action is None and held.shed_at_s <= now:
                    action = self._shed(held, now)
                if action is not None:
                    actions.append((held.state, action))
        return actions

    def _shed_at_s(self, request: RouteRequest, predicted: Prediction, deadline_s: float | None) -> float:
        if deadline_s is None:
            return float("inf")
        return shed_at_s(predicted, received_s=request.received_s, deadline_s=deadline_s, limits=self._limits)

    def _set_shed_timer(self, held: QueuedRequest, drop_s: float) -> None:
        if drop_s != held.shed_at_s:
            held.shed_at_s = drop_s
            self._arm_timer(held)

    def _arm_timer(self, held: QueuedRequest) -> None:
        if held.shed_at_s == float("inf"):
            return
        heappush(self._shed_timers, (held.shed_at_s, held.number, held))
        if len(self._shed_timers) > 4 * len(self.queue) + 64:
            self._shed_timers = [
                entry for entry in self._shed_timers if self._is_queued(entry[2]) and entry[0] == entry[2].shed_at_s
            ]
            heapify(self._shed_timers)

    def _is_queued(self, held: QueuedRequest) -> bool:
        return self.queue.get(held.request_id) is held

    def _is_saturated(self, now: float) -> set[str]:
        """Nobody is while nothing is held back."""
        if not self._limits.queue_enabled:
            return set()
        return {
            name for name, member in self._fleet.replicas.items() if not self.saturation.has_capacity(member, now=now)
        }

    def _deadline_s(self, request: RouteRequest) -> float | None:
        return self._limits.slo_ttft_s if request.slo_ttft_s is None else request.slo_ttft_s

    def _retry_after_s(self, now: float) -> float:
        """For a request that is turned away now: what waits and what was sent has to be prefilled before it."""
        members = [member for member in self._fleet.replicas.values() if member.health.can_accept]
        if not members:
            return MIN_RETRY_S
        work_s = sum(self.saturation.backlog_s(member, now=now) for member in members)
        return self._retry_after.seconds((work_s + self.queue.prefill_s) / len(members), now=now)

    def _readmission_s(self, now: float) -> float:
        """When the first ejected replica may be tried again."""
        wakes = [member.health.backoff_until_s for member in self._fleet.replicas.values()]
        return max(MIN_RETRY_S, min((at for at in wakes if at is not None), default=now) - now)
