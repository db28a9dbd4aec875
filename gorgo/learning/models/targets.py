"""Targets of a training: capped times, and the one-sided targets of attempts that ended without a first token.

A censored row says that its TTFT is at least the time elapsed. It is neither dropped, which would hide the slowest
attempts, nor taken at that time, which would count a cancelled request as a fast one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TargetKind

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
