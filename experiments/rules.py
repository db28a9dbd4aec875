"""Rules of other routers for which there is no policy: they stand in comparisons with the routers themselves."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, choose_min_cost
from gorgo.core.policy.weights import Weights, WeightSpec


class RoundRobin:
    """Requests go to the replicas in turn."""

    name: ClassVar[str] = "round robin"
    summary: ClassVar[str] = "replicas in turn"
    unit: ClassVar[str] = "turns"
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def __init__(self) -> None:
        self._turns = count()

    def choose(
        self,
        request: RouteRequest,  # noqa: ARG002 - the interface
        candidates: Candidates,
        weights: Weights,  # noqa: ARG002
        rng: np.random.Generator,
    ) -> Choice:
        ahead = (candidates.slots - next(self._turns)) % len(candidates)
        return choose_min_cost({"turns": ahead.astype(np.float64)}, candidates, rng)


class DynamoKv:
    """cost = tokens to prefill there, this prompt's included, + tokens of all prompts there, in tokens.

    The cost of NVIDIA Dynamo's KV router with its defaults (an overlap weight of 1, a temperature of 0), which counts
    blocks and, of what decodes, each shared block once.
    """

    name: ClassVar[str] = "Dynamo's KV rule"
    summary: ClassVar[str] = "tokens to prefill + tokens in flight"
    unit: ClassVar[str] = "tokens"
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,  # noqa: ARG002 - the interface
        candidates: Candidates,
        weights: Weights,  # noqa: ARG002
        rng: np.random.Generator,
    ) -> Choice:
        prefill = candidates.queued_prefill_tokens + candidates.uncached_tokens
        return choose_min_cost({"prefill": prefill, "decode": candidates.in_flight_tokens}, candidates, rng)
