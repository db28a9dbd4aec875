"""`lodestar`: the least TTFT by a network that is trained on the router's own traffic, with the paper's guards.

Owns the order of the guards and the K-filter. The guards that other learned policies have too are in
`gorgo.policies.learned.base`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats, Rows, Table
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, argmin_tiebreak, explored_row, fill_unknown
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.training.candidate_table import prefix_group
from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.policies.base import rendezvous_scores
from gorgo.policies.learned.base import (
    Forecast,
    Guard,
    LearnedPolicy,
    near_best,
    predict_ttft_s,
    rows_in_range,
    sample_rows,
)
from gorgo.policies.prefix_cache import PrefixCacheAndLoad

# The K-filter: while KV pools are full, a prefix group has K replicas, so that its blocks are not copied to all.
#
# Theory of operation. With full pools each copy of a prefix evicts another prefix. A cost that compares replicas of
# the moment spreads a popular prefix over the whole fleet, and every replica then evicts all the time. So a group of
# prompts with one beginning goes to K replicas only, by rendezvous hashing: when a replica leaves, only its groups
# move.
#
# References
# ----------
# Lodestar paper, section on cache saturation. Its released code hashes modulo the fleet's size, which moves nearly all
# groups at each change of the fleet.


def is_saturated(kv_usage: Floats, cached_tokens: Floats, *, saturation: float, min_hit_tokens: float) -> bool:
    """Return whether pools are full and the prompt's prefix is worth the filter.

    Parameters
    ----------
    kv_usage:
        Share of each candidate's KV pool in use, NaN if unknown: it counts as the worst known.
    cached_tokens:
        Of the prompt, per candidate.
    saturation:
        Mean usage above which pools count as full.
    min_hit_tokens:
        The longest match must be longer.
    """
    return bool(cached_tokens.max() > min_hit_tokens and fill_unknown(kv_usage).mean() > saturation)


def replicas_of_group(salt: NDArray[np.uint64], group: int, count: int) -> NDArray[np.intp]:
    """Return the rows of the `count` replicas that serve a prefix group, in order; all if there are no more."""
    if count >= len(salt):
        return np.arange(len(salt))
    scores = rendezvous_scores(salt, group)
    return np.sort(np.argpartition(scores, len(scores) - count)[len(scores) - count :])


#: Accelerators with a feature of their own: those of the released code.
ACCELERATORS = ("L20", "A10", "A30", "L3c", "A100", "H100", "L4", "L40", "L40S", "T4", "V100")
#: The paper's features with the released code's two counts; the round trip, since a TTFT is measured at the proxy; and
#: whether the answer is a stream, since one in one piece has no TTFT and is learned by the time to its end.
FEATURES = (
    "prompt_tokens",
    "hit_share",
    "running_requests",
    "queued_requests",
    "prefilling_requests",
    "decoding_requests",
    "prefill_tokens",
    "decode_tokens",
    "kv_usage",
    "rtt_s",
    "streamed",
    *(f"accelerator={name}" for name in ACCELERATORS),
)
#: Candidates above which a sample of them is evaluated: one pass of the network stays below a millisecond.
MOST_EVALUATED = 256


class Lodestar(LearnedPolicy):
    """Least predicted TTFT, behind guards that leave the decision to `prefix-cache-and-load`.

    In this order: the heuristic decides without a model, and where a candidate is out of the training's range; a share
    `epsilon` of decisions is random; while KV pools are full a prefix group has `k` replicas; of the least predicted
    TTFT and those within a share `delta` of it one is chosen at random. The heuristic is evaluated first. A model
    that fails leaves the decision to it too.

    References
    ----------
    Lodestar paper, algorithm 4. Its tie-break has the sign of a reward wrong, and is taken over all replicas; the
    released code checks the range of the first replica alone. Neither is repeated here.
    """

    name: ClassVar[str] = "lodestar"
    summary: ClassVar[str] = (
        "Lodestar Alg. 4: least TTFT by a network trained on own traffic; prefix-cache-and-load where it cannot be "
        "trusted"
    )
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "bounded"
    #: Its guards draw.
    draws: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("range_check", 1.0, 0.0, 1.0, "1: out of the training's range the heuristic decides", "no"),
        WeightSpec("range_margin", 0.1, 0.0, 10.0, "share of a feature's range that counts as within it", "no"),
        WeightSpec("epsilon", 0.01, 0.0, 1.0, "share of decisions at random", "no"),
        WeightSpec("k", 2.0, 0.0, 64.0, "replicas of a prefix group while KV pools are full; 0: any", "no"),
        WeightSpec("kv_saturation", 0.8, 0.0, 1.0, "mean KV usage above which pools are full", "no"),
        WeightSpec("k_min_hit", 100.0, 0.0, 1e6, "tokens of the longest match above which the filter applies", "no"),
        WeightSpec("delta", 0.0, 0.0, 1.0, "share of the least prediction within which replicas are equal", "no"),
        WeightSpec("d", 64.0, 1.0, 256.0, "replicas evaluated where there are more than 256", "no"),
    )

    def __init__(self, training: TrainingSpec | None = None) -> None:
        super().__init__(training or TrainingSpec("mlp", FEATURES))
        self._heuristic = PrefixCacheAndLoad()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        heuristic = self._heuristic.choose(request, candidates, weights, rng)
        table, model = self.features(request, candidates), self._model
        prior = Forecast(request, candidates)
        if model is None:
            return prior.choice(heuristic, table, guard="cold_start")
        if len(candidates) > 1:
            if weights["range_check"] and not _is_in_range(model, table, weights):
                return prior.choice(heuristic, table, guard="out_of_range")
            explored = explored_row(len(candidates), weights["epsilon"], rng)
            if explored is not None:
                return prior.choice(Choice(explored), table, guard="explore")
        group = _rows_of_group(request, candidates, weights)
        rows = np.arange(len(candidates)) if group is None else group
        if len(rows) > MOST_EVALUATED:
            rows = sample_rows(rows, int(weights["d"]), rng, include=heuristic.row)
        ttft_s = _evaluate(model, table, rows)
        if ttft_s is None:
            return prior.choice(heuristic, table, guard="no_model")
        rule, guard = _least(ttft_s * 1e3, rows, candidates, weights["delta"], rng)
        return Forecast(request, candidates, ttft_s).choice(
            rule,
            table,
            guard=guard if group is None else "k_filter",
            estimates={"ttft" if request.streamed else "e2e": ttft_s},
        )


def _is_in_range(model: Model, table: Table, weights: Weights) -> bool:
    return bool(rows_in_range(table, model.low, model.high, margin=weights["range_margin"]).all())


def _rows_of_group(request: RouteRequest, candidates: Candidates, weights: Weights) -> Rows | None:
    """Return the rows that the K-filter leaves to the request; `None` where it does not apply."""
    replicas = int(weights["k"])
    if not 0 < replicas < len(candidates) or not is_saturated(
        candidates.kv_usage,
        candidates.cached_tokens,
        saturation=weights["kv_saturation"],
        min_hit_tokens=weights["k_min_hit"],
    ):
        return None
    return replicas_of_group(candidates.salt, prefix_group(request), replicas)


def _evaluate(model: Model, table: Table, rows: Rows) -> Floats | None:
    """Return the prediction of every candidate, of a large fleet that of `rows` alone; `None` if the model fails."""
    if len(table) <= MOST_EVALUATED:
        return predict_ttft_s(model, table)
    evaluated = predict_ttft_s(model, table[rows])
    if evaluated is None:
        return None
    ttft_s = np.full(len(table), np.nan)
    ttft_s[rows] = evaluated
    return ttft_s


def _least(
    cost: Floats, rows: Rows, candidates: Candidates, delta: float, rng: np.random.Generator
) -> tuple[Choice, Guard | None]:
    """Return the least cost among `rows`, or any near it; without the cost where some were not evaluated."""
    near = rows[near_best(cost[rows], share=delta)] if delta > 0.0 else rows[:1]
    if len(near) > 1:
        return Choice(int(rng.choice(near)), {"predicted_ttft": cost}), "near_best"
    row = int(rows[argmin_tiebreak(cost[rows], candidates.in_flight_requests[rows], rng)])
    if np.isnan(cost).any():
        return Choice(row), None
    return Choice(row, {"predicted_ttft": cost}, cost), None
