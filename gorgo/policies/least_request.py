"""`least-request` as the authors of the GORGO paper released it, and by this proxy's own count alone."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice, argmin_tiebreak
from gorgo.core.policy.cost import choose_min_cost, fill_unknown
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class LeastRequest:
    """Fewest requests by the larger of two counts, the engine's running ones and this proxy's own; ties at random.

    The report may be one scrape interval old. A missing one counts as the worst known; if none is known, the own count
    decides.

    References
    ----------
    GORGO paper, baselines; the authors' package gorgo-lb 0.2.0, `route_least_request`.
    """

    name: ClassVar[str] = "least-request"
    summary: ClassVar[str] = (
        "GORGO paper, as released: fewest requests, the larger of reported and own count, ties at random"
    )
    unit: ClassVar[str] = "requests"
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        own = candidates.in_flight_requests.copy()
        excess = np.maximum(fill_unknown(candidates.running_requests) - own, 0.0)
        cost = own + excess
        return Choice(argmin_tiebreak(cost, cost, rng), {"in_flight": own, "running_excess": excess}, cost)


class LeastRequestInFlight:
    """Fewest requests in flight, ties at random. It needs no signal of an engine, so other policies fall back to it.

    Load balancers call it least outstanding requests.
    """

    name: ClassVar[str] = "least-request-in-flight"
    summary: ClassVar[str] = "fewest requests in flight from this proxy (least outstanding requests), ties at random"
    unit: ClassVar[str] = "requests"
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        return choose_min_cost({"in_flight": candidates.in_flight_requests.copy()}, candidates, rng)
