"""`least-load` as the authors of the GORGO paper released it, and a reading that counts prompts before the first token.

Both add this proxy's counts to the engines' reports. A missing or stale report counts as the worst known value among
the candidates. If none is known, the counts of the proxy decide.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice, argmin_tiebreak
from gorgo.core.policy.cost import choose_min_cost, fill_unknown
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class LeastLoad:
    """Fewest tokens and requests in one sum: a request counts as one token, its prompt until it ends. Ties at random.

    References
    ----------
    GORGO paper, baselines; the authors' package gorgo-lb 0.2.0, `route_least_load`.
    """

    name: ClassVar[str] = "least-load"
    summary: ClassVar[str] = (
        "GORGO paper, as released: least prompt tokens in flight + running + queued + used KV tokens"
    )
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
        terms = {"in_flight_tokens": candidates.in_flight_tokens.copy(), **_reported(candidates)}
        cost = np.sum(list(terms.values()), axis=0)
        return Choice(argmin_tiebreak(cost, cost, rng), terms, cost)


class LeastLoadFirstToken:
    """As `least-load`, but a prompt counts until its first token: the same load without what only decodes.

    References
    ----------
    GORGO paper, baselines: "queued tokens" read as those that still wait for a prefill.
    """

    name: ClassVar[str] = "least-load-first-token"
    summary: ClassVar[str] = (
        "as least-load, counting prompts until their first token: least waiting tokens + running + queued + used"
    )
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
        terms = {"queued_prefill": candidates.queued_prefill_tokens.copy(), **_reported(candidates)}
        return choose_min_cost(terms, candidates, rng)


def _reported(candidates: Candidates) -> dict[str, NDArray[np.float64]]:
    """Return the terms that engines report."""
    return {
        "running": fill_unknown(candidates.running_requests).copy(),
        "queued": fill_unknown(candidates.queued_requests).copy(),
        "used": fill_unknown(candidates.used_tokens).copy(),
    }
