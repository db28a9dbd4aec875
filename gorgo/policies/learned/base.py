"""The part that all learned policies share: the settings of their training, their model, and the guards around it.

Owns `LearnedPolicy`, the guards that decide instead of a model, and `Forecast`, the predicted times that queueing,
deadlines and hedging use. Leaves the features and the choice to each policy, and training to `gorgo.learning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats, Rows, Table
from gorgo.core.policy.interface import Candidates, Choice, Prediction
from gorgo.core.training.candidate_table import feature_table
from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.errors import ConfigError
from gorgo.policies.gorgo_ms import PredictedTimes, predict_times


class LearnedPolicy:
    """Settings and model.

    Parameters
    ----------
    training:
        With the features of the policy. An experiment varies it; the policy reads the names alone.
    """

    #: Both papers' systems scrape each 50 to 100 ms; a second is what an engine answers without slowing down.
    signal_ages: ClassVar[Mapping[str, float]] = {"queued_requests": 1.0, "running_requests": 1.0, "used_tokens": 1.0}

    def __init__(self, training: TrainingSpec) -> None:
        self.training = training
        self.feature_names = training.names
        self._model: Model | None = None

    def require_packages(self) -> None:
        """Raise `MissingExtra` if a package that the training needs is not installed."""
        if self.training.kind == "trees":
            from gorgo.learning.trees import require_lightgbm

            require_lightgbm()

    def features(self, request: RouteRequest, candidates: Candidates) -> Table:
        """Return a row per candidate."""
        return feature_table(self.feature_names, request, candidates)

    def adopt(self, model: Model | None) -> None:
        """Choose by `model` from the next decision on, or without one.

        Raises `ConfigError` for a model of other features. The trainer waits for `first_samples`.
        """
        if model is not None and model.names != self.feature_names:
            raise ConfigError(
                f"model {model.version} has the features {', '.join(model.names)}; "
                f"expected {', '.join(self.feature_names)}"
            )
        self._model = model


# Guards of a model: where it applies, what it predicts, and which of its best rows are equally good.
#
# Owns the words of `Choice.fallback` for decisions that a guard takes instead of the model.


#: Why a guard decided: no model yet, a candidate unlike the training, chance, a cached prefix that was preferred or
#: left, a full KV pool, several predictions that are nearly equal, a model that failed.
Guard = Literal[
    "cold_start", "out_of_range", "explore", "affinity_kept", "affinity_left", "k_filter", "near_best", "no_model"
]

#: Share of a bound by which float32 differs from the value that it was rounded from.
_ROUNDING = 1e-6


class PredictsTtft(Protocol):
    """A model of the TTFT."""

    def ttft_s(self, table: Table) -> Floats: ...


class PredictsBoth(PredictsTtft, Protocol):
    """A model that may predict the time per output token too."""

    def tpot_s(self, table: Table) -> Floats | None: ...


class Predicted(NamedTuple):
    """Predictions per row; `tpot_s` is `None` without a model of it."""

    ttft_s: Floats
    tpot_s: Floats | None


def rows_in_range(table: Table, low: Table, high: Table, *, margin: float) -> NDArray[np.bool_]:
    """Return which rows have every feature within the bounds of the training.

    Parameters
    ----------
    low, high:
        Bounds per feature.
    margin:
        Share of the distance between the bounds that a value may lie beyond them. A feature that was constant in the
        training has no such distance: any other value of it is out of range.
    """
    beyond = margin * (high - low) + _ROUNDING * np.maximum(np.abs(low), np.abs(high))
    inside: NDArray[np.bool_] = np.logical_and(table >= low - beyond, table <= high + beyond)
    every: NDArray[np.bool_] = np.logical_and.reduce(inside, axis=1)
    return every


def predict_ttft_s(model: PredictsTtft, table: Table) -> Floats | None:
    """Return the predicted TTFT per row, at least 0; `None` if the model raises or answers no number per row."""
    try:
        return _checked(model.ttft_s(table), len(table))
    except Exception:  # noqa: BLE001 - any fault of a model: requests are routed without it
        return None


def predict_both(model: PredictsBoth, table: Table) -> Predicted | None:
    """Return both predictions as `predict_ttft_s` does; `None` if either fails."""
    try:
        tpot_s = model.tpot_s(table)
        checked_s = None if tpot_s is None else _checked(tpot_s, len(table))
    except Exception:  # noqa: BLE001 - as above
        return None
    ttft_s = predict_ttft_s(model, table)
    if ttft_s is None or (checked_s is None and tpot_s is not None):
        return None
    return Predicted(ttft_s, checked_s)


def _checked(answer: Floats, rows: int) -> Floats | None:
    times_s = np.asarray(answer, dtype=np.float64)
    is_valid = times_s.shape == (rows,) and bool(np.isfinite(times_s).all())
    return np.maximum(times_s, 0.0) if is_valid else None


def near_best(cost: Floats, *, share: float) -> Rows:
    """Return the rows whose cost is at most the least cost plus `share` of it.

    Example
    -------
    >>> near_best(np.array([1.0, 1.05, 1.2]), share=0.1).tolist()
    [0, 1]
    """
    least = cost.min()
    return np.flatnonzero(cost <= least + share * abs(least))


def sample_rows(rows: Rows, count: int, rng: np.random.Generator, *, include: int) -> Rows:
    """Return `count` of `rows` at random and the row `include`, in order; all of them if there are no more."""
    if len(rows) <= count:
        return rows
    drawn = rng.choice(rows, count, replace=False)
    return np.union1d(drawn, [include]).astype(np.intp)


# Predicted times of each candidate: by a model where it predicts, else by the priors of `gorgo-ms`.
#
# Queueing, deadlines and hedging need the parts of a prediction, and a model predicts their sum. So network and
# prefill are those of the priors, and the rest is the work before the request.


class Forecast:
    """The prediction of one decision.

    Parameters
    ----------
    ttft_s:
        From dispatch to first token, NaN for a candidate that the model did not evaluate; `None` without a model. Of an
        answer in one piece it is the time to the end, which is no time to a first token: the priors have that.
    """

    __slots__ = ("_candidates", "_request", "_times", "_ttft_s")

    def __init__(self, request: RouteRequest, candidates: Candidates, ttft_s: Floats | None = None) -> None:
        self._request = request
        self._candidates = candidates
        self._ttft_s = ttft_s if request.streamed else None
        self._times: PredictedTimes | None = None

    @property
    def times(self) -> PredictedTimes:
        """Those of the priors."""
        if self._times is None:
            self._times = predict_times(self._request, self._candidates)
        return self._times

    def predict(self, row: int) -> float | None:
        """Return the time from the request's arrival to its first token; `None` where it is unknown."""
        if self._ttft_s is None or isnan(ttft_s := self._ttft_s.item(row)):
            return self.times.ttft_s(row)
        return self._candidates.now - self._request.received_s + ttft_s

    def prediction(self) -> Prediction:
        prior = self.times.prediction()
        return prior if self._ttft_s is None else divided(self._ttft_s, prior)

    def choice(
        self, rule: Choice, table: Table, *, guard: Guard | None = None, estimates: Mapping[str, Floats] | None = None
    ) -> Choice:
        """Return a rule's choice with this prediction and the features; without its cost if a guard decided."""
        return Choice(
            rule.row,
            rule.terms,
            None if guard else rule.cost,
            self.predict(rule.row),
            guard,
            self.predict,
            self.prediction,
            table,
            estimates=estimates or {},
        )


def divided(ttft_s: Floats, prior: Prediction) -> Prediction:
    """Return predicted times as parts: network and prefill by the priors, the rest as backlog.

    A shorter time than network and prefill has no backlog. Where a time is NaN, the prior stays.
    """
    total_s = np.where(np.isnan(ttft_s), prior.idle_s + prior.backlog_s, ttft_s)
    idle_s = np.minimum(prior.idle_s, total_s)
    return Prediction(idle_s, total_s - idle_s, np.minimum(prior.prefill_s, idle_s))
