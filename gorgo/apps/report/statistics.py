"""Measures, means over seeds, ratios of runs that had the same chance, quantiles to draw.

Owns which runs are a pair: same seed, same repetition of it. The arithmetic of a ratio is `simulate.compare`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.apps.report.runs import BASELINES, Cell, Floats
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate.compare import Ratio, ratio_of


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
HIT_ESTIMATED = Measure("believed", "%", lambda row: _percent(row.cache_hit_estimated), ".1f", None)
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


def ratio(cell: Cell, to: Cell, measure: Measure) -> Ratio | None:
    """Of runs with the same seed; None if no pair knows the measure (or it is 0, which has no ratio)."""
    others = {run.pair: measure.value(run.row) for run in to.runs}
    pairs = [(measure.value(run.row), others.get(run.pair)) for run in cell.runs]
    return ratio_of([(mine, other) for mine, other in pairs if mine is not None and other is not None])


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
