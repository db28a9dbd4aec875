"""When a replica has enough to do, and when a request has no chance left: the rules of overload, as plain functions.

Owns the bounds and the two questions. Who waits is `waiting_room`, what happens to whom is `front_door`.

Theory of operation. Work that waits at the proxy can still go elsewhere, be put in order or be given up; work that was
sent cannot. So a replica is *open* only while it has little to do. Which replica is best is asked of all of them, open
or not: who would take the best of the open ones instead would spread what belongs together. The exception is one that
has no place and is no better for the prompt than another that has (`front_door`).

A request that could meet its deadline alone is dropped as soon as it no longer can, because what it would cost is taken
from others who still can. One that could not meet it even alone is another matter: turned away by its prediction, it
would never get into a cache, and be turned away at each later turn of its conversation. It is served, unless there is
so little room that it has waited `infeasible_max_wait_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.network import one_way_s
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.prefill_queue import STUCK_AFTER_S
from gorgo.core.messages.decision import Prediction

#: Clocks count from the epoch, where a float has a quarter of a microsecond.
_NOISE_S = 1e-6


@dataclass(frozen=True, slots=True)
class OverloadLimits:
    """Who waits at the proxy, for how long, and how many. Nobody by default: a shell has to carry it out.

    Parameters
    ----------
    hold:
        Whether a policy that predicts has requests wait for a replica with room. Where no replica can be asked at all,
        requests wait under any policy.
    held:
        Requests that wait at most; one more is told to come back. Each holds its body in memory.
    max_backlog_s:
        A replica with more prefill than this before it is closed, s: long enough to keep it busy for a round trip,
        short enough that what waits can still be put in order.
    max_concurrency_per_replica:
        A replica with so many requests in flight is closed; `None`: its `max_running_requests`.
    slo_ttft_s:
        Deadline of requests that bring none, s; `None`: none.
    slo_e2e_s:
        When the last token should be there, s: a replica whose answers take too long is closed with fewer in flight.
        Nobody is turned away for it. `None`: no matter.
    infeasible_max_wait_s:
        Longest queue time of a request that is infeasible on an idle fleet, s. Above 0, so that a long prompt gets its
        turn: it would never be cached otherwise.
    no_replica_wait_s:
        How long a request waits for any replica that may take it, s: a half-open trial, a reload.
    """

    queue_enabled: bool = False
    queue_max_requests: int = 1000
    max_backlog_s: float = 0.2
    max_concurrency_per_replica: int | None = None
    slo_ttft_s: float | None = None
    slo_e2e_s: float | None = None
    infeasible_max_wait_s: float = 0.3
    no_replica_wait_s: float = 0.0


class SaturationDetector:
    """Which replicas are open.

    Parameters
    ----------
    fleet:
        Whose clocks and counts are read.
    limits:
        May be replaced.
    """

    __slots__ = ("_fleet", "limits")

    def __init__(self, fleet: Fleet, limits: OverloadLimits) -> None:
        self._fleet = fleet
        self.limits = limits

    def has_capacity(self, member: Replica, *, now: float) -> bool:
        """Whether a request may be sent there now."""
        return self.has_slot(member) and self.backlog_s(member, now=now) <= self.limits.max_backlog_s + _NOISE_S

    def has_slot(self, member: Replica) -> bool:
        """Whether one more may be in flight there, whatever there is to prefill."""
        columns, slot, most = self._fleet.columns, member.slot, self.limits.max_concurrency_per_replica
        in_flight = columns.in_flight_requests[slot]
        goal_s = self.limits.slo_e2e_s
        if goal_s is not None and in_flight >= member.concurrency.limit(goal_s):
            return False
        # Unknown is NaN, and no comparison with it is true.
        return not in_flight >= (columns.max_running_requests[slot] if most is None else most)

    def free_at_s(self, member: Replica, *, now: float) -> float | None:
        """When a closed replica will be open if nothing happens; `None` where something has to happen first."""
        clock = member.prefill_queue
        if not self.has_slot(member) or clock.drained_at_s == float("inf") or self._late_s(member, now=now) > 0.0:
            return None
        at_s = clock.drained_at_s - one_way_s(self._fleet.columns, member.slot) - self.limits.max_backlog_s
        return at_s if at_s > now + _NOISE_S else None

    def backlog_s(self, member: Replica, *, now: float) -> float:
        """Prefill before a request that is sent there now, as `gorgo-ms` reckons it, s."""
        clock = member.prefill_queue
        late_s = self._late_s(member, now=now)
        if late_s > 0.0:
            return clock.backlog_s + late_s
        return max(0.0, clock.drained_at_s - now - one_way_s(self._fleet.columns, member.slot))

    def on_result(self, attempt: Attempt, *, now: float, tokens: int | None) -> None:
        """An answer is complete, which tells how long one stays there. `tokens` are its, where the engine told."""
        goal_s = self.limits.slo_e2e_s
        if goal_s is not None:
            sent_s, waited_s = attempt.dispatched_s, attempt.dispatched_s - attempt.state.request.received_s
            attempt.replica.concurrency.on_completed(
                attempt.checkpoint, stayed_s=now - sent_s, waited_s=waited_s, goal_s=goal_s, tokens=tokens
            )

    def _late_s(self, member: Replica, *, now: float) -> float:
        return now - STUCK_AFTER_S - member.prefill_queue.head_due_s - one_way_s(self._fleet.columns, member.slot)


def misses_deadline(forecast: Prediction, *, waited_s: float, deadline_s: float, limits: OverloadLimits) -> bool:
    """Whether a request that has waited so long is to be dropped."""
    if feasible_idle(forecast, deadline_s=deadline_s):
        return waited_s + float((forecast.idle_s + forecast.backlog_s).min()) > deadline_s
    return waited_s > limits.infeasible_max_wait_s


def feasible_idle(forecast: Prediction, *, deadline_s: float) -> bool:
    """Whether it would meet its deadline if nobody else were there."""
    return float(forecast.idle_s.min()) <= deadline_s


def shed_at_s(forecast: Prediction, *, received_s: float, deadline_s: float, limits: OverloadLimits) -> float:
    """When a request that waits is hopeless at the latest, whatever happens until then."""
    alone_s = float(forecast.idle_s.min())
    return received_s + (deadline_s - alone_s if alone_s <= deadline_s else limits.infeasible_max_wait_s)
