"""Guards of a model: where it applies, what it predicts, and which of its best rows are equally good.

Owns the words of `Choice.fallback` for decisions that a guard takes instead of the model.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
Table = NDArray[np.float32]

#: Why a guard decided: no model yet, a candidate unlike the training, chance, a cached prefix that was preferred or
#: left, a full KV pool, several predictions that are nearly equal, a model that failed.
Guard = Literal[
    "cold_start", "out_of_range", "explore", "affinity_kept", "affinity_left", "k_filter", "near_best", "no_model"
]

#: Share of a bound by which float32 differs from the value that it was rounded from.
_ROUNDING = 1e-6


class Predicts(Protocol):
    """The part of a model that these guards read."""

    def ttft_s(self, table: Table) -> Floats: ...


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


def predicted_ttft_s(model: Predicts, table: Table) -> Floats | None:
    """Return the model's prediction per row, at least 0; `None` if it raises or answers what is no number per row."""
    try:
        ttft_s = np.asarray(model.ttft_s(table), dtype=np.float64)
    except Exception:  # noqa: BLE001 - any fault of a model: requests are routed without it
        return None
    if ttft_s.shape != (len(table),) or not np.isfinite(ttft_s).all():
        return None
    return np.maximum(ttft_s, 0.0)


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
