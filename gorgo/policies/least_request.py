"""`least-request`: the fewest requests in flight from this proxy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.candidates import Candidates
from gorgo.core.cost import least_cost
from gorgo.core.decision import Choice
from gorgo.core.policy import IndexKind
from gorgo.core.request import RouteRequest
from gorgo.core.weights import Weights, WeightSpec


class LeastRequest:
    """Fewest in flight, ties at random. It needs no signal from any engine, so it is also what others fall back to."""

    name: ClassVar[str] = "least-request"
    summary: ClassVar[str] = "GORGO paper: fewest requests in flight from this proxy, ties at random"
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
        return least_cost({"in_flight": candidates.in_flight_requests.copy()}, candidates, rng)
