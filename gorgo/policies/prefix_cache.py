"""`prefix-cache`: the longest cached prefix that is not on an overloaded replica, as AIBrix has it."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import longest_prefix


class PrefixCache:
    """Longest match among replicas whose load is at most mean + 2 standard deviations; the least loaded when nothing
    matches, and when the most and the least loaded differ by more than 8 requests.

    References
    ----------
    GORGO paper, baselines; AIBrix, policy prefix-cache.
    """

    name: ClassVar[str] = "prefix-cache"
    summary: ClassVar[str] = (
        "AIBrix: longest prefix unless overloaded (mean + 2 sd) or unbalanced (by more than 8), else least-request"
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
        return longest_prefix(candidates, rng, imbalance=8, deviations=2)
