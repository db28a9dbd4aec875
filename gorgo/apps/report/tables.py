"""Tables of the page: policies per load, errors by kind, the acceptance log. Bounded; what is left out is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gorgo.apps.report.runs import Cell, Comparison, ReportGeneration, weights_words
from gorgo.apps.report.statistics import (
    E2E_P50,
    E2E_P95,
    ERRORS,
    HIT,
    HIT_ESTIMATED,
    ITL_P95,
    PREDICTION_P50,
    SLIP,
    TTFT_P50,
    TTFT_P95,
    TTFT_P99,
    Measure,
    best_baseline,
    mean,
    means,
    ratio,
)
from gorgo.apps.report.words import counted, listed
from gorgo.apps.simulate.compare import Ratio

#: Rows of one table: more are not read by anybody, and results.json has them.
MAX_ROWS = 200
UNKNOWN = "-"

_MEASURES = (
    ERRORS, TTFT_P50, TTFT_P95, TTFT_P99, E2E_P50, E2E_P95, ITL_P95, HIT, HIT_ESTIMATED, PREDICTION_P50, SLIP,
)  # fmt: skip
#: Measures whose ratio to the best baseline is shown.
_RATIOS = (TTFT_P95, E2E_P95)


@dataclass(frozen=True, slots=True)
class TableCell:
    text: str
    bold: bool = False


@dataclass(frozen=True, slots=True)
class TableRow:
    label: str
    cells: tuple[TableCell, ...]
    yardstick: bool = False


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table as the template shows it: `first` heads the column of labels; `note` follows the caption."""

    caption: str
    first: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""


def load_table(comparison: Comparison, time_scale: float) -> PageTable:
    """All policies at one load: means over seeds, the best in bold, ratios to the best baseline."""
    cells = comparison.loads[time_scale][:MAX_ROWS]
    contenders = [cell for cell in cells if not cell.is_yardstick]
    columns = [_column(measure, cells, contenders) for measure in _MEASURES]
    header = [f"{measure.name}, {measure.unit}" if measure.unit else measure.name for measure in _MEASURES]
    notes = []
    for measure in _RATIOS:
        base = best_baseline(contenders, measure)
        if base is not None:
            columns.append([_ratio_cell(cell, base, measure) for cell in cells])
            header.append(f"{measure.name} / best baseline")
            notes.append(f"{base.label} in {measure.name}")
    kind = "simulated" if comparison.simulated else "live"
    rows = tuple(
        TableRow(cell.label, tuple(column[place] for column in columns), cell.is_yardstick)
        for place, cell in enumerate(cells)
    )
    caption = f"time_scale {time_scale:g}, load {1 / time_scale:.3g} of the trace's own, {kind}"
    return PageTable(
        caption, "policy", ("runs", *header), _with_runs(rows, cells), _note(notes, comparison, time_scale)
    )


def _with_runs(rows: Sequence[TableRow], cells: Sequence[Cell]) -> tuple[TableRow, ...]:
    return tuple(
        TableRow(row.label, (TableCell(str(len(cell.runs))), *row.cells), row.yardstick)
        for row, cell in zip(rows, cells, strict=True)
    )


def _column(measure: Measure, cells: Sequence[Cell], contenders: Sequence[Cell]) -> list[TableCell]:
    found = means(contenders, measure)
    # As shown: of figures that read the same, none is the better one.
    best = None
    if measure.best is not None and len(found) > 1:
        texts = {_text(measure, value) for value in found.values()}
        best = _text(measure, measure.best(list(found.values()))) if len(texts) > 1 else None
    return [_cell(mean(cell, measure), measure, best if cell.label in found else None) for cell in cells]


def _cell(value: float | None, measure: Measure, best: str | None) -> TableCell:
    text = UNKNOWN if value is None else _text(measure, value)
    return TableCell(text, text == best)


def _text(measure: Measure, value: float) -> str:
    return format(value, measure.form)


def _ratio_cell(cell: Cell, base: Cell, measure: Measure) -> TableCell:
    found = ratio(cell, base, measure)
    return TableCell(UNKNOWN if found is None else ratio_text(found))


def ratio_text(found: Ratio) -> str:
    """As in `0.912 (0.880 to 0.945)`."""
    interval = "" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})"
    return f"{found.value:.3f}{interval}"


def _note(baselines: Sequence[str], comparison: Comparison, time_scale: float) -> str:
    cells = comparison.loads[time_scale]
    parts = ["Means over runs; bold is the best of the policies in each column."]
    if baselines:
        parts.append(f"The best of the paper's baselines here: {listed(baselines)}; it was picked on these same runs.")
    if any(len(cell.runs) > 1 for cell in cells):
        parts.append("Ratios are geometric means over runs with the same seed, with 95 % intervals.")
    else:
        parts.append("One run each: no intervals, and small differences may be noise.")
    if any(cell.is_yardstick for cell in cells):
        parts.append("Rows in italics are yardsticks that no router can be.")
    left = len(cells) - MAX_ROWS
    return " ".join([*parts, f"{counted(left, 'row')} left out."] if left > 0 else parts)


def error_table(comparison: Comparison) -> PageTable | None:
    """Kinds of errors by policy and load, where requests were kept; None without one."""
    found = {
        (cell.label, time_scale, kind): sum(
            run.requests.errors.get(kind, 0) for run in cell.runs if run.requests is not None
        )
        for time_scale, cells in comparison.loads.items()
        for cell in cells
        for kind in sorted({kind for run in cell.runs if run.requests is not None for kind in run.requests.errors})
    }
    ranked = sorted(found, key=lambda key: (-found[key], key))
    rows = tuple(
        TableRow(
            label, (TableCell(f"{time_scale:g}"), TableCell(kind), TableCell(f"{found[label, time_scale, kind]:,}"))
        )
        for label, time_scale, kind in ranked[:MAX_ROWS]
    )
    left = len(ranked) - len(rows)
    note = f"{counted(left, 'row')} left out." if left else ""
    return PageTable("Errors by kind", "policy", ("time_scale", "error", "requests"), rows, note) if rows else None


def acceptance_log(generations: Sequence[ReportGeneration]) -> PageTable:
    """What was tried, what came of it and why; the last generations if there are many."""
    shown = generations[-MAX_ROWS:]
    rows = tuple(
        TableRow(
            str(one.number),
            (
                TableCell(weights_words(one.weights)),
                TableCell(_number(one.sigma, ".3g")),
                TableCell(_number(one.objective_ms, ",.0f")),
                TableCell(_number(one.incumbent_objective_ms, ",.0f")),
                TableCell("accepted" if one.accepted else "rejected", one.accepted),
                TableCell(one.reason or UNKNOWN),
            ),
        )
        for one in shown
    )
    left = len(generations) - len(shown)
    note = f"{counted(left, 'earlier generation')} left out." if left else ""
    header = ("weights", "sigma", "p95 TTFT, ms", "incumbent's, ms", "decision", "reason")
    return PageTable("Acceptance log", "generation", header, rows, note)


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
