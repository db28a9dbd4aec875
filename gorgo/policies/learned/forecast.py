"""Predicted times of each candidate: by a model where it predicts, else by the priors of `gorgo-ms`.

Queueing, deadlines and hedging need the parts of a prediction, and a model predicts their sum. So network and prefill
are those of the priors, and the rest is the work before the request.
"""

from __future__ import annotations

from math import isnan

import numpy as np

from gorgo.core.arrays import Floats, Table
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice, Prediction
from gorgo.policies.gorgo_ms import PredictedTimes, predict_times
from gorgo.policies.learned.guards import Guard


class Forecast:
    """The prediction of one decision.

    Parameters
    ----------
    ttft_s:
        From dispatch to first token, NaN for a candidate that the model did not evaluate; `None` without a model.
    """

    __slots__ = ("_candidates", "_request", "_times", "_ttft_s")

    def __init__(self, request: RouteRequest, candidates: Candidates, ttft_s: Floats | None = None) -> None:
        self._request = request
        self._candidates = candidates
        self._ttft_s = ttft_s
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
        self,
        rule: Choice,
        table: Table,
        *,
        guard: Guard | None = None,
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
        )


def divided(ttft_s: Floats, prior: Prediction) -> Prediction:
    """Return predicted times as parts: network and prefill by the priors, the rest as backlog.

    A shorter time than network and prefill has no backlog. Where a time is NaN, the prior stays.
    """
    total_s = np.where(np.isnan(ttft_s), prior.idle_s + prior.backlog_s, ttft_s)
    idle_s = np.minimum(prior.idle_s, total_s)
    return Prediction(idle_s, total_s - idle_s, np.minimum(prior.prefill_s, idle_s))
