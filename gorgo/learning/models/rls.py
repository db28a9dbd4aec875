"""Recursive least squares with forgetting: one update per row, in the order of dispatch.

Theory of operation. After n rows the weights minimise the squared errors, each row weighted by `FORGETTING` to the
power of its age in rows; some 1,000 rows count. `covariance` is the inverse of the weighted Gram matrix. Along a
direction that the rows no longer have it grows without end, so forgetting stops while its trace is at a bound.

References
----------
L. Ljung, T. Söderström: Theory and practice of recursive identification, 1983, section 2.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.learning.models.base import facts
from gorgo.learning.models.linear import LinearModel, terms
from gorgo.learning.models.scaling import Scaler
from gorgo.learning.models.targets import LEAST_TPOT_ROWS, capped_ttft_s

FORGETTING = 0.999
#: Rows of a fit: the weight of the next older one is below 0.00005.
ROWS = 10_000
#: Variance of a weight before the first row, in z-scores: wide for times of s.
_PRIOR_VARIANCE = 100.0
#: Features whose square is a term: attention takes a time that grows faster than the prompt.
_SQUARED = ("uncached_tokens",)


class RecursiveLeastSquares:
    """Weights of a linear model, updated row by row.

    Parameters
    ----------
    terms:
        Number of weights.
    forgetting:
        Weight of a row relative to the next one.
    """

    def __init__(self, terms: int, *, forgetting: float = FORGETTING) -> None:
        self.weights = np.zeros(terms)
        self.covariance = np.eye(terms) * _PRIOR_VARIANCE
        self._forgetting = forgetting
        self._most_trace = terms * _PRIOR_VARIANCE

    def update(self, row: Floats, target: float, *, censored: bool = False) -> None:
        """Move the weights toward a target; toward a censored one only from below it."""
        error = target - float(row @ self.weights)
        if censored and error <= 0.0:
            return
        forgetting = self._forgetting if np.trace(self.covariance) < self._most_trace else 1.0
        direction = self.covariance @ row
        gain = direction / (forgetting + row @ direction)
        self.weights += gain * error
        self.covariance -= np.outer(gain, direction)
        self.covariance /= forgetting


def fit_rls(rows: TrainingRows, spec: TrainingSpec, *, version: int) -> LinearModel:
    """Return the model of TTFT and of time per token after the newest `ROWS` rows."""
    recent = rows.select(np.argsort(rows.dispatched_s, kind="stable")[-ROWS:])
    scaler = Scaler.of(recent.features)
    squares = tuple(rows.names.index(name) for name in _SQUARED if name in rows.names)
    table = terms(scaler, squares, recent.features)
    ttft = _run(table, capped_ttft_s(recent, spec.target_cap_s), recent.censored)
    known = np.isfinite(recent.tpot_s)
    tpot = None
    if known.sum() >= LEAST_TPOT_ROWS:
        tpot = _run(table[known], recent.tpot_s[known], np.zeros(int(known.sum()), dtype=np.bool_))
    return LinearModel(
        **facts(rows, version), kind="rls", scaler=scaler, squares=squares, ttft_weights=ttft, tpot_weights=tpot
    )


def _run(table: Floats, target: Floats, censored: NDArray[np.bool_]) -> Floats:
    """Return the weights after all rows."""
    estimate = RecursiveLeastSquares(table.shape[1])
    for row, value, bound in zip(table, target.tolist(), censored.tolist(), strict=True):
        estimate.update(row, value, censored=bound)
    return estimate.weights
