"""Admission: dispatch, queue or reject a request before its first dispatch.

Owns the first evaluation on arrival, later evaluations while the request is queued, and its end there. Leaves capacity
to `fleet.request_filter`, and the choice and the reservation to `dispatch.dispatcher`.

- `meets_deadline`, `misses_deadline` and `shed_at_s` are the rules of shedding.
- `RetryAfter` says when a rejected client should come again.
- `FairQueue` has the requests that wait, in the order in which they are offered a replica.
- `ShedTimers` finds the queued requests that may have become infeasible.
- `AdmissionController` decides.
- `Preconditions` checks what a request needs before its admission.

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

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, merge
from math import inf

from gorgo.core.dispatch.dispatcher import Dispatcher, Evaluation
from gorgo.core.dispatch.in_flight import (
    PoisonPrompts,
    RequestState,
    deadline_exceeded,
    model_not_found,
    no_replica,
    poison_prompt,
    queue_full,
    quota_exceeded,
    region_not_allowed,
    replica_not_found,
    subset_unknown,
    too_many_in_flight,
)
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.request_filter import RequestFilter, SaturationDetector
from gorgo.core.limits import ClientQuotas, OverloadLimits
from gorgo.core.messages.actions import AdmissionAction, Dispatch, Hold, Reject
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Choice, Prediction, takes_objectives

# Whether a request can still meet its deadline: the rules of shedding, as plain functions.
#
# Theory of operation. A request that could meet its deadline on an idle fleet is shed as soon as it no longer can:
# what it would cost is taken from requests that still can. A request that could not meet it even on an idle fleet is
# served, unless it has been queued for `infeasible_max_wait_s`. Shed by its prediction, it would never get into a
# cache, and the later turns of its conversation would be shed as well.


#: Sums of the same times in another order differ by less.
_NOISE_S = 1e-6


def meets_deadline(choice: Choice, *, deadline_s: float) -> bool:
    """Return whether the replica chosen clearly meets the deadline: no prediction of all others says more."""
    return choice.predicted_ttft_s is not None and choice.predicted_ttft_s < deadline_s - _NOISE_S


def misses_deadline(prediction: Prediction, *, waited_s: float, deadline_s: float, limits: OverloadLimits) -> bool:
    """Return whether to shed a request that has waited for `waited_s`."""
    if feasible_idle(prediction, deadline_s=deadline_s):
        least_s: float = min((prediction.idle_s + prediction.backlog_s).tolist())
        return waited_s + least_s > deadline_s
    return waited_s > limits.infeasible_max_wait_s


def feasible_idle(prediction: Prediction, *, deadline_s: float) -> bool:
    """Return whether the request would meet its deadline on an idle fleet."""
    # Of a list: a reduction of numpy takes five times as long for a few.
    return bool(min(prediction.idle_s.tolist()) <= deadline_s)


def shed_at_s(prediction: Prediction, *, received_s: float, deadline_s: float, limits: OverloadLimits) -> float:
    """Return the latest time at which a queued request becomes infeasible, whatever the fleet does."""
    idle_s: float = min(prediction.idle_s.tolist())
    return received_s + (deadline_s - idle_s if idle_s <= deadline_s else limits.infeasible_max_wait_s)


# Retry-After: when a rejected client should come again.
#
# Theory of operation. The queued and the dispatched work takes a known time, but there need be no capacity then: while
# more arrives than can be served, others are queued, and the shortest of them are served first. The end of an overload
# is unknown; the best guess for one that has lasted t is that it lasts t more, so the answer is at least that. An
# overload begins with its first rejection. It has ended when no request was rejected until the last Retry-After was
# over.


#: Least Retry-After, s.
MIN_RETRY_S = 1.0
#: The longest, s: a prediction beyond a minute is no information.
MAX_RETRY_S = 60.0


class RetryAfter:
    """Grows with the age of an overload.

    Example
    -------
    >>> after = RetryAfter()
    >>> after.seconds(2.0, now=100.0), after.seconds(2.0, now=101.5), after.seconds(2.0, now=103.5)
    (2.0, 2.0, 3.5)
    >>> after.seconds(2.0, now=108.0)  # none was rejected until 107: that overload has ended
    2.0
    """

    __slots__ = ("_began_s", "_until_s")

    def __init__(self) -> None:
        #: Start of the present overload, and the latest Retry-After that was answered in it.
        self._began_s = 0.0
        self._until_s = float("-inf")

    def seconds(self, work_s: float, *, now: float) -> float:
        """Return the Retry-After of a request rejected now, with `work_s` of work before it."""
        if now > self._until_s:
            self._began_s = now
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, work_s, now - self._began_s))
        self._until_s = max(self._until_s, now + retry_s)
        return retry_s


# The fair queue: requests that wait at the proxy, in the order in which they are offered a replica.
#
# Theory of operation. The order is by priority, then fair between clients, then shortest first. Fair means start-time
# fair queueing over predicted prefill seconds: each client has a virtual time, the engine time that it was given while
# others waited. Its requests are tagged from that time on, shortest first, and the least tag is served first. So a
# client with a thousand queued requests delays another with one request by one of its own at most, and a lone client
# has its shortest request served first. A client that returns starts at the present virtual time and saves nothing up.
# Strict priority can starve low priorities; deadlines and the bound on the queue limit that.


_Rank = tuple[float, int]
#: Clients whose virtual time is retained while none of their requests is queued.
MAX_CLIENTS = 4096


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """One queued request.

    `prefill_s` is the prediction at its arrival: it orders the request and is charged to the client. `preferred` is the
    replica of the last evaluation, at `evaluated_s`. At `shed_at_s` the request may be infeasible; infinite without a
    deadline.
    """

    state: RequestState
    prefill_s: float
    enqueued_s: float
    number: int = 0
    preferred: str | None = None
    evaluated_s: float = -inf
    shed_at_s: float = inf
    #: Start of the time without a candidate.
    no_replica_since_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.state.request.request_id

    @property
    def _rank(self) -> _Rank:
        return self.prefill_s, self.number


@dataclass(slots=True)
class _ClientQueue:
    """Queued requests of one client at one priority, shortest first."""

    items: list[tuple[float, int, QueuedRequest]] = field(default_factory=list)


class FairQueue:
    """Queued requests by priority, client and length.

    Example
    -------
    >>> from gorgo.core.messages.request import RouteRequest
    >>> def state(name, client):
    ...     return RequestState(RouteRequest(name, 0.0, 1, b"", 64.0, 0, client=client))
    >>> queue = FairQueue()
    >>> for name, client, prefill_s in (("a1", "a", 1.0), ("a2", "a", 0.5), ("b1", "b", 2.0), ("a3", "a", 9.0)):
    ...     queue.add(QueuedRequest(state(name, client), prefill_s, enqueued_s=0.0))
    >>> [queued.request_id for queued in queue]  # a's shortest, then b's, because a would have had its turn
    ['a2', 'b1', 'a1', 'a3']
    """

    def __init__(self) -> None:
        #: By id. Read-only elsewhere: every event asks whether it is empty, and a call of `__len__` takes its time.
        self.requests: dict[str, QueuedRequest] = {}
        self._clients: dict[tuple[int, str | None], _ClientQueue] = {}
        self._virtual_s: dict[str | None, float] = {}
        self._now_s = 0.0
        self._numbers = 0
        self._prefill_s = 0.0

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Yield the requests in order; the queue must not change meanwhile."""
        for priority in sorted({priority for priority, _ in self._clients}, reverse=True):
            client_queues = [(client, queue) for (of, client), queue in self._clients.items() if of == priority]
            if len(client_queues) == 1:
                yield from (queued for _, _, queued in client_queues[0][1].items)
            else:
                yield from (
                    queued for _, _, queued in merge(*(self._tag(client, queue) for client, queue in client_queues))
                )

    @property
    def since_s(self) -> float:
        """When the oldest request was queued; infinite if none is."""
        return next(iter(self.requests.values())).enqueued_s if self.requests else inf

    @property
    def prefill_s(self) -> float:
        """Predicted prefill of all queued requests."""
        return max(0.0, self._prefill_s)

    def get(self, request_id: str) -> QueuedRequest | None:
        return self.requests.get(request_id)

    def add(self, queued: QueuedRequest) -> None:
        request = queued.state.request
        assert queued.request_id not in self.requests, "a request is queued once"
        self._numbers += 1
        queued.number = self._numbers
        self.requests[queued.request_id] = queued
        if not any(client == request.client for _, client in self._clients):
            # An idle client saves nothing up: it starts at the present virtual time.
            self._virtual_s[request.client] = max(self._now_s, self._virtual_s.get(request.client, 0.0))
        client_queue = self._clients.setdefault((request.priority, request.client), _ClientQueue())
        insort(client_queue.items, (queued.prefill_s, queued.number, queued))
        self._prefill_s += queued.prefill_s

    def pop(self, queued: QueuedRequest) -> None:
        """Remove a request that is dispatched, and charge its client."""
        client = queued.state.request.client
        start_s = self._virtual_s[client]
        self._now_s = max(self._now_s, start_s)
        self._virtual_s[client] = start_s + queued.prefill_s
        self.remove(queued)

    def remove(self, queued: QueuedRequest) -> None:
        """Remove a request."""
        request = queued.state.request
        key = request.priority, request.client
        items = self._clients[key].items
        del items[bisect_left(items, queued._rank)]  # a shorter tuple sorts before the item itself
        del self.requests[queued.request_id]
        if not items:
            del self._clients[key]
        self._prefill_s -= queued.prefill_s
        if request.client not in {client for _, client in self._clients} and (
            self._virtual_s[request.client] <= self._now_s or len(self._virtual_s) > MAX_CLIENTS
        ):
            del self._virtual_s[request.client]
        if not self.requests:
            # All clients are equal again, and sums of floats drift.
            self._virtual_s.clear()
            self._now_s = self._prefill_s = 0.0

    def check(self) -> None:
        """Assert every invariant; for tests."""
        items = [item for queue in self._clients.values() for item in queue.items]
        assert sorted(id(queued) for _, _, queued in items) == sorted(id(queued) for queued in self.requests.values())
        assert all(queue.items == sorted(queue.items, key=lambda item: item[:2]) for queue in self._clients.values())
        assert abs(sum(item[0] for item in items) - self._prefill_s) < 1e-6
        assert {client for _, client in self._clients} <= set(self._virtual_s)

    def _tag(self, client: str | None, client_queue: _ClientQueue) -> Iterator[tuple[float, int, QueuedRequest]]:
        tag_s = self._virtual_s[client]
        for prefill_s, number, queued in client_queue.items:
            yield tag_s, number, queued
            tag_s += prefill_s


# Times at which queued requests may have become infeasible, in a heap; entries that left the queue are skipped.


class ShedTimers:
    """One timer per queued request with a deadline.

    Parameters
    ----------
    queue:
        Of the requests.
    """

    __slots__ = ("_queue", "_times")

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue
        self._times: list[tuple[float, int, QueuedRequest]] = []

    def __len__(self) -> int:
        return len(self._times)

    def reset(self, queued: QueuedRequest, shed_at_s: float) -> None:
        """Move the timer of a request."""
        if shed_at_s != queued.shed_at_s:
            queued.shed_at_s = shed_at_s
            self.arm(queued)

    def arm(self, queued: QueuedRequest) -> None:
        """Set the timer of a request to its `shed_at_s`; none if infinite."""
        if queued.shed_at_s == inf:
            return
        heappush(self._times, (queued.shed_at_s, queued.number, queued))
        if len(self._times) > 4 * len(self._queue) + 64:
            self._times = [entry for entry in self._times if self._is_set(entry)]
            heapify(self._times)

    def next_s(self) -> float | None:
        """Return the first time."""
        while self._times and not self._is_queued(self._times[0][2]):
            heappop(self._times)
        return self._times[0][0] if self._times else None

    def due(self, *, now: float) -> Iterator[QueuedRequest]:
        """Yield the requests whose time has come; timers may be set meanwhile."""
        while self._times and self._times[0][0] <= now:
            queued = heappop(self._times)[2]
            if self._is_queued(queued) and queued.shed_at_s <= now:
                yield queued

    def clear(self) -> None:
        self._times.clear()

    def _is_set(self, entry: tuple[float, int, QueuedRequest]) -> bool:
        return self._is_queued(entry[2]) and entry[0] == entry[2].shed_at_s

    def _is_queued(self, queued: QueuedRequest) -> bool:
        return self._queue.get(queued.request_id) is queued


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
        if not self._queues(evaluation):
            return self._dispatcher.dispatch(state, evaluation, now=now)
        evaluation = self._prefer_free_slot(request, evaluation, now)
        self.saturation.queued_since_s = self.queue.since_s
        has_capacity = self.saturation.has_capacity(evaluation.replica, now=now)
        deadline_s = self._deadline_s(request)
        if has_capacity and (deadline_s is None or meets_deadline(evaluation.choice, deadline_s=deadline_s)):
            return self._dispatcher.dispatch(state, evaluation, now=now)
        predicted = None if prediction is None else prediction()
        waited_s = now - request.received_s
        if (
            deadline_s is not None
            and predicted is not None
            and misses_deadline(predicted, waited_s=waited_s, deadline_s=deadline_s, limits=self._limits)
        ):
            evaluation.replica.shed_prefill_s += float(predicted.prefill_s.min())
            return deadline_exceeded(request, self._retry_after_s(now))
        if has_capacity:
            return self._dispatcher.dispatch(state, evaluation, now=now)
        prefill_s = self._least_prefill_s(request) if predicted is None else float(predicted.prefill_s.min())
        queued = QueuedRequest(state, prefill_s, enqueued_s=now)
        queued.preferred, queued.evaluated_s = evaluation.replica.spec.name, now
        queued.shed_at_s = self._shed_at_s(request, predicted, deadline_s)
        return self._enqueue(queued, now)

    def drain_queue(self, *, now: float) -> list[AdmissionResult]:
        """Dispatch queued requests in order while replicas have capacity, and shed those that are infeasible."""
        self.needs_drain = False
        self.saturation.queued_since_s = self.queue.since_s
        if not self.queue:
            self._shed_timers.clear()
            return []
        self._drained_s = now
        actions = self._shed_late(now)
        saturated, all_are = self._saturated(now)
        if all_are:
            return actions
        evaluations, began_s = 0, now if self._sweep_s is None else self._sweep_s
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
                saturated, all_are = self._saturated(now)
            if action is not None:
                actions.append((queued.state, action))
            evaluations += queued.no_replica_since_s is None  # without a candidate no policy is called
            if all_are:
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
        due_s, shed_s = self.saturation.next_free_s(now=now), self._shed_timers.next_s()
        again_s = self._drained_s + REEVALUATE_S
        if self._limits.queue_enabled and again_s < due_s and self.saturation.any_has_capacity(now=now):
            due_s = again_s
        if shed_s is not None and shed_s < due_s:
            due_s = shed_s
        return due_s if due_s < inf else None

    # -- helpers

    def _queues(self, evaluation: Evaluation) -> bool:
        """Return whether a request waits at the proxy for a replica with capacity."""
        predicts = evaluation.choice.prediction is not None
        return self._limits.queue_enabled and (predicts or self._limits.queue_every_policy)

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
            self._count_shed(queued)
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
        if not self._queues(evaluation):
            return self._dispatch(queued, evaluation, now)
        evaluation = self._prefer_free_slot(request, evaluation, now)
        queued.preferred, queued.evaluated_s = evaluation.replica.spec.name, now
        deadline_s = self._deadline_s(request)
        predicted = None if deadline_s is None or prediction is None else prediction()
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
        self._count_shed(queued)
        return deadline_exceeded(queued.state.request, self._retry_after_s(now))

    def _count_shed(self, queued: QueuedRequest) -> None:
        """Count the work of a shed request where it would have gone: no queue has it any more."""
        replica = self._fleet.replicas.get(queued.preferred or "")
        if replica is not None:
            replica.shed_prefill_s += queued.prefill_s

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

    def _saturated(self, now: float) -> tuple[set[str], bool]:
        """Return which replicas that queued requests prefer are saturated, and whether all replicas of the fleet are.

        While queueing is off no replica counts as saturated.
        """
        if not self._limits.queue_enabled:
            return set(), False
        replicas, saturation = self._fleet.replicas, self.saturation
        preferred = replicas.keys() & {queued.preferred for queued in self.queue.requests.values()}
        saturated = {name for name in preferred if not saturation.has_capacity(replicas[name], now=now)}
        some = len(saturated) < len(preferred) or saturation.any_has_capacity(now=now, besides=saturated)
        return saturated, not some and bool(replicas)

    def _deadline_s(self, request: RouteRequest) -> float | None:
        """Return by when a request has to have its first token, s from its arrival; `None`: it is not shed.

        Under a policy that takes objectives its own time steers it; it sheds a request of negative priority, as in
        llm-d, or all by `shed_on_objective`.
        """
        own_s = request.slo_ttft_s
        if own_s is None:
            return self._limits.slo_ttft_s
        if request.priority < 0 or self._limits.shed_on_objective or not takes_objectives(self._dispatcher.policy):
            return own_s
        return self._limits.slo_ttft_s

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


class Preconditions:
    """Checks requests before their admission.

    Parameters
    ----------
    fleet, request_filter, quotas, poison:
        The Router's.
    """

    __slots__ = ("_filter", "_fleet", "_poison", "_quotas")

    def __init__(
        self, fleet: Fleet, request_filter: RequestFilter, quotas: ClientQuotas, poison: PoisonPrompts
    ) -> None:
        self._fleet = fleet
        self._filter = request_filter
        self._quotas = quotas
        self._poison = poison

    def refuse(self, request: RouteRequest, *, unfinished: int, most: int, now: float) -> Reject | None:
        """Reject a request that no replica can serve or that is over a limit; else count it for its client.

        `unfinished` attempts and queued requests are in the Router, of `most`.
        """
        if not self._fleet.eligibility.serves(request.model):
            return model_not_found(request)
        if unfinished >= most:
            return too_many_in_flight(request, most)
        if request.pinned_replica is not None and request.pinned_replica not in self._fleet.replicas:
            return replica_not_found(request)
        if request.regions is not None and not self._filter.has_replica_in(request.regions, request):
            return region_not_allowed(request)
        if request.replicas is not None and not self._filter.has_replica_of_subset(request):
            return subset_unknown(request)
        poison = self._poison.known(request, now=now)
        if poison is not None:
            return poison_prompt(request, poison)
        exceeded = self._quotas.acquire(request.client, now=now, tokens=request.prompt_tokens)
        return None if exceeded is None else quota_exceeded(request, exceeded)
