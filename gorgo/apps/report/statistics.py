"""Measures, means over seeds, ratios of paired runs, quantiles to draw.

Owns the pairing of runs: same seed, same repetition of it. `simulate.compare` owns the arithmetic of a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.apps.report.runs import BASELINES, Cell
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate.compare import Ratio, ratio_of
from gorgo.core.arrays import Floats


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a row: its title, its number format, and whether less, more or neither is better."""

    title: str
    value: Callable[[ResultRow], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = min

    def format(self, value: float | None) -> str:
        return "-" if value is None else format(value, self.form)


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


TTFT_P95 = Measure("p95 TTFT, ms", lambda row: row.ttft_ms.p95, ",.0f")
E2E_P95 = Measure("p95 E2E, s", lambda row: row.e2e_s.p95, ",.2f")
#: What ratios and the plot against load are of.
RATIO_MEASURES = (TTFT_P95, E2E_P95)
#: The columns of a load's table.
MEASURES = (
    Measure("p50 TTFT, ms", lambda row: row.ttft_ms.p50, ",.0f"),
    TTFT_P95,
    Measure("p99 TTFT, ms", lambda row: row.ttft_ms.p99, ",.0f"),
    Measure("p50 E2E, s", lambda row: row.e2e_s.p50, ",.2f"),
    E2E_P95,
    Measure("p95 ITL, ms", lambda row: row.itl_ms.p95, ",.0f"),
    Measure("cache hit, %", lambda row: _percent(row.cache_hit), ".1f", max),
    Measure("estimated, %", lambda row: _percent(row.cache_hit_estimated), ".1f", None),
    Measure("p50 prediction error, ms", lambda row: row.prediction_error_ms.p50, ",.0f"),
    Measure("p95 slip, ms", lambda row: row.slip_ms_p95, ",.1f", None),
)


def mean(cell: Cell, measure: Measure) -> float | None:
    """Return the mean over the runs in which the measure is known; None without one."""
    known = [value for run in cell.runs if (value := measure.value(run.row)) is not None]
    return sum(known) / len(known) if known else None


def mean_share(cell: Cell) -> dict[str, float]:
    """Return the share of requests per replica, by name: the mean over the runs that have shares."""
    known = [run.row.share for run in cell.runs if run.row.share]
    names = sorted({name for share in known for name in share})
    return {name: sum(share.get(name, 0.0) for share in known) / len(known) for name in names}


def ratio(cell: Cell, to: Cell, measure: Measure) -> Ratio | None:
    """Return the ratio of paired runs; None without a pair in which the measure is known and positive."""
    others = {run.pair: measure.value(run.row) for run in to.runs}
    pairs = [(measure.value(run.row), others.get(run.pair)) for run in cell.runs]
    return ratio_of([(value, other) for value, other in pairs if value is not None and other is not None])


def best_baseline(cells: Sequence[Cell], measure: Measure) -> Cell | None:
    """Return the paper's baseline with the least mean; None without one."""
    means = [(value, cell) for cell in cells if cell.policy in BASELINES and (value := mean(cell, measure)) is not None]
    return min(means, key=lambda one: one[0])[1] if means else None


def mean_quantiles(samples: Sequence[Floats], levels: Sequence[float]) -> list[float]:
    """Return the mean over runs of each run's quantile, which is what a table shows; NaN without a sample."""
    known = [np.quantile(values, levels) for values in samples if len(values)]
    return np.mean(known, axis=0).tolist() if known else [float("nan")] * len(levels)
