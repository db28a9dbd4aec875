"""The page: sections of tables and plots in the template, all text escaped except our own SVG.

Owns the sections and the tables (policies per load, shares, errors by kind, the acceptance log), whose rows are
bounded. Leaves the drawings to `gorgo.lab.report.plots`. Each plot is drawn twice, for a broad and for a narrow screen.
The broad one and its points are files beside the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from itertools import count
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gorgo import __version__
from gorgo.lab.report.plots import PlannedPlot, comparison_plots, tuning_plot
from gorgo.lab.report.runs import (
    MEASURES,
    RATIO_MEASURES,
    TTFT_P95,
    Cell,
    Comparison,
    Measure,
    ReportGeneration,
    ReportInput,
    best_baseline,
    format_weights,
    mean,
    mean_share,
    ratio,
)
from gorgo.lab.report.series import csv_text, load_number
from gorgo.lab.report.style import BROAD, NARROW, svg_document, svg_element
from gorgo.lab.results import load_text

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


TEMPLATE = "page.html"
#: The folder beside the page with its plots and figures.
FILES = "report"
#: Names in the title; the sections have the others.
MAX_TITLES = 3
#: Files named as left out; further ones are counted.
MAX_LEFT_OUT = 20
#: Load tables of one comparison.
MAX_TABLES = 24

#: What the template reads of one heading.
Section = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportPages:
    """The page, and the contents of the files that it links to by name."""

    html: str
    files: Mapping[str, str] = field(default_factory=dict)


def report(found: ReportInput, slos_ms: Sequence[float]) -> ReportPages:
    """Return the page and its files. The same results give the same bytes."""
    contents: dict[str, str] = {}
    numbers = count(1)
    sections = [_comparison_section(one, slos_ms, f"{next(numbers)}", contents) for one in found.comparisons]
    sections += [_tuning_section(path, rows, f"{next(numbers)}", contents) for path, rows in found.histories.items()]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8"))
    titles = "; ".join(_first([section["title"] for section in sections], MAX_TITLES))
    html = template.render(
        title=f"GORGO report: {titles}",
        sections=sections,
        left_out=_first(found.left_out, MAX_LEFT_OUT),
        folder=FILES,
        version=__version__,
    )
    return ReportPages(html, contents)


def _first(texts: Sequence[str], count: int) -> list[str]:
    more = len(texts) - count
    return [*texts[:count], *([f"{more} more"] if more > 0 else [])]


def _comparison_section(
    comparison: Comparison, slos_ms: Sequence[float], key: str, contents: dict[str, str]
) -> Section:
    """Return the section of one trace. `key` is unique in the page: ids and file names begin with it."""
    tables = [load_table(comparison, time_scale) for time_scale in list(comparison.loads)[:MAX_TABLES]]
    more = (ratio_table(comparison), share_table(comparison), error_table(comparison))
    notes = []
    interrupted = list(dict.fromkeys(cell.label for cell in comparison.cells if cell.is_partial))
    if interrupted:
        names = ", ".join(_first(interrupted, MAX_TITLES))
        notes.append(f"Partial: a run was interrupted; its figures are of the requests that had ended ({names}).")
    if len(comparison.loads) > MAX_TABLES:
        notes.append(f"{MAX_TABLES} of {len(comparison.loads)} loads have a table.")
    name = f"{key}-policies.csv"
    plots = [_plot(plan, f"{key}-{plan.key}", contents) for plan in comparison_plots(comparison, slos_ms)]
    contents[name] = policies_csv(comparison)
    return {
        "title": comparison.title,
        "note": " ".join(notes),
        "tables": [*tables, *filter(None, more)],
        "plots": plots,
        "files": (name,),
    }


def _tuning_section(path: str, generations: Sequence[ReportGeneration], key: str, contents: dict[str, str]) -> Section:
    note = "" if generations else "Left out: there is no generation."
    draw = partial(tuning_plot, generations) if generations else None
    plan = PlannedPlot("tuning", "Weights, sigma and objective", note, draw)
    plot = _plot(plan, f"{key}-{plan.key}", contents, tuning_csv(generations))
    return {
        "title": f"Tuning: {path}",
        "note": "",
        "tables": [acceptance_log(generations)],
        "plots": [plot],
        "files": (),
    }


def _plot(plan: PlannedPlot, key: str, contents: dict[str, str], table: str = "") -> dict[str, object]:
    """Draw a plot for broad and narrow screens, and add its files; without a drawing its note has the reason."""
    if plan.draw is None:
        return {"title": plan.title, "note": plan.note, "broad": None, "files": ()}
    drawn = {
        name: svg_document(partial(plan.draw, layout), key=name)
        for name, layout in ((key, BROAD), (f"{key}-narrow", NARROW))
    }
    broad, narrow = (Markup(svg_element(text, key=name, title=plan.title)) for name, text in drawn.items())
    files = {f"{key}.svg": drawn[key], f"{key}.csv": table if plan.series is None else plan.series.csv()}
    contents |= files
    return {"title": plan.title, "note": plan.note, "broad": broad, "narrow": narrow, "files": list(files)}
