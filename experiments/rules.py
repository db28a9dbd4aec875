"""A rule of another router for which there is no policy: it stands in comparisons with that router itself."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, choose_min_cost
from gorgo.core.policy.weights import Weights, WeightSpec


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
