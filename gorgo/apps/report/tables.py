"""Tables of the page: policies per load, shares, errors by kind, the acceptance log. Rows are bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gorgo.apps.report.runs import (
    MEASURES,
    RATIO_MEASURES,
    TTFT_P95,
    Cell,
    Comparison,
    Measure,
    ReportGeneration,
    best_baseline,
    format_weights,
    mean,
    mean_share,
    ratio,
)
from gorgo.apps.report.series import csv_text, load_number
from gorgo.apps.results import load_text

#: Rows of one table; results.json has the others.
MAX_ROWS = 200
#: Replicas with a column of their own in the table of shares; the others are added up.
MAX_REPLICAS = 12
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row; `bold` has the places of the cells in bold."""

    label: str
    cells: tuple[str, ...]
    bold: frozenset[int] = frozenset()
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table; `header` begins with the title of the labels, `left_out` counts the rows beyond the bound."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    left_out: int = 0
    note: str = ""


def load_table(comparison: Comparison, time_scale: float) -> PageTable:
    """Return all policies at one load: means over runs, the best in bold, and counts; unknown measures are left out."""
    cells = comparison.loads[time_scale]
    policies = [cell for cell in cells if not cell.is_reference]
    measures = [one for one in MEASURES if any(mean(cell, one) is not None for cell in cells)]
    best = [_best_text(policies, measure) for measure in measures]
    rows = []
    for cell in cells:
        size = (f"{len(cell.runs):,}", _requests_text(cell), f"{sum(run.row.errors for run in cell.runs):,}")
        texts = [measure.format(mean(cell, measure)) for measure in measures]
        bold = {place for place, text in enumerate(texts) if text == best[place] and not cell.is_reference}
        rows.append(TableRow(cell.label, (*texts, *size), frozenset(bold), cell.is_reference))
    header = ("policy", *(measure.title for measure in measures), "runs", "requests", "errors")
    return _table(f"{load_text(time_scale)}, {comparison.source}", header, rows)


def _table(caption: str, header: tuple[str, ...], rows: Sequence[TableRow], note: str = "") -> PageTable:
    return PageTable(caption, header, tuple(rows[:MAX_ROWS]), max(0, len(rows) - MAX_ROWS), note)


def _requests_text(cell: Cell) -> str:
    """Return the requests of all runs; after an interrupt with those of the trace."""
    ended = sum(run.row.n for run in cell.runs)
    if not cell.is_partial:
        return f"{ended:,}"
    planned = sum(run.row.n if run.row.planned is None else run.row.planned for run in cell.runs)
    return f"{ended:,} of {planned:,}, partial"


def _best_text(cells: Sequence[Cell], measure: Measure) -> str | None:
    """Return the best mean as displayed; None if all read the same."""
    means = [value for cell in cells if (value := mean(cell, measure)) is not None]
    if measure.best is None or len({measure.format(value) for value in means}) < 2:
        return None
    return measure.format(measure.best(means))


def ratio_table(comparison: Comparison) -> PageTable | None:
    """Return ratios to the best baseline of each load, by policy and load; None without a baseline to compare to."""
    rows = []
    for time_scale, cells in comparison.loads.items():
        bases = [(measure, best_baseline(cells, measure)) for measure in RATIO_MEASURES]
        for cell in cells:
            texts = [text for measure, base in bases for text in _ratio_texts(cell, base, measure)]
            if any(text != UNKNOWN for text in texts):
                rows.append(TableRow(cell.label, (load_number(time_scale), *texts), is_reference=cell.is_reference))
    titles = [measure.title.partition(",")[0] for measure in RATIO_MEASURES]
    header = [text for title in titles for text in (f"{title} /", "baseline", "95 % interval")]
    note = (
        "The geometric mean of the ratios of runs with the same seed: not the quotient of the two means above. "
        "An interval that contains 1 is undecided."
    )
    return _table("Ratios to the best baseline", ("policy", "load", *header), rows, note) if rows else None


def _ratio_texts(cell: Cell, base: Cell | None, measure: Measure) -> tuple[str, str, str]:
    """Return ratio, baseline and interval as in `0.880 to 0.945, lower`: the word is the interval's side of 1."""
    if base is None or cell is base or (found := ratio(cell, base, measure)) is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    if found.low is None or found.high is None:
        return f"{found.value:.3f}", base.label, UNKNOWN
    side = "lower" if found.high < 1 else "higher" if found.low > 1 else "undecided"
    return f"{found.value:.3f}", base.label, f"{found.low:.3f} to {found.high:.3f}, {side}"


def share_table(comparison: Comparison) -> PageTable | None:
    """Return the share of requests per replica, by policy and load; None if no row names a replica."""
    shares = [(time_scale, cell, mean_share(cell)) for time_scale, cell in comparison.placed]
    shares = [one for one in shares if one[2]]
    total: Counter[str] = Counter()
    for _, _, share in shares:
        total.update(share)
    largest = sorted(sorted(total, key=lambda name: (-total[name], name))[:MAX_REPLICAS])
    more = len(total) > len(largest)
    rows = []
    for time_scale, cell, share in shares:
        values = [share.get(name, 0.0) for name in largest]
        values += [sum(share.values()) - sum(values)] if more else []
        texts = (load_number(time_scale), *(f"{value:.1%}" for value in values))
        rows.append(TableRow(cell.label, texts, is_reference=cell.is_reference))
    header = ("policy", "load", *largest, *(["others"] if more else []))
    return _table("Share of requests per replica", header, rows) if rows else None


def error_table(comparison: Comparison) -> PageTable | None:
    """Return errors by kind, policy and load, the most frequent first; None without an error in saved requests."""
    found: Counter[tuple[str, float, str]] = Counter()
    for time_scale, cell in comparison.placed:
        for requests in cell.requests:
            found.update({(cell.label, time_scale, kind): count for kind, count in requests.errors.items()})
    ranked = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    rows = [TableRow(label, (load_number(scale), kind, f"{count:,}")) for (label, scale, kind), count in ranked]
    return _table("Errors by kind", ("policy", "load", "error", "requests"), rows) if rows else None


def acceptance_log(generations: Sequence[ReportGeneration]) -> PageTable:
    """Return the candidates and their results; the last generations if there are too many."""
    rows = []
    for one in generations[-MAX_ROWS:]:
        sigma = UNKNOWN if one.sigma is None else f"{one.sigma:.3g}"
        objectives = (TTFT_P95.format(one.objective_ms), TTFT_P95.format(one.incumbent_objective_ms))
        cells = (format_weights(one.weights), sigma, *objectives, _decision(one), one.reason or UNKNOWN)
        rows.append(TableRow(str(one.number), cells, frozenset({4} if one.accepted else ())))
    header = ("generation", "weights", "sigma", "p95 TTFT, ms", "incumbent's, ms", "decision", "reason")
    return PageTable("Acceptance log", header, tuple(rows), max(0, len(generations) - MAX_ROWS))


def _decision(generation: ReportGeneration) -> str:
    return "accepted" if generation.accepted else "rejected"


def policies_csv(comparison: Comparison) -> str:
    """Return every measure of every policy and load as CSV: counts, then means over runs."""
    rows = []
    for time_scale, cell in comparison.placed:
        counts = (len(cell.runs), sum(run.row.n for run in cell.runs), sum(run.row.errors for run in cell.runs))
        rows.append((cell.label, 1 / time_scale, *counts, *(mean(cell, measure) for measure in MEASURES)))
    names = [measure.title.replace(",", "").replace("%", "percent").replace(" ", "_") for measure in MEASURES]
    return csv_text(["policy", "load", "runs", "requests", "errors", *names], rows)


def tuning_csv(generations: Sequence[ReportGeneration]) -> str:
    """Return the generations as CSV, a column per weight."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))
    rows = []
    for one in generations:
        values = (*map(one.weights.get, weights), one.sigma, one.objective_ms, one.incumbent_objective_ms)
        rows.append((one.number, *values, _decision(one), one.reason))
    header = ("generation", *weights, "sigma", "objective_ms", "incumbent_objective_ms", "decision", "reason")
    return csv_text(header, rows)
