"""What every kind of model has: the facts of its training, its targets, and z-scores of its features.

Owns `FittedModel`, the coding of times and of censored rows (`encode`, `impute`), and `Scaler`. Leaves the fit to each
kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.training.learning import TargetKind
from gorgo.core.training.outcomes import TrainingRows


@dataclass(frozen=True, slots=True, eq=False)
class FittedModel:
    """Facts of a training: its round, its features, and the range of its rows.

    Parameters
    ----------
    version:
        Number of the round, from 1.
    names:
        Features in the order of a table's columns.
    low, high:
        Least and greatest value of each feature in the training.
    samples:
        Rows of the training.
    """

    version: int
    names: tuple[str, ...]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    samples: int


def facts(rows: TrainingRows, version: int) -> dict[str, Any]:
    """Return the fields of `FittedModel` for a training on these rows."""
    return {
        "version": version,
        "names": rows.names,
        "low": rows.features.min(axis=0),
        "high": rows.features.max(axis=0),
        "samples": len(rows),
    }


# Targets of a training: capped times, and the one-sided targets of attempts that ended without a first token.
#
# A censored row says that its TTFT is at least the time elapsed. It is neither dropped, which would hide the slowest
# attempts, nor taken at that time, which would count a cancelled request as a fast one.


#: A shorter time counts as this one in a logarithm, s.
_LEAST_S = 1e-3
#: Logarithm of a time beyond which a prediction is this one: 300 years.
_MOST_LOG = 23.0

#: Further fits, if a row is censored.
_IMPUTATIONS = 5
#: Known times per token below which none is predicted.
LEAST_TPOT_ROWS = 50


def capped_ttft_s(rows: TrainingRows, cap_s: float) -> Floats:
    """Return the TTFT of each row, or `cap_s` if that is less; of a censored row the lower bound."""
    return np.minimum(rows.ttft_s, cap_s)


def encode(times_s: Floats, target: TargetKind) -> Floats:
    """Return what a model of this target is fitted to."""
    return np.log(np.maximum(times_s, _LEAST_S)) if target == "log" else times_s


def decode(outputs: Floats, target: TargetKind) -> Floats:
    """Return the times that a model's outputs mean, s.

    >>> decode(encode(np.array([0.5, 2.0]), "log"), "log").round(6).tolist()
    [0.5, 2.0]
    """
    return np.exp(np.minimum(outputs, _MOST_LOG)) if target == "log" else outputs


def impute(solve: Callable[[Floats], Floats], target: Floats, censored: NDArray[np.bool_]) -> None:
    """Fit by least squares where some targets are lower bounds.

    Parameters
    ----------
    solve:
        Fits to targets, and returns its predictions of the same rows. The last call's fit is the result.
    target:
        Times, or lower bounds of them where `censored`. Each fit takes the prediction of the one before for a row
        whose bound it exceeds.
    """
    predicted = solve(target)
    for _ in range(_IMPUTATIONS if censored.any() else 0):
        predicted = solve(np.where(censored, np.maximum(target, predicted), target))


# Z-scores of features, pooled over all replicas: a replica's identity changes no score.


#: Standard deviation below which a column counts as constant, as a share of its mean: rounding of float32.
_CONSTANT = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Scaler:
    """Mean and inverse standard deviation of each column of the training rows.

    Parameters
    ----------
    mean, inverse:
        float32, one value per column. The inverse of a constant column is 0, so that its z-score is 0 for any value.

    Example
    -------
    >>> Scaler.of(np.array([[1.0, 5.0], [3.0, 5.0]], dtype=np.float32)).apply(np.array([[3.0, 9.0]], dtype=np.float32))
    array([[1., 0.]], dtype=float32)
    """

    mean: NDArray[np.float32]
    inverse: NDArray[np.float32]

    @classmethod
    def of(cls, table: NDArray[np.float32]) -> Scaler:
        """Return the statistics of the rows of a table; it has one row or more."""
        mean = table.mean(axis=0, dtype=np.float64)
        deviation = table.std(axis=0, dtype=np.float64)
        varies = deviation > _CONSTANT * np.maximum(np.abs(mean), 1.0)
        inverse = np.divide(1.0, deviation, out=np.zeros_like(deviation), where=varies)
        return cls(mean.astype(np.float32), inverse.astype(np.float32))

    def apply(self, table: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the z-scores of a table's rows."""
        return (table - self.mean) * self.inverse
