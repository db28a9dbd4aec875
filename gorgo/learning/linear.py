"""Linear models of the TTFT: ridge regression (the ablation of Lodestar's network), and recursive least squares.

Owns the model (`LinearModel`) and both fits, `fit_linear` and `fit_rls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.training.learning import TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.learning.base import LEAST_TPOT_ROWS, FittedModel, Scaler, capped_ttft_s, facts, impute
from gorgo.learning.network import one_sided

#: Weight of the squared coefficients, in rows: far below a round's thousands, above 0 for columns that agree.
_RIDGE = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel(FittedModel):
    """Times as a weighted sum of a constant, z-scores and squares of some.

    Parameters
    ----------
    kind:
        `linear` or `rls`, by how the weights were found.
    scaler:
        Statistics of the features.
    squares:
        Columns whose squared z-score is a term too.
    ttft_weights, tpot_weights:
        A weight per column of `terms`, in s.
    """

    kind: str
    scaler: Scaler
    squares: tuple[int, ...]
    ttft_weights: Floats
    tpot_weights: Floats | None

    def ttft_s(self, table: NDArray[np.float32]) -> Floats:
        """Return the predicted TTFT of each row."""
        return terms(self.scaler, self.squares, table) @ self.ttft_weights

    def tpot_s(self, table: NDArray[np.float32]) -> Floats | None:
        """Return the predicted time per output token of each row, if it was fitted."""
        return None if self.tpot_weights is None else terms(self.scaler, self.squares, table) @ self.tpot_weights

    def gradients(self, rows: TrainingRows, cap_s: float) -> NDArray[np.float32]:
        """Return the gradient of each row's squared error by the weights, up to a factor of 2."""
        table = terms(self.scaler, self.squares, rows.features)
        reward = -capped_ttft_s(rows, cap_s)
        gradients: Floats = table * one_sided(-(table @ self.ttft_weights) - reward, rows.censored)[:, None]
        return gradients.astype(np.float32)

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return weights and statistics; the header has the squared columns."""
        arrays: dict[str, NDArray[Any]] = {
            "ttft_weights": self.ttft_weights,
            "mean": self.scaler.mean,
            "inverse": self.scaler.inverse,
        }
        if self.tpot_weights is not None:
            arrays["tpot_weights"] = self.tpot_weights
        return arrays, {"squares": list(self.squares)}


def terms(scaler: Scaler, squares: tuple[int, ...], table: NDArray[np.float32]) -> Floats:
    """Return a row per row of a table: 1, the z-scores, and the squares of some."""
    scores = scaler.apply(table).astype(np.float64)
    return np.column_stack([np.ones(len(table)), scores, scores[:, list(squares)] ** 2])


def fit_linear(rows: TrainingRows, spec: TrainingSpec, *, version: int) -> LinearModel:
    """Return the ridge regression of the TTFT; the constant is not shrunk."""
    scaler = Scaler.of(rows.features)
    table = terms(scaler, (), rows.features)
    penalty = np.full(table.shape[1], _RIDGE)
    penalty[0] = 0.0
    gram = table.T @ table + np.diag(penalty)
    weights = np.zeros(table.shape[1])

    def solve(target: Floats) -> Floats:
        weights[:] = np.linalg.solve(gram, table.T @ target)
        predicted: Floats = table @ weights
        return predicted

    impute(solve, capped_ttft_s(rows, spec.target_cap_s), rows.censored)
    return LinearModel(
        **facts(rows, version), kind="linear", scaler=scaler, squares=(), ttft_weights=weights, tpot_weights=None
    )


# Recursive least squares with forgetting: one update per row, in the order of dispatch.
#
# Theory of operation. After n rows the weights minimise the squared errors, each row weighted by `FORGETTING` to the
# power of its age in rows; some 1,000 rows count. `covariance` is the inverse of the weighted Gram matrix. Along a
# direction that the rows no longer have it grows without end, so forgetting stops while its trace is at a bound.
#
# References
# ----------
# L. Ljung, T. Söderström: Theory and practice of recursive identification, 1983, section 2.2.


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
    has_tpot = np.isfinite(recent.tpot_s)
    tpot = None
    if has_tpot.sum() >= LEAST_TPOT_ROWS:
        tpot = _run(table[has_tpot], recent.tpot_s[has_tpot], np.zeros(int(has_tpot.sum()), dtype=np.bool_))
    return LinearModel(
        **facts(rows, version), kind="rls", scaler=scaler, squares=squares, ttft_weights=ttft, tpot_weights=tpot
    )


def _run(table: Floats, target: Floats, censored: NDArray[np.bool_]) -> Floats:
    """Return the weights after all rows."""
    estimate = RecursiveLeastSquares(table.shape[1])
    for row, value, bound in zip(table, target.tolist(), censored.tolist(), strict=True):
        estimate.update(row, value, censored=bound)
    return estimate.weights
