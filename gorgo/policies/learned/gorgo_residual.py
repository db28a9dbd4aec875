"""`gorgo-residual`: the cost of `gorgo-ms`, plus a learned residual of its prediction."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats, Table
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, Prediction, argmin_tiebreak
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.training.candidate_table import feature_table
from gorgo.core.training.learning import HasBase, Model, TrainingSpec, find_base
from gorgo.errors import ConfigError
from gorgo.policies.gorgo_ms import GorgoMs, predict_times
from gorgo.policies.learned.base import Forecast, LearnedPolicy, predict_ttft_s, rows_in_range

#: The feature that is the prediction by priors, from dispatch to first token, s. It is the last column.
PRIOR = "prior_s"
#: A longer prediction counts as this one, s: float32 has an end.
_MOST_PRIOR_S = 1e6
#: A correction of a prior needs fewer samples than a prediction: rounds as those of `predicted-latency`.
ROUND_SAMPLES, ROUND_GROWTH, FIRST_SAMPLES = 100, 0.1, 200
FEATURES = (
    "prompt_tokens",
    "uncached_tokens",
    "hit_share",
    "rtt_s",
    "prefilling_requests",
    "decoding_requests",
    "uncached_prefill_tokens",
    "decode_tokens",
    "decode_step_s",
    "running_requests",
    "queued_requests",
    "kv_usage",
    "kv_short_tokens",
    "prefill_token_s",
    "slowdown",
    "streamed",
    PRIOR,
)


class GorgoResidual(LearnedPolicy):
    """cost = that of `gorgo-ms` + R, in ms; R is the error of its prediction, as learned from ended requests.

    R is the waits that the engine imposes, for its running step and for KV memory, plus a learned residual. That is at
    most `residual_limit` and never more negative than the predicted queue and prefill: no answer comes before the
    network's time. It is 0 for a replica out of the training's range, where priors and waits extrapolate. R is 0
    without a model, and in the cost also where the priors' mean error is at most `trusted_error`: a choice that differs
    without need is chance. The prediction has it always. A model that fails leaves the decision to `gorgo-ms`.

    Of an answer in one piece the time to its end is learned. What all candidates have of it in common orders none, so R
    is what each has beyond the least.
    """

    name: ClassVar[str] = "gorgo-residual"
    summary: ClassVar[str] = "gorgo-ms plus the learned error of its prediction, which is 0 out of the training's range"
    unit: ClassVar[str] = "ms"
    index: ClassVar[IndexKind] = "events"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        *GorgoMs.weight_specs,
        WeightSpec("residual_limit", 10_000.0, 0.0, 60_000.0, "most of the learned residual, ms; 0: gorgo-ms", "no"),
        WeightSpec("range_check", 1.0, 0.0, 1.0, "1: out of the training's range the residual is 0", "no"),
        WeightSpec("range_margin", 0.1, 0.0, 10.0, "share of a feature's range that counts as within it", "no"),
        WeightSpec("trusted_error", 0.1, 0.0, 1.0, "mean error of the priors up to which the cost has no R", "no"),
    )

    def __init__(self, training: TrainingSpec | None = None) -> None:
        super().__init__(
            training
            or TrainingSpec(
                "residual",
                FEATURES,
                round_samples=ROUND_SAMPLES,
                round_growth=ROUND_GROWTH,
                first_samples=FIRST_SAMPLES,
            )
        )
        if self.feature_names[-1:] != (PRIOR,):
            raise ConfigError(f"features of gorgo-residual end in {self.feature_names[-1:]}; expected {PRIOR!r}")
        self._gorgo_ms = GorgoMs()
        self._based: HasBase | None = None

    def adopt(self, model: Model | None) -> None:
        super().adopt(model)
        self._based = find_base(model)

    def features(self, request: RouteRequest, candidates: Candidates) -> Table:
        return self._table(request, candidates, predict_times(request, candidates).prediction())

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        base = self._gorgo_ms.choose(request, candidates, weights, rng)
        assert base.cost is not None
        assert base.prediction is not None
        parts = base.prediction()
        table = self._table(request, candidates, parts)
        ttft_s = None if self._model is None else predict_ttft_s(self._model, table)
        if self._model is None or ttft_s is None:
            rule = Choice(base.row, {**base.terms, "residual": np.zeros(len(candidates))}, base.cost)
            return Forecast(request, candidates).choice(rule, table, guard="no_model" if self._model else None)
        prior_s = table[:, -1]
        base_s = prior_s if self._based is None else self._based.base_s(table)
        residual_s = ttft_s - base_s
        if weights["range_check"]:
            inside = rows_in_range(table, self._model.low, self._model.high, margin=weights["range_margin"])
            residual_s = np.where(inside, residual_s, 0.0)
        limit_s = weights["residual_limit"] / 1e3
        if not request.streamed:
            residual_s = residual_s - residual_s.min()
        residual_s = clipped(residual_s, parts, limit_s=limit_s)
        if limit_s > 0.0:
            residual_s = residual_s + (base_s - prior_s)
        # Priors of a first token say little of the time to the end of an answer.
        trusted = request.streamed and self._based is not None and self._based.prior_error <= weights["trusted_error"]
        terms = {**base.terms, "residual": np.zeros(len(candidates)) if trusted else residual_s * 1e3}
        cost = base.cost + terms["residual"]
        row = argmin_tiebreak(cost, candidates.in_flight_requests, rng)
        # Without a round trip there is no prediction: the worst known one is for comparing only.
        unknown = np.isnan(candidates.rtt_s)
        corrected_s = np.where(unknown, np.nan, parts.idle_s + parts.backlog_s + residual_s)
        estimates = {"ttft": corrected_s} if request.streamed else {"e2e": ttft_s}
        return Forecast(request, candidates, corrected_s).choice(Choice(row, terms, cost), table, estimates=estimates)

    def _table(self, request: RouteRequest, candidates: Candidates, parts: Prediction) -> Table:
        table = np.empty((len(candidates), len(self.feature_names)), dtype=np.float32)
        table[:, :-1] = feature_table(self.feature_names[:-1], request, candidates)
        table[:, -1] = np.minimum(parts.idle_s + parts.backlog_s, _MOST_PRIOR_S)
        return table


def clipped(residual_s: Floats, parts: Prediction, *, limit_s: float) -> Floats:
    """Return the residual within its limit, and no more negative than queue and prefill."""
    least_s = np.maximum(-limit_s, -(parts.backlog_s + parts.prefill_s))
    return np.clip(residual_s, least_s, limit_s)
