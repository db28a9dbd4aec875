"""`dualmap`: two replicas per prefix by two hashes, the better of the two, and others when both are hot."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, argmin_tiebreak, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import rendezvous_scores

#: Makes the second hash of a prefix independent of the first: any constant with many bits does.
SECOND_HASH = 0xC2B2_AE3D_27D4_EB4F


class DualMap:
    """Of the two replicas that a prefix is hashed to, the one with more of it in cache, while its TTFT is in time.

    If the expected TTFT there exceeds `slo_ms`, the one of the two that is expected sooner serves (`slo`). If that
    exceeds it too, both are a hot spot, and the replica that is expected soonest among all serves (`hotspot`). The
    expected TTFT is the uncached tokens before their first token there and of this prompt, over `tokens_per_s`.

    From the paper are the two hashes of a prompt's prefix, the choice by cache while the objective is met and by load
    otherwise, and moves away from pairs that are both overloaded. Decided here: the prefix is the first 256 tokens,
    which is what the router hashes for affinity; rendezvous hashing stands for the two rings, with which it shares that
    a change of the fleet moves few prefixes; the objective is 2 s, that of the laboratory's goodput; the throughput is
    one constant, as in `mooncake`. The paper's migration takes requests back from an engine's queue. A router cannot,
    so that a move is made when a request arrives.

    References
    ----------
    DualMap: Enabling Both Cache Affinity and Load Balancing for Distributed LLM Serving, ICLR 2026, arXiv 2602.06502.
    Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """

    name: ClassVar[str] = "dualmap"
    summary: ClassVar[str] = (
        "DualMap: of two replicas by two hashes of the first 256 tokens the one with more cached; beyond an objective "
        "the sooner one, of all if both exceed it"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "events"
    #: It reads tokens before a first token, which are counted for policies that say so.
    reads_progress: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("slo_ms", 2000.0, 1.0, 1e6, "objective for the expected TTFT", tunable="no"),
        WeightSpec("tokens_per_s", 16_000.0, 100.0, 1e6, "prefill throughput of every replica", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        token_ms = 1e3 / weights["tokens_per_s"]
        queue_ms = fill_unknown(candidates.uncached_prefill_tokens) * token_ms
        prefill_ms = candidates.uncached_tokens * token_ms
        terms = {"cached_tokens": candidates.cached_tokens.copy(), "queue": queue_ms, "prefill": prefill_ms}
        ttft_ms, load = queue_ms + prefill_ms, candidates.in_flight_requests
        pair = np.array(mapped_rows(candidates.salt, request.prefix_hash))
        cached = candidates.cached_tokens[pair]
        first = pair[argmin_tiebreak(-cached, ttft_ms[pair], rng)]
        if ttft_ms[first] <= weights["slo_ms"]:
            return Choice(int(first), terms)
        sooner = pair[argmin_tiebreak(ttft_ms[pair], load[pair], rng)]
        if ttft_ms[sooner] <= weights["slo_ms"]:
            return Choice(int(sooner), terms, fallback="slo")
        return Choice(argmin_tiebreak(ttft_ms, load, rng), terms, fallback="hotspot")


def mapped_rows(salt: NDArray[np.uint64], key: int) -> tuple[int, ...]:
    """Return the rows of the two replicas of a key, one if there is one: the second hash never gives the first's."""
    first = int(rendezvous_scores(salt, key).argmax())
    if len(salt) == 1:
        return (first,)
    others = rendezvous_scores(salt, key ^ SECOND_HASH)
    others[first] = 0
    return first, int(others.argmax())
