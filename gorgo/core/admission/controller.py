"""Admission: dispatch, queue or reject a request before its first dispatch.

Owns the first evaluation on arrival, later evaluations while the request is queued, and its end there. The rules are
`fleet.saturation` and `deadline`, the order `queue`, the choice and the reservation `dispatch.dispatcher`.

Theory of operation. A request goes to the replica with the least cost of all, if that has capacity; else it is queued
for it, and later requests may pass. The time until a slot is free is in no cost, and the number of slots is estimated
per replica. So a replica without a slot is passed over for the next best that has one and as much of the prompt cached,
if that costs no more than the time in which one slot becomes free. Where less is cached, or it costs more, the request
waits for the slot: going elsewhere would take engine time from all that are queued.

Whatever can give a replica capacity (a first token, an end, time) drains the queue in order. A drain evaluates a
bounded number of requests, and no request again within a moment while its preferred replica is saturated: an event
costs a bounded time however long the queue is, and the next drain goes on with the rest. A request that arrives is
evaluated alone: all capacity has been offered to those queued before it.
"""

from __future__ import annotations

from math import inf

from gorgo.core.admission.deadline import meets_deadline, misses_deadline, shed_at_s
from gorgo.core.admission.queue import FairQueue, QueuedRequest
from gorgo.core.admission.retry_after import MIN_RETRY_S, RetryAfter
from gorgo.core.admission.shed_timers import ShedTimers
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.evaluation import Evaluation
from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.dispatch.outcomes import deadline_exceeded, no_replica, queue_full
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.fleet.saturation import SaturationDetector
from gorgo.core.limits import OverloadLimits
from gorgo.core.messages.actions import AdmissionAction, Dispatch, Hold, Reject
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.choice import Prediction

#: Evaluations per drain: two milliseconds at 30 us each.
MAX_EVALUATIONS = 64
#: Pause before a request is evaluated again while its preferred replica is saturated, s: costs drift slowly.
REEVALUATE_S = 0.05

#: A request that leaves the queue, and its action.
AdmissionResult = tuple[RequestState, Dispatch | Reject]


class AdmissionController:
    """Decides between Dispatch, Hold and Reject.

    Parameters
    ----------
    fleet, dispatcher, request_filter:
        The Router's.
    limits:
        May be replaced by `set_limits`.
    """

    def __init__(
        self, fleet: Fleet, dispatcher: Dispatcher, request_filter: RequestFilter, limits: OverloadLimits
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._filter = request_filter
        self.saturation = SaturationDetector(fleet, limits)
        self.queue = FairQueue()
        self._retry_after = RetryAfter()
        self._limits = limits
        self._shed_timers = ShedTimers(self.queue)
        self._drained_s = float("-inf")
        #: Start of the pass over the queue that a drain left unfinished; `None` if the last one was complete.
        self._sweep_s: float | None = None
        #: A replica may have capacity since the last drain.
        self.needs_drain = False

    def set_limits(self, limits: OverloadLimits) -> None:
        self._limits = self.saturation.limits = limits
        self.needs_drain = True

    def admit(self, state: RequestState, *, now: float) -> AdmissionAction:
        """Dispatch, queue or reject a new request."""
        request = state.request
        eligible = self._filter.eligible(request, now)
        if not eligible.replicas:
            return self._queue_without_replica(state, now)
        evaluation = self._dispatcher.evaluate(request, eligible, now=now)
        prediction = evaluation.choice.prediction
        if prediction is None or not self._limits.queue_enabled:
            return self._dispatcher.dispatch(state, evaluation, now=now)
        evaluation = self._prefer_free_slot(request, evaluation, now)
        has_capacity = self.saturation.has_capacity(evaluation.replica, now=now)
        deadline_s = self._deadline_s(request)
        if has_capacity and (deadline_s is None or meets_deadline(evaluation.choice, deadline_s=deadline_s)):
            return self._dispatcher.dispatch(state, evaluation, now=now)
        predicted = prediction()
        waited_s = now - request.received_s
        if deadline_s is not None and misses_deadline(
            predicted, waited_s=waited_s, deadline_s=deadline_s, limits=self._limits
        ):
            return deadline_exceeded(request, self._retry_after_s(now))
        if has_capacity:
            return self._dispatcher.dispatch(state, evaluation, now=now)
        queued = QueuedRequest(state, float(predicted.prefill_s.min()), enqueued_s=now)
        queued.preferred, queued.evaluated_s = evaluation.replica.spec.name, now
        queued.shed_at_s = self._shed_at_s(request, predicted, deadline_s)
        return self._enqueue(queued, now)

    def drain_queue(self, *, now: float) -> list[AdmissionResult]:
        """Dispatch queued requests in order while replicas have capacity, and shed those that are infeasible."""
        self.needs_drain = False
        if not self.queue:
            self._shed_timers.clear()
            return []
        self._drained_s = now
        actions = self._shed_late(now)
        evaluations, saturated = 0, self._saturated(now)
        began_s = now if self._sweep_s is None else self._sweep_s
        if saturated and len(saturated) == len(self._fleet.replicas):
            return actions
        for queued in list(self.queue):
            if queued.preferred in saturated and (
                now - queued.evaluated_s < REEVALUATE_S or queued.evaluated_s >= began_s
            ):
                continue
            if evaluations == MAX_EVALUATIONS:
                self._sweep_s = began_s
                return actions
            action = self._reevaluate(queued, now)
            if isinstance(action, Dispatch):
                saturated = self._saturated(now)
            if action is not None:
                actions.append((queued.state, action))
            evaluations += queued.no_replica_since_s is None  # without a candidate no policy is called
            if saturated and len(saturated) == len(self._fleet.replicas):
                break
        self._sweep_s = None
        return actions

    def cancel(self, request_id: str) -> RequestState | None:
        """Remove a queued request; return `None` if it is not queued."""
        queued = self.queue.get(request_id)
        if queued is None:
            return None
        self.queue.remove(queued)
        return queued.state

    def next_timer_s(self, *, now: float) -> float | None:
        """Return when to call `drain_queue`; `None` while the queue is empty."""
        if not self.queue:
            return None
        if self.needs_drain:
            return now
        due = [
            at
            for replica in self._fleet.replicas.values()
            if (at := self.saturation.free_at_s(replica, now=now)) is not None
        ]
        if self._limits.queue_enabled and len(self._saturated(now)) < len(self._fleet.replicas):
            due.append(self._drained_s + REEVALUATE_S)
        shed_s = self._shed_timers.next_s()
        if shed_s is not None:
            due.append(shed_s)
        return min(due, default=None)

    # -- helpers

    def _prefer_free_slot(self, request: RouteRequest, best: Evaluation, now: float) -> Evaluation:
        """Return `best`, or the next best with a free slot and as much cached, if that costs less than to wait."""
        cost, row, eligible = best.choice.cost, best.choice.row, best.eligible
        if cost is None or self._dispatcher.policy.unit != "ms" or self.saturation.has_slot(best.replica):
            return best
        cached = best.matched[eligible.slots]
        better = [
            other
            for other, replica in enumerate(eligible.replicas)
            if cached[other] >= cached[row] and self.saturation.has_slot(replica)
        ]
        extra_s = min((float(cost[other] - cost[row]) for other in better), default=inf) / 1e3
        if extra_s > best.replica.concurrency.slot_wait_s:
            return best
        excluded = set(eligible.names) - {eligible.names[other] for other in better}
        return self._dispatcher.evaluate(request, eligible.excluding(excluded, "full"), now=now)

    def _enqueue(self, queued: QueuedRequest, now: float) -> Hold | Reject:
        request = queued.state.request
        if not self.queue:
            # Nothing was queued: earlier events gave this request no capacity.
            self.needs_drain, self._drained_s = False, now
        if len(self.queue) >= self._limits.queue_max_requests:
            return queue_full(request, self._limits.queue_max_requests, self._retry_after_s(now))
        self.queue.add(queued)
        self._shed_timers.arm(queued)
        return Hold(request.request_id)

    def _queue_without_replica(self, state: RequestState, now: float) -> Hold | Reject:
        """Queue a request without a candidate for a while, or reject it."""
        if self._limits.no_replica_wait_s <= 0.0:
            return no_replica(state.request, self._readmission_s(now))
        queued = QueuedRequest(state, self._least_prefill_s(state.request), enqueued_s=now, no_replica_since_s=now)
        queued.shed_at_s = self._give_up_at_s(queued)
        return self._enqueue(queued, now)

    def _least_prefill_s(self, request: RouteRequest) -> float:
        """Return the least prefill by the priors: the fair queue charges it to the client."""
        tokens = request.prompt_tokens
        prefills_s = (
            replica.prior.seconds(tokens, 0) * replica.prefill_queue.speed.factor
            for replica in self._fleet.replicas.values()
        )
        return min(prefills_s, default=0.0)

    def _reevaluate(self, queued: QueuedRequest, now: float) -> Dispatch | Reject | None:
        request = queued.state.request
        eligible = self._filter.eligible(request, now)
        if not eligible.replicas:
            return self._without_replica(queued, now)
        queued.no_replica_since_s = None
        evaluation = self._dispatcher.evaluate(request, eligible, now=now)
        prediction = evaluation.choice.prediction
        if not self._limits.queue_enabled or prediction is None:
            return self._dispatch(queued, evaluation, now)
        evaluation = self._prefer_free_slot(request, evaluation, now)
        queued.preferred, queued.evaluated_s = evaluation.replica.spec.name, now
        deadline_s = self._deadline_s(request)
        predicted = None if deadline_s is None else prediction()
        if deadline_s is not None and predicted is not None:
            waited_s = now - request.received_s
            if misses_deadline(predicted, waited_s=waited_s, deadline_s=deadline_s, limits=self._limits):
                return self._shed(queued, now)
        if self.saturation.has_capacity(evaluation.replica, now=now):
            return self._dispatch(queued, evaluation, now)
        self._shed_timers.reset(queued, self._shed_at_s(request, predicted, deadline_s))
        return None

    def _dispatch(self, queued: QueuedRequest, evaluation: Evaluation, now: float) -> Dispatch:
        self.queue.pop(queued)
        return self._dispatcher.dispatch(queued.state, evaluation, now=now)

    def _shed(self, queued: QueuedRequest, now: float) -> Reject:
        self.queue.remove(queued)
        return deadline_exceeded(queued.state.request, self._retry_after_s(now))

    def _without_replica(self, queued: QueuedRequest, now: float) -> Reject | None:
        if queued.no_replica_since_s is None:
            queued.no_replica_since_s = now
        give_up_at_s = self._give_up_at_s(queued)
        if now < give_up_at_s:
            queued.preferred, queued.evaluated_s = None, now
            self._shed_timers.reset(queued, give_up_at_s)
            return None
        self.queue.remove(queued)
        return no_replica(queued.state.request, self._readmission_s(now))

    def _give_up_at_s(self, queued: QueuedRequest) -> float:
        """Return when a request without a candidate is rejected: not after its deadline."""
        assert queued.no_replica_since_s is not None, "it has no candidate"
        give_up_at_s, deadline_s = (
            queued.no_replica_since_s + self._limits.no_replica_wait_s,
            self._deadline_s(queued.state.request),
        )
        return give_up_at_s if deadline_s is None else min(give_up_at_s, queued.state.request.received_s + deadline_s)

    def _shed_late(self, now: float) -> list[AdmissionResult]:
        """Evaluate requests out of turn whose shed time has come."""
        actions: list[AdmissionResult] = []
        for queued in self._shed_timers.due(now=now):
            action = self._reevaluate(queued, now)
            if action is None and queued.shed_at_s <= now:
                action = self._shed(queued, now)
            if action is not None:
                actions.append((queued.state, action))
        return actions

    def _shed_at_s(self, request: RouteRequest, predicted: Prediction | None, deadline_s: float | None) -> float:
        if deadline_s is None or predicted is None:
            return inf
        return shed_at_s(predicted, received_s=request.received_s, deadline_s=deadline_s, limits=self._limits)

    def _saturated(self, now: float) -> set[str]:
        """Return the saturated replicas; empty if queueing is off."""
        if not self._limits.queue_enabled:
            return set()
        return {
            name for name, replica in self._fleet.replicas.items() if not self.saturation.has_capacity(replica, now=now)
        }

    def _deadline_s(self, request: RouteRequest) -> float | None:
        return self._limits.slo_ttft_s if request.slo_ttft_s is None else request.slo_ttft_s

    def _retry_after_s(self, now: float) -> float:
        """Return the Retry-After of a request rejected now: the queued and the dispatched prefill come before it."""
        replicas = [replica for replica in self._fleet.replicas.values() if replica.health.can_accept]
        if not replicas:
            return MIN_RETRY_S
        work_s = sum(self.saturation.backlog_s(replica, now=now) for replica in replicas)
        return self._retry_after.seconds((work_s + self.queue.prefill_s) / len(replicas), now=now)

    def _readmission_s(self, now: float) -> float:
        """Return the time until the first back-off ends."""
        backoffs = [replica.health.backoff_until_s for replica in self._fleet.replicas.values()]
        return max(MIN_RETRY_S, min((at for at in backoffs if at is not None), default=now) - now)
