"""Guards of a model: where it applies, what it predicts, and which of its best rows are equally good.

Owns the words of `Choice.fallback` for decisions that a guard takes instead of the model.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats, Rows, Table

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
