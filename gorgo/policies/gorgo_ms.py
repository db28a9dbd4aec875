"""`gorgo-ms`: GORGO's cost with every term a time, so that it predicts what it minimises."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.candidates import Candidates
from gorgo.core.cost import known_or_worst, least_cost
from gorgo.core.decision import Choice
from gorgo.core.path import round_trips
from gorgo.core.policy import IndexKind
from gorgo.core.prefill import prefill_s
from gorgo.core.request import RouteRequest
from gorgo.core.weights import Weights, WeightSpec

#: A first token may be so late before its replica counts as stuck, s.
LATE_S = 0.3

Floats = NDArray[np.float64]


class GorgoMs:
    """cost = m_rtt * N + m_queue * W + P + (lambda * P + delta) * n, in ms.

    N is the network's time: the round trip, as often as this body takes over the connection that it would get there. W
    is the work before this request by the replica's busy clock when it arrives, P its own prefill by the replica's
    priors and learned speed, n the requests in flight there, which a prefill stalls: lambda prices what this request
    costs the others, and 0.2 stands for an end-to-end time that counts a quarter as much as a first token. An unknown
    round trip counts as the worst known one. The first three terms without their factors are the predicted time to
    first token.

    References
    ----------
    GORGO paper, equation 3, with its token terms turned into times.
    """

    name: ClassVar[str] = "gorgo-ms"
    summary: ClassVar[str] = (
        "every term a time: least m_rtt * RTT + m_queue * W + P + (lambda * P + delta) * in flight, "
        "W the work there, P the prefill"
    )
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "bounded"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("m_rtt", 1.0, 0.25, 4.0, "factor on the network's time"),
        WeightSpec("m_queue", 1.0, 0.25, 4.0, "factor on the work before this request"),
        WeightSpec("lambda", 0.2, 0.1, 1.0, "of the prefill, per request in flight that it stalls", tuned="asked"),
        WeightSpec("delta", 0.0, 0.0, 100.0, "ms per request in flight", tuned="never"),
    )

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        rtt_s = known_or_worst(candidates.rtt_s)
        trips = _trips(request, candidates, rtt_s)
        network_ms = rtt_s * trips * 1e3
        work_ms = _work_s(candidates, rtt_s, trips) * 1e3
        prefill_ms = _prefill_s(candidates) * 1e3
        terms = {
            "rtt": weights["m_rtt"] * network_ms,
            "queue": weights["m_queue"] * work_ms,
            "prefill": prefill_ms,
            "externality": (weights["lambda"] * prefill_ms + weights["delta"]) * candidates.in_flight_requests,
        }
        # No prediction where the round trip is unknown: the worst known one is for comparing only.
        predicted_s = (candidates.now - request.received_s) + candidates.rtt_s * trips + (work_ms + prefill_ms) / 1e3
        return least_cost(terms, candidates, rng, predicted_ttft_s=predicted_s)


def _trips(request: RouteRequest, candidates: Candidates, rtt_s: Floats) -> Floats:
    """Round trips until the first byte of an answer that takes no time."""
    return round_trips(
        request.body_bytes,
        congestion=candidates.congestion_bytes,
        receive=candidates.receive_bytes,
        idle_s=candidates.now - candidates.sent_s,
        rtt_s=rtt_s,
        connect=candidates.connect_trips,
    )


def _work_s(candidates: Candidates, rtt_s: Floats, trips: Floats) -> Floats:
    """W: work left when this request gets there; on a stuck engine all that waits and how late it is."""
    one_way_s, now = rtt_s / 2, candidates.now
    work_s = np.maximum(candidates.free_at_s - now - rtt_s * (trips - 0.5), 0.0)
    late_s = (now - LATE_S) - candidates.due_s - one_way_s
    if np.maximum.reduce(late_s) <= 0.0:
        return work_s
    return np.where(late_s > 0.0, candidates.waiting_prefill_s + late_s, work_s)


def _prefill_s(candidates: Candidates) -> Floats:
    """P: of what is not cached there, behind what is."""
    c = candidates
    prior_s = prefill_s(c.prefill_base_s, c.prefill_token_s, c.prefill_kappa_s, c.uncached_tokens, c.cached_tokens)
    return c.slowdown * prior_s
