"""`least-load`: the baseline of the GORGO paper that adds this proxy's counts to the engines' reports."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.cost import choose_min_cost, fill_unknown
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class LeastLoad:
    """Fewest tokens and requests in one sum: a request counts as one token, as published.

    A missing or stale report counts as the worst known value among the candidates. If none is known, the counts of the
    proxy decide.

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
            "running": fill_unknown(candidates.running_requests).copy(),
            "queued": fill_unknown(candidates.queued_requests).copy(),
            "used": fill_unknown(candidates.used_tokens).copy(),
        }
        return choose_min_cost(terms, candidates, rng)
