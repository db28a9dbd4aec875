"""Saturation: whether a replica has capacity for one more request.

Theory of operation. Work that is queued at the proxy can still go elsewhere, be reordered or be given up; work that was
dispatched cannot. So a replica has capacity only while it has a free slot and little prefill to do. The best replica is
chosen among all, saturated or not: choosing among the others only would spread requests with a common prefix.
"""

from __future__ import annotations

from math import inf

from gorgo.core.fleet.columns import one_way_s
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.prefill_queue import STUCK_AFTER_S
from gorgo.core.limits import OverloadLimits

#: Times count from the epoch, where a float has a quarter of a microsecond.
_NOISE_S = 1e-6


class SaturationDetector:
    """Says which replicas have capacity.

    Parameters
    ----------
    fleet:
        The Router's.
    limits:
        May be replaced.
    """

    __slots__ = ("_fleet", "limits")

    def __init__(self, fleet: Fleet, limits: OverloadLimits) -> None:
        self._fleet = fleet
        self.limits = limits

    def has_capacity(self, replica: Replica, *, now: float) -> bool:
        """Return whether a request may be dispatched there now."""
        return self.has_slot(replica) and self.backlog_s(replica, now=now) <= self.limits.max_backlog_s + _NOISE_S

    def has_slot(self, replica: Replica) -> bool:
        """Return whether the concurrency limit allows one more in flight, whatever there is to prefill."""
        columns, slot, most = self._fleet.columns, replica.slot, self.limits.max_concurrency_per_replica
        in_flight = columns.in_flight_requests.item(slot)
        if self._fleet.peers is not None:
            in_flight += self._fleet.peers.requests(slot)
        goal_s = self.limits.slo_e2e_s
        if goal_s is not None and in_flight >= replica.concurrency.limit(goal_s):
            return False
        # Unknown is NaN, and no comparison with it is true.
        return not in_flight >= (columns.max_running_requests.item(slot) if most is None else most)

    def free_at_s(self, replica: Replica, *, now: float) -> float | None:
        """Return when a saturated replica has capacity without a further event; `None` if it needs one."""
        queue, half_rtt_s = replica.prefill_queue, one_way_s(self._fleet.columns, replica.slot)
        others_s = self._fleet.others_prefill_s(replica.slot)
        is_late = now - STUCK_AFTER_S - queue.head_due_s - half_rtt_s - others_s > 0.0
        if is_late or queue.drained_at_s == inf or not self.has_slot(replica):
            return None
        at_s = queue.own_drained_at_s(engine_s=now) - half_rtt_s - self.limits.max_backlog_s
        if others_s:
            at_s = max(at_s, now - self.limits.max_backlog_s) + others_s
        return at_s if at_s > now + _NOISE_S else None

    def backlog_s(self, replica: Replica, *, now: float) -> float:
        """Return the prefill before a request dispatched there now, by the rule of `gorgo-ms`, s."""
        queue, half_rtt_s = replica.prefill_queue, one_way_s(self._fleet.columns, replica.slot)
        others_s = self._fleet.others_prefill_s(replica.slot)
        late_s = now - STUCK_AFTER_S - queue.head_due_s - half_rtt_s - others_s
        if late_s > 0.0:
            return queue.backlog_s + others_s + late_s
        left_s = queue.own_drained_at_s(engine_s=now) - now - half_rtt_s
        return (left_s if left_s > 0.0 else 0.0) + others_s
