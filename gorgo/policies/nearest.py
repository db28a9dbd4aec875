"""`nearest`: the least round trip."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.cost import choose_min_cost, fill_unknown
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class Nearest:
    """Least smoothed round trip; ties go to the fewest in flight. An unknown one counts as the worst known."""

    name: ClassVar[str] = "nearest"
    summary: ClassVar[str] = "least round trip, ties to the fewest in flight"
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "any"
    compares_all: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        return choose_min_cost({"rtt": fill_unknown(candidates.rtt_s) * 1e3}, candidates, rng)
