"""`prefix-cache-and-load`: the heuristic that Lodestar falls back to and is compared with, its algorithm 1."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import longest_prefix


class PrefixCacheAndLoad:
    """As `prefix-cache-in-flight`, but a replica counts as overloaded above mean + 1 standard deviation.

    References
    ----------
    Lodestar paper, algorithm 1; AIBrix, policy prefix-cache with its default factor.
    """

    name: ClassVar[str] = "prefix-cache-and-load"
    summary: ClassVar[str] = (
        "Lodestar Alg. 1: longest prefix unless overloaded (mean + 1 sd) or unbalanced (by more than 8)"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "published"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        return longest_prefix(candidates, rng, deviations=1)
