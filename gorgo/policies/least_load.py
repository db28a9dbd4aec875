"""`least-load`: the baseline of the GORGO paper that adds what this proxy counts to what the engines report."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.candidates import Candidates
from gorgo.core.cost import known_or_worst, least_cost
from gorgo.core.decision import Choice
from gorgo.core.policy import IndexKind
from gorgo.core.request import RouteRequest
from gorgo.core.weights import Weights, WeightSpec


class LeastLoad:
    """Fewest tokens and requests at hand, in one sum: a request counts as one token, as published.

    A figure that an engine has not reported, or that has gone stale, counts as the worst known among the candidates;
    where none is known it drops out and the proxy's own count decides.

    References
    ----------
    GORGO paper, baselines.
    """

    name: ClassVar[str] = "least-load"
    summary: ClassVar[str] = "GORGO paper: least tokens waiting for a first token + running + queued + used KV tokens"
    unit: ClassVar[str] = "tokens"
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        terms = {
            "queued_prefill": candidates.queued_prefill_tokens.copy(),
            "running": known_or_worst(candidates.running_requests).copy(),
            "queued": known_or_worst(candidates.queued_requests).copy(),
            "used": known_or_worst(candidates.used_tokens).copy(),
        }
        return least_cost(terms, candidates, rng)
