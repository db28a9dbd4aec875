"""`predicted-latency`: headroom against both latency objectives by trained predictions, behind an affinity gate.

Owns the gate, the headroom with its tiers and scores, and the order in which llm-d's filters act. Leaves the
predictions to the model of `LearnedPolicy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats, Mask, Rows
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, argmin_tiebreak
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.training.learning import TrainingSpec
from gorgo.policies.learned.base import Forecast, Guard, LearnedPolicy, predict_both
from gorgo.policies.prefix_cache import LoadPrefix

# The affinity gate: keep to replicas that have the prompt cached, unless they are much later than the others.
#
# References
# ----------
# llm-d-router, `prefix-cache-affinity-filter`.


_HASH_BYTES = 8


class Gated(NamedTuple):
    """The rows that pass, and why they are all or not."""

    rows: Rows
    guard: Guard | None


def cached_shares(request: RouteRequest, candidates: Candidates) -> Floats:
    """Return the share of the prompt's full blocks that each candidate has; 0 without a full block."""
    full_tokens = len(request.blocks) // _HASH_BYTES * request.block_tokens
    if full_tokens <= 0.0:
        return np.zeros(len(candidates))
    return np.minimum(candidates.cached_tokens / full_tokens, 1.0)


def gate(rows: Rows, shares: Floats, ttft_s: Floats, *, share: float, max_penalty_s: float, explores: bool) -> Gated:
    """Return those of `rows` with at least `share` of the prompt cached, or all of them.

    All pass where none or each has that share; if `explores`; and where the best of those that have it is later than
    the best of the others by more than `max_penalty_s`.

    Parameters
    ----------
    rows:
        Candidates still in question.
    shares, ttft_s:
        Cached share and predicted time to first token of every candidate.
    share:
        0 is no gate.
    max_penalty_s:
        0 is no limit.
    """
    cached = shares[rows] >= share
    if len(rows) <= 1 or share <= 0.0 or not cached.any() or cached.all():
        return Gated(rows, None)
    if explores:
        return Gated(rows, "explore")
    penalty_s = float(ttft_s[rows[cached]].min() - ttft_s[rows[~cached]].min())
    if penalty_s > (max_penalty_s or inf):
        return Gated(rows, "affinity_left")
    return Gated(rows[cached], "affinity_kept")


# Headroom: the time left to the objectives of a request, and scores by it.
#
# Theory of operation. Headroom is objective minus prediction, for the first token and per output token. Of the
# replicas that meet both objectives the one with the least headroom wins: idle ones stay free for requests that need
# them. Where none meets both, the one that misses by the least wins. Without any objective both are 0, so that the
# least predicted times win. Where one alone is set, no replica misses the other one.
#
# The later release has another rule (`idle_first`): each objective that is not set is 0, and where none meets both an
# idle replica serves, however late it is, before the ones that miss one objective alone.
#
# References
# ----------
# llm-d, predicted-latency based scheduling, section on endpoint selection; llm-d-router, `slo-headroom-tier-filter` and
# the latency scorer with the strategy `least`, whose README has the later rule.


#: Score of the best; one out of the scored group has 0.
MOST = 101
#: A range of headroom below this is none, s.
_NO_RANGE_S = 1e-9


class Headroom(NamedTuple):
    """Of every candidate, s."""

    ttft_s: Floats
    tpot_s: Floats

    @property
    def is_met(self) -> Mask:
        """Which candidates meet both objectives."""
        met: Mask = (self.ttft_s >= 0.0) & (self.tpot_s >= 0.0)
        return met


class Tier(NamedTuple):
    """Rows of one tier, and whether chance chose the worse one."""

    rows: Rows
    is_explored: bool


def headroom_of(
    ttft_s: Floats,
    tpot_s: Floats | None,
    *,
    slo_ttft_s: float | None,
    slo_tpot_s: float | None,
    strictest_s: Floats,
    unset_is_zero: bool = False,
) -> Headroom:
    """Return the headroom of each candidate.

    Parameters
    ----------
    ttft_s, tpot_s:
        Predictions. Without one of the time per token that objective counts as met by all, with nothing to spare.
    slo_ttft_s, slo_tpot_s:
        Objectives of the request. Where one alone is set, the other one counts as met by all.
    strictest_s:
        The strictest objective per output token of the requests in flight on each candidate, NaN without one: a new
        request slows theirs.
    unset_is_zero:
        Whether an objective that is not set is 0 beside one that is: every replica then misses it.
    """
    none_set = slo_ttft_s is None and slo_tpot_s is None
    if slo_ttft_s is None and not (none_set or unset_is_zero):
        first_s = np.zeros(len(ttft_s))
    else:
        first_s = (slo_ttft_s or 0.0) - ttft_s
    if tpot_s is None:
        return Headroom(first_s, np.zeros(len(ttft_s)))
    if slo_tpot_s is None and not (none_set or unset_is_zero):
        return Headroom(first_s, np.where(np.isnan(strictest_s), 0.0, strictest_s - tpot_s))
    return Headroom(first_s, np.fmin(slo_tpot_s or 0.0, strictest_s) - tpot_s)


def tier(rows: Rows, headroom: Headroom, *, explores: bool) -> Tier:
    """Return the rows that meet both objectives, all if none or each does; if `explores`, the others."""
    met = headroom.is_met[rows]
    if met.all() or not met.any():
        return Tier(rows, False)
    return Tier(rows[~met if explores else met], explores)


def scores(
    rows: Rows, headroom: Headroom, in_flight: Floats, *, ttft_share: float, idle_first: bool = False
) -> NDArray[np.int64]:
    """Return the score of each of `rows`, 1 to 101 in the group that is compared and 0 out of it.

    The group is the rows that meet both objectives, else all of them, each by what it misses. With `idle_first` it is
    the idle ones where none meets both; else the first of these with a row: those that miss only the objective per
    token, those that miss only that of the first token, those that miss both.
    """
    first, token = headroom.ttft_s[rows], headroom.tpot_s[rows]
    late, slow = first < 0.0, token < 0.0
    if (~late & ~slow).any():
        group = np.flatnonzero(~late & ~slow)
    elif idle_first:
        group = _least_missed(late, slow, in_flight[rows] == 0.0)
        first, token = np.abs(first), np.abs(token)
    else:
        # An objective that is met is missed by nothing, however much is left of it.
        group, first, token = np.arange(len(rows)), np.maximum(-first, 0.0), np.maximum(-token, 0.0)
    distance = _distance(first[group], token[group], ttft_share)
    scored = np.zeros(len(rows), dtype=np.int64)
    scored[group] = ((1.0 - distance) * (MOST - 1) + 1e-9).astype(np.int64) + 1
    return scored


def _least_missed(late: Mask, slow: Mask, idle: Mask) -> Rows:
    groups = [idle, ~late & slow, late & ~slow, late & slow]
    return next(np.flatnonzero(group) for group in groups if group.any())


def _distance(first: Floats, token: Floats, ttft_share: float) -> Floats:
    """Return the weighted mean of both headrooms, each as 0 (least of the group) to 1 (most)."""
    first_range, token_range = np.ptp(first), np.ptp(token)
    if first_range <= _NO_RANGE_S and token_range <= _NO_RANGE_S:
        return np.full(len(first), 0.5)
    # A headroom that is the same everywhere leaves its weight to the other.
    share = 0.0 if first_range <= _NO_RANGE_S else 1.0 if token_range <= _NO_RANGE_S else ttft_share
    total = np.zeros(len(first))
    if share > 0.0:
        total += share * (first - first.min()) / first_range
    if share < 1.0:
        total += (1.0 - share) * (token - token.min()) / token_range
    return total


#: Those of llm-d for text: its count of running requests is the router's own. `streamed` separates first tokens from
#: answers in one piece, whose time to the end is learned in that place, as by its default.
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
    "streamed",
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
    are later than the others by more than `max_penalty_s`. For a share `epsilon` of decisions, by one draw, both gates
    are open and replicas that miss an objective are taken. Without a model the rule of `load-prefix` decides.

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
    signal_ages: ClassVar[Mapping[str, float]] = {"queued_requests": 1.0, "used_tokens": 1.0}
    #: An objective of a request steers it and sheds it not (`core.policy.interface.takes_objectives`).
    takes_objectives: ClassVar[bool] = True
    #: Its guards draw.
    draws: ClassVar[bool] = True
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec("affinity_first", 0.99, 0.0, 1.0, "cached share of the first gate; 0: no gate", "no"),
        WeightSpec("affinity", 0.8, 0.0, 1.0, "cached share of the second gate; 0: no gate", "no"),
        WeightSpec("max_penalty_s", 5.0, 0.0, 600.0, "TTFT by which cached replicas may be later, s; 0: any", "no"),
        WeightSpec("epsilon", 0.01, 0.0, 1.0, "share of decisions with open gates and of the worse tier", "no"),
        WeightSpec(
            "ttft_share", 0.8, 0.0, 1.0, "weight of the headroom to the first token; the rest is per token", "no"
        ),
        WeightSpec("weighted_pick", 0.0, 0.0, 1.0, "1: at random by score; 0: the best score", "no"),
        WeightSpec(
            "idle_first",
            0.0,
            0.0,
            1.0,
            "where none meets both objectives: 0: the least missed, as the post; 1: an idle one, as llm-d's later rule",
            "no",
        ),
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
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        table, model = self.features(request, candidates), self._model
        predicted = None if model is None else predict_both(model, table)
        if predicted is None:
            heuristic = self._heuristic.choose(request, candidates, self._heuristic_weights, rng)
            word: Guard = "cold_start" if model is None else "no_model"
            return Forecast(request, candidates).choice(heuristic, table, guard=word)
        headroom = headroom_of(
            predicted.ttft_s,
            predicted.tpot_s if request.streamed else None,  # an answer in one piece has no time per token
            slo_ttft_s=request.slo_ttft_s,
            slo_tpot_s=request.slo_tpot_s,
            strictest_s=candidates.slo_tpot_s,
            unset_is_zero=bool(weights["idle_first"]),
        )
        passed = _filtered(headroom, predicted.ttft_s, cached_shares(request, candidates), weights, rng)
        rule = _pick(passed.rows, headroom, predicted.ttft_s, candidates, weights, rng)
        estimates = {
            "ttft" if request.streamed else "e2e": predicted.ttft_s,
            **({} if predicted.tpot_s is None or not request.streamed else {"tpot": predicted.tpot_s}),
            "headroom_ttft": headroom.ttft_s,
            "headroom_tpot": headroom.tpot_s,
        }
        forecast = Forecast(request, candidates, predicted.ttft_s)
        return forecast.choice(rule, table, guard=passed.guard, estimates=estimates)


class _Passed(NamedTuple):
    """Rows after the filters, and the guard that removed or admitted some."""

    rows: Rows
    guard: Guard | None


def _filtered(
    headroom: Headroom, ttft_s: Floats, shares: Floats, weights: Weights, rng: np.random.Generator
) -> _Passed:
    """Return the rows after gate, tiers and gate, in llm-d's order.

    One draw says whether the decision explores: a prompt that is wholly cached meets both gates, and one that opened
    would be closed again by the other.
    """
    explores = bool(rng.random() < weights["epsilon"])

    def gated(rows: Rows, share: float) -> Gated:
        return gate(rows, shares, ttft_s, share=share, max_penalty_s=weights["max_penalty_s"], explores=explores)

    first = gated(np.arange(len(shares)), weights["affinity_first"])
    tiered = tier(first.rows, headroom, explores=explores)
    second = gated(tiered.rows, weights["affinity"])
    acted = {first.guard, second.guard, "explore" if tiered.is_explored else None}
    return _Passed(second.rows, next((guard for guard in _GUARDS if guard in acted), None))


def _pick(
    rows: Rows, headroom: Headroom, ttft_s: Floats, candidates: Candidates, weights: Weights, rng: np.random.Generator
) -> Choice:
    """Return the best score of `rows`, or one of them at random by score."""
    score = np.zeros(len(candidates))
    score[rows] = scores(
        rows,
        headroom,
        candidates.in_flight_requests,
        ttft_share=weights["ttft_share"],
        idle_first=bool(weights["idle_first"]),
    )
    cost = MOST - score
    if weights["weighted_pick"]:
        return Choice(int(rng.choice(len(score), p=score / score.sum())), {"headroom": cost})
    unscored = np.flatnonzero(score == 0.0)
    if len(unscored) > 1:
        later_s = ttft_s[unscored] - ttft_s[unscored].min()
        cost[unscored] += (MOST - 1) * later_s / max(float(later_s.max()), _LEAST_RANGE_S)
    return Choice(argmin_tiebreak(cost, cost, rng), {"headroom": cost}, cost)
