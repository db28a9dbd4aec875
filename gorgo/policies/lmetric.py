"""`lmetric`: the least product of uncached tokens and batch size, which needs no weights."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, choose_min_cost
from gorgo.core.policy.weights import Weights, WeightSpec


class LMetric:
    """cost = (prompt tokens to prefill there) * (batch size there), in tokens.

    A product compares as a weighted sum does, and a factor on either part cancels out, so there is nothing to tune.

    From the paper are the two indicators and their product. Decided here, where the paper is silent or its engines say
    more than a router knows: the batch is the requests that this router has in flight there, waiting ones included, and
    this request, so that an idle replica without the prefix is not free; at least one token is always prefilled, so
    that a prompt that is cached whole still goes to the smaller batch. The paper detects the rare traffic on which the
    product fails and changes the rule then; that is left out.

    References
    ----------
    LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling, arXiv 2603.15202, 2026.
    """

    name: ClassVar[str] = "lmetric"
    summary: ClassVar[str] = "LMetric: least uncached tokens x batch size, no weights"
    unit: ClassVar[str] = "tokens"
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        batch = candidates.in_flight_requests + 1.0
        return choose_min_cost({"product": np.maximum(candidates.uncached_tokens, 1.0) * batch}, candidates, rng)
