"""`random`: any candidate, each as likely as the others."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class Random:
    """The control of every comparison."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "any replica, each as likely"
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
        return Choice(int(rng.integers(len(candidates))))
