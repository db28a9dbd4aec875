"""`mooncake`: the least queue and prefill at one constant throughput, Mooncake's estimate of a first token."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, choose_min_cost, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec


class Mooncake:
    """cost = (uncached tokens before their first token + uncached tokens of this prompt) / throughput, in ms.

    One throughput for every replica, as in the paper: the choice does not depend on it, the terms do. Instances of one
    data centre are meant, so distance is not read. Mooncake also copies a longer prefix from another instance, which
    engines behind HTTP cannot.

    References
    ----------
    Mooncake (FAST'25), algorithm 1 without transfers.
    """

    name: ClassVar[str] = "mooncake"
    summary: ClassVar[str] = "Mooncake Alg. 1: least queue + prefill, both tokens over one constant throughput"
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "published"
    #: It reads tokens before a first token, which are counted for policies that say so.
    reads_progress: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("tokens_per_s", 16_000.0, 100.0, 1e6, "prefill throughput of every replica", tunable="no"),
    )

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        token_ms = 1e3 / weights["tokens_per_s"]
        terms = {
            "queue": fill_unknown(candidates.uncached_prefill_tokens) * token_ms,
            "prefill": candidates.uncached_tokens * token_ms,
        }
        return choose_min_cost(terms, candidates, rng)
