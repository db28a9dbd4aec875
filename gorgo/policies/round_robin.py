"""`round-robin`: one after another, by name."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class RoundRobin:
    """The next name in alphabetical order after the last one chosen, from the start again at the end.

    The cursor is a name, not a position: replicas that join, leave or are ejected for a while do not shift the turn of
    the others.
    """

    name: ClassVar[str] = "round-robin"
    summary: ClassVar[str] = "one after another, by name"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def __init__(self) -> None:
        self._last = ""

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        names = candidates.names
        following = [name for name in names if name > self._last]
        self._last = min(following or names)
        return Choice(names.index(self._last))
