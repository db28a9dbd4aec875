"""A policy that reads another source of cached tokens than its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind, Policy
from gorgo.core.policy.weights import Weights


class IndexedPolicy:
    """The policy with `index` for its own kind: a compiled policy's attributes cannot be replaced."""

    def __init__(self, policy: Policy, index: IndexKind) -> None:
        self._policy = policy
        self.name, self.summary, self.unit = policy.name, policy.summary, policy.unit
        self.weight_specs, self.index = policy.weight_specs, index

    def __getattr__(self, name: str) -> Any:
        """Return what some policies have beside the interface (`compares_all`, `reads_progress`)."""
        if name.startswith("_"):  # a copy in the making has no policy yet
            raise AttributeError(name)
        return getattr(self._policy, name)

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return self._policy.choose(request, candidates, weights, rng)
