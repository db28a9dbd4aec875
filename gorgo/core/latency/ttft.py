"""The parts of a time to first token, as far as they are visible from outside of the engine.

Owns the parts, and the attribution of a measured time to them. Two parts are measured: the time at the router (body,
decision, queue), and earlier attempts without an answer. The time after the dispatch is visible as one span only. Its
parts are estimates from the Router's state of each replica: network from round trip and connection, the prefill queue,
and the prefill by prior and learned speed. Under `gorgo-ms` they are the terms of its prediction.

Theory of operation. The parts of a measured time add up to it. Each expected part is taken as expected while the
measured span has room for it, surest first: network, prefill, queue. The rest is `residual`; a span shorter than
expected cuts the queue first. So no part is negative, and `residual` is unexpected time: an engine slower than
learned, others' requests in its queue, a cache without the estimated prefix, a stalled path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gorgo.core.latency.prefill_queue import STUCK_AFTER_S, PrefillQueue
from gorgo.core.record import record

#: In the order of a request; the last is the residual.
PARTS = ("router", "previous_attempts", "network", "queue", "prefill", "residual")


class TtftParts(NamedTuple):
    """A measured TTFT by parts, s. Their sum is the TTFT.

    Unlike a `TtftEstimate` it has a residual, and no part of it is unknown.
    """

    router_s: float
    previous_attempts_s: float
    network_s: float
    queue_s: float
    prefill_s: float
    residual_s: float

    def as_ms(self) -> dict[str, float]:
        return {
            "router": self.router_s * 1e3,
            "previous_attempts": self.previous_attempts_s * 1e3,
            "network": self.network_s * 1e3,
            "queue": self.queue_s * 1e3,
            "prefill": self.prefill_s * 1e3,
            "residual": self.residual_s * 1e3,
        }


@record
class TtftEstimate:
    """Parts of a request's TTFT at its dispatch, s: `router_s` and `previous_attempts_s` have passed, the rest is
    expected. `network_s` is `None` while the replica's round trip is unknown.

    Example
    -------
    >>> estimate = TtftEstimate(router_s=0.01, previous_attempts_s=0.0, network_s=0.1, queue_s=0.2, prefill_s=0.5)
    >>> [round(seconds, 3) for seconds in estimate.attribute(1.0)]
    [0.01, 0.0, 0.1, 0.2, 0.5, 0.19]
    >>> [round(seconds, 3) for seconds in estimate.attribute(0.71)]  # sooner than expected: the queue is cut
    [0.01, 0.0, 0.1, 0.1, 0.5, 0.0]
    """

    router_s: float
    previous_attempts_s: float
    network_s: float | None
    queue_s: float
    prefill_s: float

    @property
    def expected_s(self) -> float:
        """The time after the dispatch; without the network's while it is unknown."""
        return (self.network_s or 0.0) + self.queue_s + self.prefill_s

    def attribute(self, ttft_s: float) -> TtftParts:
        """Share out what was measured."""
        left_s = max(0.0, ttft_s - self.router_s - self.previous_attempts_s)
        network_s = min(self.network_s or 0.0, left_s)
        left_s -= network_s
        prefill_s = min(self.prefill_s, left_s)
        left_s -= prefill_s
        queue_s = min(self.queue_s, left_s)
        return TtftParts(self.router_s, self.previous_attempts_s, network_s, queue_s, prefill_s, left_s - queue_s)

    def as_ms(self) -> Mapping[str, float | None]:
        """For `/admin/decisions/{id}`."""
        return {
            "router": self.router_s * 1e3,
            "previous_attempts": self.previous_attempts_s * 1e3,
            "network": None if self.network_s is None else self.network_s * 1e3,
            "queue": self.queue_s * 1e3,
            "prefill": self.prefill_s * 1e3,
        }


def expected_queue_s(
    clock: PrefillQueue, others_s: float = 0.0, *, arrives_s: float, one_way_s: float, now: float
) -> float:
    """Work left before a request that is dispatched now and arrives then; on a stuck engine all that waits there and
    how late it is, as in the cost of `gorgo-ms`. `others_s` of it is for other routers.
    """
    late_s = now - STUCK_AFTER_S - clock.head_due_s - one_way_s - others_s
    if late_s > 0.0:
        return clock.backlog_s + others_s + late_s
    left_s = clock.own_drained_at_s(engine_s=now) - arrives_s
    return (left_s if left_s > 0.0 else 0.0) + others_s
