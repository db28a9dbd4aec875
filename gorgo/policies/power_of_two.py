"""`power-of-two`: two at random, the less loaded of them."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class PowerOfTwo:
    """Power of two choices, by requests in flight: nearly as even as least-request, and it never herds.

    References
    ----------
    Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """

    name: ClassVar[str] = "power-of-two"
    summary: ClassVar[str] = "two replicas at random, the one with fewer requests in flight"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        load = candidates.in_flight_requests
        if len(candidates) == 1:
            return Choice(0, {"in_flight": load.copy()})
        first = int(rng.integers(len(candidates)))
        # A second draw among the others, without building a permutation.
        second = int(rng.integers(len(candidates) - 1))
        second += second >= first
        # On a tie the first drawn wins, which is fair: the order of the two is itself at random.
        return Choice(second if load[second] < load[first] else first, {"in_flight": load.copy()})
