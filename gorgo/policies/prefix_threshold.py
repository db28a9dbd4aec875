"""`prefix-threshold`: Lodestar's algorithm 2, the longest prefix if it is long enough."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import evidence, least_loaded, longest_match


class PrefixThreshold:
    """The best match when it covers more than a share tau of the prompt, else the least loaded.

    The paper tunes tau per trace (0.2 to 0.6), so it is a weight here and starts in between. At 1 no match is ever long
    enough.

    References
    ----------
    Lodestar paper, algorithm 2.
    """

    name: ClassVar[str] = "prefix-threshold"
    summary: ClassVar[str] = (
        "Lodestar Alg. 2: longest prefix if it covers more than tau of the prompt, else fewest in flight"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "published"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("tau", 0.5, 0.05, 1.0, "share of the prompt that must be cached"),
    )

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        if candidates.cached_tokens.max() <= weights["tau"] * candidates.prompt_tokens:
            return Choice(least_loaded(candidates, rng), evidence(candidates), fallback="below_threshold")
        return Choice(longest_match(np.arange(len(candidates)), candidates, rng), evidence(candidates))
