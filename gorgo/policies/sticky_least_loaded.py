"""`sticky-least-loaded`: the least loaded of the replicas that hold a prompt's first tokens, else of all."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, argmin_tiebreak
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import evidence, least_loaded


class StickyLeastLoaded:
    """Of the replicas with the first `prefix_len` tokens in cache, the one with the fewest requests in flight.

    A holder serves however loaded it is. Without a holder the least loaded of all serves, and becomes one.

    Theory of operation. The published system maps the hash of the first tokens to the workers that reported it. Here
    the prefix index is that map: its block hashes stand for whole prefixes, it is bounded by each replica's KV pool,
    and it is corrected by what engines report. A dispatch enters the prompt at once, before the engine confirms it, so
    a burst of one prefix goes to one replica. A request may have a `prefix_len` of its own. It is rounded down to
    blocks of the source, and a prompt shorter than that is compared by its full blocks.

    References
    ----------
    Push-based cache map for prefix-aware routing, algorithm 1.
    """

    name: ClassVar[str] = "sticky-least-loaded"
    summary: ClassVar[str] = (
        "push-based cache map, Alg. 1: the least loaded replica with the first 64 tokens in cache, else the least "
        "loaded of all"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("prefix_len", 64.0, 1.0, 1e6, "first tokens of a prompt that a holder has in cache", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        needed = _needed_tokens(request.prefix_len or weights["prefix_len"], request)
        holders = np.flatnonzero(candidates.cached_tokens >= needed) if needed > 0.0 else ()
        if not len(holders):
            return Choice(least_loaded(candidates, rng), evidence(candidates), fallback="no_match")
        load = candidates.in_flight_requests[holders]
        return Choice(int(holders[argmin_tiebreak(load, load, rng)]), evidence(candidates))


def _needed_tokens(prefix_len: float, request: RouteRequest) -> float:
    """Return the cached tokens that make a holder; 0 for a prompt without a full block, which none can hold.

    Whole blocks of the source are compared, rounded down and at least one: those of the engine where the tokens of the
    prompt are known, else those of the text. Half a token less than they have allows for rounding.
    """
    tokens = min(request.kv_hashes, default=request.block_tokens)
    blocks = min(max(1, int(prefix_len / tokens)), int(request.prompt_tokens / tokens))
    return blocks * tokens - 0.5 if blocks else 0.0
