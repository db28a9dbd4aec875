"""`nearest`: the least round trip."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.candidates import Candidates
from gorgo.core.cost import known_or_worst, least_cost
from gorgo.core.decision import Choice
from gorgo.core.policy import IndexKind
from gorgo.core.request import RouteRequest
from gorgo.core.weights import Weights, WeightSpec


class Nearest:
    """Least smoothed round trip; ties go to the fewest in flight. An unknown one counts as the worst known."""

    name: ClassVar[str] = "nearest"
    summary: ClassVar[str] = "least round trip, ties to the fewest in flight"
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        return least_cost({"rtt": known_or_worst(candidates.rtt_s) * 1e3}, candidates, rng)
