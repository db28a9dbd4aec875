"""Means over seeds, ratios of runs that had the same chance, quantiles to draw.

A ratio is a geometric mean over pairs of runs with the same seed; its interval is Student's, on the logarithms. Common
random numbers make the pairs alike, so that the interval is far narrower than that of either mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np

from gorgo.apps.report.runs import BASELINES, Cell, Floats
from gorgo.apps.results import ResultRow

#: Student's t at 97.5 % for 1, 2, ... degrees of freedom; beyond the table a bound that is a little too wide.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a row: its name in words, its unit, how it is written, and whether less or more is better."""

    name: str
    unit: str
    value: Callable[[ResultRow], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = min

    def words(self, value: float) -> str:
        return f"{value:{self.form}} {self.unit}".strip()


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


TTFT_P50 = Measure("p50 TTFT", "ms", lambda row: row.ttft_ms.p50, ",.0f")
TTFT_P95 = Measure("p95 TTFT", "ms", lambda row: row.ttft_ms.p95, ",.0f")
TTFT_P99 = Measure("p99 TTFT", "ms", lambda row: row.ttft_ms.p99, ",.0f")
E2E_P50 = Measure("p50 E2E", "s", lambda row: row.e2e_s.p50, ",.2f")
E2E_P95 = Measure("p95 E2E", "s", lambda row: row.e2e_s.p95, ",.2f")
E2E_P99 = Measure("p99 E2E", "s", lambda row: row.e2e_s.p99, ",.2f")
ITL_P95 = Measure("p95 ITL", "ms", lambda row: row.itl_ms.p95, ",.0f")
HIT = Measure("cache hit", "%", lambda row: _percent(row.cache_hit), ".1f", max)
HIT_BELIEVED = Measure("believed", "%", lambda row: _percent(row.cache_hit_believed), ".1f", None)
PREDICTION_P50 = Measure("p50 prediction error", "ms", lambda row: row.prediction_error_ms.p50, ",.0f", min)
ERRORS = Measure("errors", "", lambda row: row.errors, ",.3g")
SLIP = Measure("p95 slip", "ms", lambda row: row.slip_ms_p95, ",.1f", None)


def mean(cell: Cell, measure: Measure) -> float | None:
    """Over the runs that know it; None if none does."""
    known = [value for run in cell.runs if (value := measure.value(run.row)) is not None]
    return sum(known) / len(known) if known else None


def means(cells: Sequence[Cell], measure: Measure) -> dict[str, float]:
    """By label, of the cells that know it."""
    return {cell.label: value for cell in cells if (value := mean(cell, measure)) is not None}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of `pairs` ratios with its 95 % interval; no interval of fewer than two."""

    value: float
    low: float | None
    high: float | None
    pairs: int


def ratio(cell: Cell, to: Cell, measure: Measure) -> Ratio | None:
    """Of runs with the same seed; None if no pair knows the measure (or it is 0, which has no ratio)."""
    others = {run.pair: measure.value(run.row) for run in to.runs}
    logs = [
        log(mine / other) for run in cell.runs if (mine := measure.value(run.row)) and (other := others.get(run.pair))
    ]
    if not logs:
        return None
    middle = sum(logs) / len(logs)
    if len(logs) == 1:
        return Ratio(exp(middle), None, None, 1)
    spread = sqrt(sum((value - middle) ** 2 for value in logs) / (len(logs) - 1) / len(logs))
    half = T_975[min(len(logs) - 1, len(T_975)) - 1] * spread
    return Ratio(exp(middle), exp(middle - half), exp(middle + half), len(logs))


def best_baseline(cells: Sequence[Cell], measure: Measure) -> Cell | None:
    """The paper's baseline with the least mean; None if none is there."""
    found = means([cell for cell in cells if cell.policy in BASELINES], measure)
    best = min(found, key=found.__getitem__) if found else None
    return next((cell for cell in cells if cell.label == best), None)


#: Where a distribution is drawn: every percent, and finer where the tail is.
LEVELS = np.unique(np.concatenate([np.linspace(0, 1, 101), np.linspace(0.95, 1, 51), [0.005, 0.995, 0.999]]))


def quantile_points(values: Floats) -> tuple[Floats, Floats]:
    """Values and levels of a distribution, thinned to at most as many points as `LEVELS` has."""
    levels = LEVELS if len(values) > len(LEVELS) else np.linspace(0, 1, max(2, len(values)))
    return np.quantile(values, levels), levels
