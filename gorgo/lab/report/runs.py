"""Runs, grouped into the comparisons that tables and plots show, and the measures of a group.

A **run** is one result row with the requests behind it. A **cell** is all runs of one policy at one load, one per seed.
A **comparison** is all runs on one trace (whose name has the scenario of a simulation) from one source in one setting,
so unlike fleets or limits are neither averaged nor paired. Runs are paired by seed and repetition of it, and rows of
windows of a run by these and the window, which is then the unit of an interval.
`simulate.compare` owns the arithmetic of a ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Strict

from gorgo.core.numeric import Floats
from gorgo.lab.results import Count, Number, ResultRow, percent
from gorgo.lab.simulate.compare import Ratio, ratio_of_units
from gorgo.policies.registry import BASELINES

#: Rows that no proxy can run, see `gorgo.lab.simulate.job`: beside the others, never the best of them.
REFERENCES = ("oracle", "pinned", "floor")


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one run: their number, TTFT of those that succeeded, errors by kind without details.

    Parameters
    ----------
    input_tokens, region:
        Of each request in `ttft_ms`: prompt length (NaN if unknown), and region of the replica (empty if unknown).
    """

    count: int
    ttft_ms: Floats
    errors: Mapping[str, int]
    input_tokens: Floats = field(default_factory=lambda: np.empty(0))
    region: NDArray[np.str_] = field(default_factory=lambda: np.empty(0, dtype=np.str_))


@dataclass(frozen=True, slots=True)
class Run:
    """One result row, the requests behind it if they were saved, and which repetition of its seed it is."""

    row: ResultRow
    requests: Requests | None = None
    repetition: int = 0

    @property
    def pair(self) -> tuple[int, int, int | None]:
        """Identify the random numbers: runs of two policies with the same pair had the same ones, in a window."""
        return self.row.seed, self.repetition, self.row.window


@dataclass(frozen=True)
class Cell:
    """One policy (with one weight set) at one load: a run per seed."""

    label: str
    policy: str
    runs: tuple[Run, ...]

    @property
    def is_reference(self) -> bool:
        return self.policy in REFERENCES

    @property
    def is_partial(self) -> bool:
        """Whether a run was interrupted."""
        return any(run.row.is_partial for run in self.runs)

    @property
    def requests(self) -> list[Requests]:
        return [run.requests for run in self.runs if run.requests is not None]

    @cached_property
    def ttft_ms(self) -> Floats:
        """TTFT of all requests of all runs that succeeded."""
        return np.concatenate([np.empty(0), *(requests.ttft_ms for requests in self.requests)])


@dataclass(frozen=True)
class Comparison:
    """All runs on one trace from one source, live or simulated, in one setting.

    Parameters
    ----------
    loads:
        Cells by time_scale, the highest load (least time_scale) last; cells in policy order, references last.
    setting:
        As in the rows.
    settings:
        How many settings this trace has from this source; each has a comparison.
    """

    trace: str
    source: str
    loads: Mapping[float, tuple[Cell, ...]]
    setting: str | None = None
    settings: int = 1

    @property
    def title(self) -> str:
        of = f", setting {self.setting or 'unknown'}" if self.settings > 1 else ""
        return f"{self.trace}, {self.source}{of}"

    @property
    def cells(self) -> list[Cell]:
        return [cell for _, cell in self.placed]

    @property
    def placed(self) -> list[tuple[float, Cell]]:
        """Return each cell with its time_scale."""
        return [(time_scale, cell) for time_scale, cells in self.loads.items() for cell in cells]

    @property
    def labels(self) -> list[str]:
        """Return every policy, in order of first appearance, references last."""
        cells = sorted(self.cells, key=lambda cell: cell.is_reference)
        return list(dict.fromkeys(cell.label for cell in cells))


@dataclass(frozen=True, slots=True)
class ReportGeneration:
    """One generation of a tuning history, as a file that anyone may have written is validated: what the report plots.

    The tuner's own record is `tuner.campaign.generation.Generation`, which this package does not know. The objective
    is the window's p95 TTFT.
    """

    number: Count
    weights: Mapping[str, Number]
    sigma: Number | None
    objective_ms: Number | None
    incumbent_objective_ms: Number | None
    accepted: Annotated[bool, Strict()]
    reason: str | None


@dataclass(frozen=True, slots=True)
class ReportInput:
    """All results below a folder: comparisons, tuning histories by path, and each file left out with its reason."""

    comparisons: tuple[Comparison, ...]
    histories: Mapping[str, tuple[ReportGeneration, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def compare(runs: Sequence[Run], *, order: Sequence[str]) -> tuple[Comparison, ...]:
    """Group runs into comparisons. Policies are in the given `order`, then others by name, then references."""
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in runs:
        settings = groups.setdefault((run.row.trace, run.row.source), {})
        settings.setdefault(run.row.setting or "", []).append(run)
    return tuple(
        Comparison(trace, source, _loads(of, order), setting or None, len(settings))
        for (trace, source), settings in sorted(groups.items())
        for setting, of in sorted(settings.items())
    )


def _loads(runs: Sequence[Run], order: Sequence[str]) -> dict[float, tuple[Cell, ...]]:
    weights: dict[str | None, set[str]] = {}
    for run in runs:
        weights.setdefault(run.row.policy, set()).add(format_weights(run.row.weights))
    cells: dict[float, dict[str, list[Run]]] = {}
    for run in runs:
        name = run.row.policy or "unnamed policy"
        label = f"{name} ({format_weights(run.row.weights)})" if len(weights[run.row.policy]) > 1 else name
        cells.setdefault(run.row.time_scale, {}).setdefault(label, []).append(run)
    places = {name: index for index, name in enumerate(order)}

    def rank(cell: Cell) -> tuple[bool, int, str]:
        return cell.is_reference, places.get(cell.policy, len(places)), cell.label

    return {
        time_scale: tuple(sorted((_cell(label, runs) for label, runs in cells[time_scale].items()), key=rank))
        for time_scale in sorted(cells, reverse=True)
    }


def _cell(label: str, runs: Sequence[Run]) -> Cell:
    numbered, repetitions = [], dict[tuple[int, int | None], int]()
    for run in runs:
        seed_window = run.row.seed, run.row.window
        repetition = repetitions.get(seed_window, 0)
        repetitions[seed_window] = repetition + 1
        numbered.append(Run(run.row, run.requests, repetition))
    return Cell(label, runs[0].row.policy or label, tuple(numbered))


def format_weights(weights: Mapping[str, float] | None) -> str:
    """Return weights as in `w_rtt 0.5, w_queue 0.1`."""
    return ", ".join(f"{name} {value:g}" for name, value in (weights or {}).items()) or "weights unknown"


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a row: its title, its number format, and whether less, more or neither is better."""

    title: str
    value: Callable[[ResultRow], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = min

    def format(self, value: float | None) -> str:
        return "-" if value is None else format(value, self.form)

    def known(self, cell: Cell) -> list[float]:
        """Return the figure of each run in which it is known."""
        return [value for run in cell.runs if (value := self.value(run.row)) is not None]


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
    Measure("cache hit, %", lambda row: percent(row.cache_hit), ".1f", max),
    Measure("estimated, %", lambda row: percent(row.cache_hit_estimated), ".1f", None),
    Measure("p50 prediction error, ms", lambda row: row.prediction_error_ms.p50, ",.0f"),
    Measure("p95 slip, ms", lambda row: row.slip_ms_p95, ",.1f", None),
)


def mean(cell: Cell, measure: Measure) -> float | None:
    """Return the mean over the runs in which the measure is known; None without one."""
    values = measure.known(cell)
    return sum(values) / len(values) if values else None


def mean_share(cell: Cell) -> dict[str, float]:
    """Return the share of requests per replica, by name: the mean over the runs that have shares."""
    shares = [run.row.share for run in cell.runs if run.row.share]
    names = sorted({name for share in shares for name in share})
    return {name: sum(share.get(name, 0.0) for share in shares) / len(shares) for name in names}


def ratio(cell: Cell, to: Cell, measure: Measure) -> Ratio | None:
    """Return the ratio of paired runs; None without a pair in which the measure is known and positive."""
    others = {run.pair: measure.value(run.row) for run in to.runs}
    return ratio_of_units((run.row.window, measure.value(run.row), others.get(run.pair)) for run in cell.runs)


def best_baseline(cells: Sequence[Cell], measure: Measure) -> Cell | None:
    """Return the paper's baseline with the least mean; None without one."""
    means = [(value, cell) for cell in cells if cell.policy in BASELINES and (value := mean(cell, measure)) is not None]
    return min(means, key=lambda one: one[0])[1] if means else None


def mean_quantiles(samples: Sequence[Floats], levels: Sequence[float]) -> list[float]:
    """Return the mean over runs of each run's quantile, which is what a table shows; NaN without a sample."""
    quantiles = [np.quantile(values, levels) for values in samples if len(values)]
    return np.mean(quantiles, axis=0).tolist() if quantiles else [float("nan")] * len(levels)
