"""Policies that choose by load alone: `least-load`, `least-request` and `power-of-two`.

Owns two readings of each of the first two: as the authors of the GORGO paper released it, and by counts that this proxy
has itself. The released ones add the engines' reports to the proxy's counts. A missing or stale report counts as the
worst known value among the candidates. If none is known, the counts of the proxy decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import (
    USUAL_SCRAPE_S,
    Candidates,
    Choice,
    IndexKind,
    argmin_tiebreak,
    choose_min_cost,
    fill_unknown,
)
from gorgo.core.policy.weights import Weights, WeightSpec

#: Columns of scrapes that the sums have.
_SIGNALS = ("running_requests", "queued_requests", "used_tokens")


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
    #: The paper's baseline works by reports of any age.
    signal_ages: ClassVar[Mapping[str, float]] = dict.fromkeys(_SIGNALS, USUAL_SCRAPE_S)
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        terms = {"in_flight_tokens": candidates.in_flight_tokens.copy(), **_reported(candidates)}
        cost = np.sum(list(terms.values()), axis=0)
        return Choice(argmin_tiebreak(cost, cost, rng), terms, cost, ties=cost)


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
    #: The paper's baseline works by reports of any age.
    signal_ages: ClassVar[Mapping[str, float]] = dict.fromkeys(_SIGNALS, USUAL_SCRAPE_S)
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
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


class LeastRequest:
    """Fewest requests by the larger of two counts, the engine's running ones and this proxy's own; ties at random.

    The report may be one scrape interval old. A missing one counts as the worst known; if none is known, the own count
    decides.

    References
    ----------
    GORGO paper, baselines; the authors' package gorgo-lb 0.2.0, `route_least_request`.
    """

    name: ClassVar[str] = "least-request"
    summary: ClassVar[str] = (
        "GORGO paper, as released: fewest requests, the larger of reported and own count, ties at random"
    )
    unit: ClassVar[str] = "requests"
    index: ClassVar[IndexKind] = "any"
    #: The paper's baseline works by reports of any age.
    signal_ages: ClassVar[Mapping[str, float]] = {"running_requests": USUAL_SCRAPE_S}
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        in_flight = candidates.in_flight_requests.copy()
        excess = np.maximum(fill_unknown(candidates.running_requests) - in_flight, 0.0)
        cost = in_flight + excess
        return Choice(
            argmin_tiebreak(cost, cost, rng), {"in_flight": in_flight, "running_excess": excess}, cost, ties=cost
        )


class LeastRequestInFlight:
    """Fewest requests in flight, ties at random. It needs no signal of an engine, so other policies fall back to it.

    Load balancers call it least outstanding requests.
    """

    name: ClassVar[str] = "least-request-in-flight"
    summary: ClassVar[str] = "fewest requests in flight from this proxy (least outstanding requests), ties at random"
    unit: ClassVar[str] = "requests"
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        return choose_min_cost({"in_flight": candidates.in_flight_requests.copy()}, candidates, rng)


class PowerOfTwo:
    """Power of two choices, by requests in flight: nearly as even as least-request, and it never herds.

    References
    ----------
    Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """

    name: ClassVar[str] = "power-of-two"
    summary: ClassVar[str] = "two replicas at random, the one with fewer requests in flight"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        load = candidates.in_flight_requests
        if len(candidates) == 1:
            return Choice(0, {"in_flight": load.copy()})
        first = int(rng.integers(len(candidates)))
        # A second draw among the others, without building a permutation.
        second = int(rng.integers(len(candidates) - 1))
        second += second >= first
        # On a tie the first drawn wins, which is fair: the order of the two is itself at random.
        return Choice(second if load[second] < load[first] else first, {"in_flight": load.copy()})
