"""What was read, in the form that tables, plots and sentences share.

A **run** is one result row with the requests behind it. A **cell** is all runs of one policy at one load, one per seed.
A **comparison** is what may stand in one table: one trace (whose name has
the scenario of a simulation, if any) and one source, simulated or live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gorgo.apps.results import ResultRow

#: Rows that no router can be: shown beside the policies, never as the best of them.
YARDSTICKS = ("oracle", "floor")
#: The baselines of the GORGO paper.
BASELINES = ("least-load", "least-request", "prefix-cache", "simple-session-affinity")

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns of requests.jsonl in the order of its lines; unknown is NaN, an unknown replica -1.

    `replica` counts in `replicas`; `regions` says where each of those is. `errors` counts by kind, without details.
    """

    scheduled_s: Floats
    ttft_ms: Floats
    e2e_s: Floats
    predicted_ttft_ms: Floats
    rtt_ms: Floats
    replica: NDArray[np.int32]
    replicas: tuple[str, ...]
    regions: Mapping[str, str]
    errors: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.scheduled_s)


@dataclass(frozen=True, slots=True)
class Run:
    """One result row, the requests behind it if they were kept, and which repetition of its seed it is."""

    row: ResultRow
    requests: Requests | None = None
    repetition: int = 0

    @property
    def pair(self) -> tuple[int, int]:
        """Runs of two policies with the same pair had the same chance."""
        return self.row.seed, self.repetition


@dataclass(frozen=True)
class Cell:
    """One policy (with one set of weights) at one load: a run per seed."""

    label: str
    policy: str
    runs: tuple[Run, ...]

    @property
    def is_yardstick(self) -> bool:
        return self.policy in YARDSTICKS

    @cached_property
    def ttft_ms(self) -> Floats:
        """Of all requests of all runs that succeeded."""
        return self._pooled("ttft_ms")

    @cached_property
    def e2e_s(self) -> Floats:
        return self._pooled("e2e_s")

    def _pooled(self, column: str) -> Floats:
        kept: list[Floats] = [getattr(run.requests, column) for run in self.runs if run.requests is not None]
        values: Floats = np.concatenate([np.empty(0), *kept])
        return values[~np.isnan(values)]


@dataclass(frozen=True)
class Comparison:
    """All runs on one trace, in one kind of time."""

    trace: str
    source: str
    #: time_scale to its cells, highest load (least time_scale) last; cells in the order of POLICIES, yardsticks last.
    loads: Mapping[float, tuple[Cell, ...]]

    @property
    def simulated(self) -> bool:
        return self.source == "simulated"

    @property
    def cells(self) -> list[Cell]:
        return [cell for cells in self.loads.values() for cell in cells]

    @property
    def labels(self) -> list[str]:
        """Every policy that occurs, in order of first appearance, yardsticks last."""
        cells = sorted(self.cells, key=lambda cell: cell.is_yardstick)
        return list(dict.fromkeys(cell.label for cell in cells))

    def contenders(self, time_scale: float) -> list[Cell]:
        """The cells of a load without the yardsticks."""
        return [cell for cell in self.loads[time_scale] if not cell.is_yardstick]


@dataclass(frozen=True, slots=True)
class ReportGeneration:
    """One generation of a tuning history. The objective is the window's p95 TTFT."""

    number: int
    weights: Mapping[str, float]
    sigma: float | None
    objective_ms: float | None
    incumbent_objective_ms: float | None
    accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReportInput:
    """Everything below the folder: comparisons, tuning histories by path, and what was left out and why."""

    folder: Path
    comparisons: tuple[Comparison, ...]
    histories: Mapping[str, tuple[ReportGeneration, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def compare(runs: Sequence[Run], *, order: Sequence[str]) -> tuple[Comparison, ...]:
    """Sorts runs into comparisons. `order` is that of the policies; others follow by name, yardsticks last."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.row.trace, run.row.source), []).append(run)
    return tuple(Comparison(trace, source, _loads(groups[trace, source], order)) for trace, source in sorted(groups))


def _loads(runs: Sequence[Run], order: Sequence[str]) -> dict[float, tuple[Cell, ...]]:
    ambiguous = _policies_with_several_weights(runs)
    cells: dict[float, dict[str, list[Run]]] = {}
    for run in runs:
        cells.setdefault(run.row.time_scale, {}).setdefault(_label(run.row, ambiguous), []).append(run)
    places = {name: place for place, name in enumerate(order)}

    def rank(cell: Cell) -> tuple[bool, int, str]:
        return cell.is_yardstick, places.get(cell.policy, len(places)), cell.label

    return {
        time_scale: tuple(sorted((_cell(label, found) for label, found in cells[time_scale].items()), key=rank))
        for time_scale in sorted(cells, reverse=True)
    }


def _cell(label: str, runs: Sequence[Run]) -> Cell:
    numbered, seen = [], dict[int, int]()
    for run in runs:
        repetition = seen.get(run.row.seed, 0)
        seen[run.row.seed] = repetition + 1
        numbered.append(Run(run.row, run.requests, repetition))
    return Cell(label, runs[0].row.policy or label, tuple(numbered))


def _policies_with_several_weights(runs: Sequence[Run]) -> set[str | None]:
    weights: dict[str | None, set[str]] = {}
    for run in runs:
        weights.setdefault(run.row.policy, set()).add(weights_words(run.row.weights))
    return {policy for policy, found in weights.items() if len(found) > 1}


def _label(row: ResultRow, ambiguous: set[str | None]) -> str:
    name = row.policy or "unnamed policy"
    return f"{name} ({weights_words(row.weights)})" if row.policy in ambiguous else name


def weights_words(weights: Mapping[str, float] | None) -> str:
    """As in `w_rtt 0.5, w_queue 0.1`."""
    return ", ".join(f"{name} {value:g}" for name, value in (weights or {}).items()) or "weights not told"
