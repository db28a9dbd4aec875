"""Runs, grouped into the comparisons that tables and plots show.

A **run** is one result row with the requests behind it. A **cell** is all runs of one policy at one load, one per seed.
A **comparison** is all runs on one trace (whose name has the scenario of a simulation) from one source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Strict

from gorgo.apps.results import Count, Number, ResultRow
from gorgo.core.arrays import Floats

#: Rows that no proxy can run, see `gorgo.apps.simulate.job`: beside the others, never the best of them.
REFERENCES = ("oracle", "floor")
#: The baselines of the GORGO paper.
BASELINES = ("least-load", "least-request", "prefix-cache", "simple-session-affinity")


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
    def pair(self) -> tuple[int, int]:
        """Identify the random numbers: runs of two policies with the same pair had the same ones."""
        return self.row.seed, self.repetition


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
    """All runs on one trace from one source, live or simulated.

    Parameters
    ----------
    loads:
        Cells by time_scale, the highest load (least time_scale) last; cells in policy order, references last.
    """

    trace: str
    source: str
    loads: Mapping[float, tuple[Cell, ...]]

    @property
    def title(self) -> str:
        return f"{self.trace}, {self.source}"

    @property
    def cells(self) -> list[Cell]:
        return [cell for cells in self.loads.values() for cell in cells]

    @property
    def labels(self) -> list[str]:
        """Return every policy, in order of first appearance, references last."""
        cells = sorted(self.cells, key=lambda cell: cell.is_reference)
        return list(dict.fromkeys(cell.label for cell in cells))


@dataclass(frozen=True, slots=True)
class ReportGeneration:
    """One generation of a tuning history. The objective is the window's p95 TTFT."""

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
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.row.trace, run.row.source), []).append(run)
    return tuple(Comparison(trace, source, _loads(groups[trace, source], order)) for trace, source in sorted(groups))


def _loads(runs: Sequence[Run], order: Sequence[str]) -> dict[float, tuple[Cell, ...]]:
    weights: dict[str | None, set[str]] = {}
    for run in runs:
        weights.setdefault(run.row.policy, set()).add(format_weights(run.row.weights))
    cells: dict[float, dict[str, list[Run]]] = {}
    for run in runs:
        name = run.row.policy or "unnamed policy"
        label = f"{name} ({format_weights(run.row.weights)})" if len(weights[run.row.policy]) > 1 else name
        cells.setdefault(run.row.time_scale, {}).setdefault(label, []).append(run)
    places = {name: place for place, name in enumerate(order)}

    def rank(cell: Cell) -> tuple[bool, int, str]:
        return cell.is_reference, places.get(cell.policy, len(places)), cell.label

    return {
        time_scale: tuple(sorted((_cell(label, runs) for label, runs in cells[time_scale].items()), key=rank))
        for time_scale in sorted(cells, reverse=True)
    }


def _cell(label: str, runs: Sequence[Run]) -> Cell:
    numbered, repetitions = [], dict[int, int]()
    for run in runs:
        repetition = repetitions.get(run.row.seed, 0)
        repetitions[run.row.seed] = repetition + 1
        numbered.append(Run(run.row, run.requests, repetition))
    return Cell(label, runs[0].row.policy or label, tuple(numbered))


def format_weights(weights: Mapping[str, float] | None) -> str:
    """Return weights as in `w_rtt 0.5, w_queue 0.1`."""
    return ", ".join(f"{name} {value:g}" for name, value in (weights or {}).items()) or "weights unknown"
