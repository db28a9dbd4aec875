"""Linear models of the TTFT: ridge regression (the ablation of Lodestar's network), and what recursive ones share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.learning.models.base import FittedModel, facts
from gorgo.learning.models.descent import one_sided
from gorgo.learning.models.scaling import Scaler
from gorgo.learning.models.targets import capped_ttft_s, impute

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
