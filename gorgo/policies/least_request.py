"""`least-request`: the fewest requests in flight from this proxy."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.cost import choose_min_cost
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class LeastRequest:
    """Fewest requests in flight, ties at random. It needs no signal of an engine, so other policies fall back to it."""

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
        return choose_min_cost({"in_flight": candidates.in_flight_requests.copy()}, candidates, rng)
