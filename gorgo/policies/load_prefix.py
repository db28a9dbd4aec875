"""`load-prefix`: llm-d's default scorers, with which its predicted latency is compared."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.arrays import Floats
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice, argmin_tiebreak
from gorgo.core.policy.cost import fill_unknown
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class LoadPrefix:
    """cost = prefix * uncached share + queue * place of the engine's queue + kv * KV usage; ties at random.

    The place of a queue is 0 for the shortest among the candidates and 1 for the longest, whatever the lengths. A
    missing report counts as the worst known, which costs as much as a queue or a KV pool of that size. The blog's two
    sets of weights are 1:1:1, the default here, and 3:2:2.

    References
    ----------
    llm-d, `prefix-cache-scorer`, `queue-scorer` and `kv-cache-utilization-scorer` with its max-score picker.
    """

    name: ClassVar[str] = "load-prefix"
    summary: ClassVar[str] = (
        "llm-d's scorers: least uncached share + relative queue + KV usage, weighted, ties at random"
    )
    unit: ClassVar[str] = "share"
    index: ClassVar[IndexKind] = "published"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("prefix", 1.0, 0.1, 10.0, "on the share of the prompt that is not cached"),
        WeightSpec("queue", 1.0, 0.1, 10.0, "on the queue, 0 for the shortest and 1 for the longest"),
        WeightSpec("kv", 1.0, 0.1, 10.0, "on the share of the KV pool in use"),
    )

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        terms = {
            "prefix": weights["prefix"] * candidates.uncached_tokens / max(candidates.prompt_tokens, 1),
            "queue": weights["queue"] * _relative(fill_unknown(candidates.queued_requests)),
            "kv": weights["kv"] * fill_unknown(_usage(candidates)),
        }
        cost = terms["prefix"] + terms["queue"] + terms["kv"]
        return Choice(argmin_tiebreak(cost, cost, rng), terms, cost)


def _relative(queued: Floats) -> Floats:
    """Return each queue's place between the shortest and the longest; 0 where all are as long."""
    shortest = queued.min()
    place: Floats = (queued - shortest) / max(float(queued.max() - shortest), np.finfo(np.float64).tiny)
    return place


def _usage(candidates: Candidates) -> Floats:
    """Return the share of each KV pool in use, NaN where a figure is unknown; an engine may count more than fits."""
    pool = np.where(candidates.kv_capacity_tokens > 0, candidates.kv_capacity_tokens, np.nan)
    usage: Floats = np.clip(candidates.used_tokens / pool, 0.0, 1.0)
    return usage
