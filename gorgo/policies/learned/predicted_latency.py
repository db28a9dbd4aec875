"""`predicted-latency`: headroom against both latency objectives by trained predictions, behind an affinity gate."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from gorgo.core.arrays import Floats, Rows
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice, argmin_tiebreak
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.training.spec import TrainingSpec
from gorgo.policies.learned.affinity import Gated, cached_shares, gate
from gorgo.policies.learned.base import LearnedPolicy
from gorgo.policies.learned.forecast import Forecast
from gorgo.policies.learned.guards import Guard, predict_both
from gorgo.policies.learned.headroom import MOST, Headroom, headroom_of, scores, tier
from gorgo.policies.load_prefix import LoadPrefix

#: Those of llm-d for text: its count of running requests is the router's own.
FEATURES = (
    "kv_usage",
    "prompt_tokens",
    "queued_requests",
    "in_flight_requests",
    "is_queued",
    "hit_share",
    "uncached_tokens",
    "hit_quarter",
    "uncached_prefill_tokens",
    "decode_tokens",
)

#: Predictions of replicas without a score that differ by less are equal, s.
_LEAST_RANGE_S = 1e-9

#: llm-d trains each 10 s. Rounds here go by samples: each hundred, and later each tenth of those stored.
ROUND_SAMPLES, ROUND_GROWTH = 100, 0.1
#: Guards of the filters. Of several that acted the first here is named.
_GUARDS: tuple[Guard, ...] = ("explore", "affinity_left", "affinity_kept")


class PredictedLatency(LearnedPolicy):
    """Of the replicas that meet both objectives the one with the least headroom, else the one that misses least.

    In this order: replicas with 0.99 of the prompt cached pass alone; then those that meet both objectives; then those
    with 0.80 cached; then the best score by headroom, or one at random by score. A gate opens where the cached replicas
    are later than the others by more than `max_penalty_s`, and for a share `epsilon` of decisions, which also takes
    replicas that miss an objective. Without a model the rule of `load-prefix` decides.

    Cost is 101 minus the score in percent; of a replica without a score 101, and up to 100 more by its predicted first
    token, which is what a shadow ranks it by. A request's candidates are predicted in one call per time. Requests are
    evaluated one after another, since each reservation is a feature of the next.

    References
    ----------
    llm-d, predicted-latency based scheduling; llm-d-router, its profile of filters, scorer and picker.
    """

    name: ClassVar[str] = "predicted-latency"
    summary: ClassVar[str] = (
        "llm-d: least headroom against both latency objectives by boosted trees, else least missed; prefers cached "
        "prefixes"
    )
    unit: ClassVar[str] = "%"
    index: ClassVar[IndexKind] = "published"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("affinity_first", 0.99, 0.0, 1.0, "cached share of the first gate; 0: no gate", "no"),
        WeightSpec("affinity", 0.8, 0.0, 1.0, "cached share of the second gate; 0: no gate", "no"),
        WeightSpec("max_penalty_s", 5.0, 0.0, 600.0, "TTFT by which cached replicas may be later, s; 0: any", "no"),
        WeightSpec("epsilon", 0.01, 0.0, 1.0, "share of gates opened and of worse replicas taken at random", "no"),
        WeightSpec(
            "ttft_share", 0.8, 0.0, 1.0, "weight of the headroom to the first token; the rest is per token", "no"
        ),
        WeightSpec("weighted_pick", 0.0, 0.0, 1.0, "1: at random by score; 0: the best score", "no"),
    )

    def __init__(self, training: TrainingSpec | None = None) -> None:
        super().__init__(
            training
            or TrainingSpec(
                "trees",
                FEATURES,
                round_samples=ROUND_SAMPLES,
                round_growth=ROUND_GROWTH,
                first_samples=100,
                store="stratified",
            )
        )
        self._heuristic = LoadPrefix()
        self._heuristic_weights = Weights.of(LoadPrefix.weight_specs)

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        table, model = self.features(request, candidates), self._model
        predicted = None if model is None else predict_both(model, table)
        if predicted is None:
            heuristic = self._heuristic.choose(request, candidates, self._heuristic_weights, rng)
            word: Guard = "cold_start" if model is None else "no_model"
            return Forecast(request, candidates).choice(heuristic, table, guard=word)
        headroom = headroom_of(
            predicted.ttft_s,
            predicted.tpot_s,
            slo_ttft_s=request.slo_ttft_s,
            slo_tpot_s=request.slo_tpot_s,
            strictest_s=candidates.slo_tpot_s,
        )
        passed = _filtered(headroom, predicted.ttft_s, cached_shares(request, candidates), weights, rng)
        rule = _pick(passed.rows, headroom, predicted.ttft_s, candidates, weights, rng)
        return Forecast(request, candidates, predicted.ttft_s).choice(rule, table, guard=passed.guard)


class _Passed(NamedTuple):
    """Rows after the filters, and the guard that removed or admitted some."""

    rows: Rows
    guard: Guard | None


def _filtered(
    headroom: Headroom, ttft_s: Floats, shares: Floats, weights: Weights, rng: np.random.Generator
) -> _Passed:
    """Return the rows after gate, tiers and gate, in llm-d's order. Each draws for itself whether it explores."""

    def gated(rows: Rows, share: float) -> Gated:
        explores = bool(rng.random() < weights["epsilon"])
        return gate(rows, shares, ttft_s, share=share, max_penalty_s=weights["max_penalty_s"], explores=explores)

    first = gated(np.arange(len(shares)), weights["affinity_first"])
    tiered = tier(first.rows, headroom, explores=bool(rng.random() < weights["epsilon"]))
    second = gated(tiered.rows, weights["affinity"])
    acted = {first.guard, second.guard, "explore" if tiered.is_explored else None}
    return _Passed(second.rows, next((guard for guard in _GUARDS if guard in acted), None))


def _pick(
    rows: Rows, headroom: Headroom, ttft_s: Floats, candidates: Candidates, weights: Weights, rng: np.random.Generator
) -> Choice:
    """Return the best score of `rows`, or one of them at random by score."""
    score = np.zeros(len(candidates))
    score[rows] = scores(rows, headroom, candidates.in_flight_requests, ttft_share=weights["ttft_share"])
    cost = MOST - score
    if weights["weighted_pick"]:
        return Choice(int(rng.choice(len(score), p=score / score.sum())), {"headroom": cost})
    unscored = np.flatnonzero(score == 0.0)
    if len(unscored) > 1:
        later_s = ttft_s[unscored] - ttft_s[unscored].min()
        cost[unscored] += (MOST - 1) * later_s / max(float(later_s.max()), _LEAST_RANGE_S)
    return Choice(argmin_tiebreak(cost, cost, rng), {"headroom": cost}, cost)
