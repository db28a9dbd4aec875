"""The page of results: its tables, and the page with its files, in the template `page.html`.

Owns the sections and the tables, whose rows are bounded. Leaves the reading to `runs`, the drawings to `plots`, and
what is written to the package. Each plot is drawn twice, for a broad and for a narrow screen. The broad one and its
points are files beside the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from gorgo import __version__
from gorgo.formatting import UNKNOWN
from gorgo.lab.report import plots
from gorgo.lab.report.runs import Cell, Comparison, ReportGeneration, ReportInput, format_weights
from gorgo.lab.report.style import BROAD, NARROW, Layout, plot_file, printable_text, svg_document, svg_element
from gorgo.lab.results import ResultColumn, ResultRow, percent
from gorgo.lab.simulate.compare import e2e_s_p95, ttft_ms_p95

#: Rows of one table; results.json has the others.
MAX_ROWS = 200
TEMPLATE = "page.html"
#: The folder beside the page with its plots and figures.
FILES = "report"

#: What the template reads of one heading.
Section = dict[str, Any]


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


#: The columns of a load's table.
MEASURES = (
    ResultColumn(("p50 TTFT, ms",), lambda row: row.ttft_ms.p50, ",.0f", min),
    ResultColumn(("p95 TTFT, ms",), ttft_ms_p95, ",.0f", min),
    ResultColumn(("p99 TTFT, ms",), lambda row: row.ttft_ms.p99, ",.0f", min),
    ResultColumn(("p50 E2E, s",), lambda row: row.e2e_s.p50, ",.2f", min),
    ResultColumn(("p95 E2E, s",), e2e_s_p95, ",.2f", min),
    ResultColumn(("p95 ITL, ms",), lambda row: row.itl_ms.p95, ",.0f", min),
    ResultColumn(("cache hit, %",), lambda row: percent(row.cache_hit), ".1f", max),
    ResultColumn(("estimated, %",), lambda row: percent(row.cache_hit_estimated), ".1f"),
    ResultColumn(("p50 prediction error, ms",), lambda row: row.prediction_error_ms.p50, ",.0f", min),
    ResultColumn(("p95 slip, ms",), lambda row: row.slip_ms_p95, ",.1f"),
)


def _table(caption: str, header: tuple[str, ...], rows: Sequence[TableRow], note: str = "") -> PageTable:
    return PageTable(caption, header, tuple(rows[:MAX_ROWS]), max(0, len(rows) - MAX_ROWS), note)


def load_table(cells: Sequence[Cell], source: str) -> PageTable:
    """Return all policies at one load: means over runs, the best in bold, and counts; unknown measures are left out."""
    measures = [one for one in MEASURES if any(one.value(cell.mean) is not None for cell in cells)]
    best = [_best_text([cell.mean for cell in cells if not cell.is_reference], measure) for measure in measures]
    rows = []
    for cell in cells:
        row, values = cell.mean, [measure.value(cell.mean) for measure in measures]
        texts = [_text(value, measure.form) for value, measure in zip(values, measures, strict=True)]
        bold = {column for column, text in enumerate(texts) if text == best[column] and not cell.is_reference}
        requests = f"{row.n:,} of {row.planned:,}, partial" if row.is_partial else f"{row.n:,}"
        counts = f"{len(cell.rows):,}", requests, f"{row.errors:,}"
        rows.append(TableRow(cell.label, (*texts, *counts), frozenset(bold), cell.is_reference))
    header = ("policy", *(measure.title[0] for measure in measures), "runs", "requests", "errors")
    return _table(f"load {cells[0].load:.3g}, {source}", header, rows)


def _text(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _best_text(rows: Sequence[ResultRow], measure: ResultColumn) -> str | None:
    """Return the best figure as displayed; None if all read the same."""
    values = [value for row in rows if (value := measure.value(row)) is not None]
    if measure.best is None or len({format(value, measure.form) for value in values}) < 2:
        return None
    return format(measure.best(values), measure.form)


def ratio_table(comparison: Comparison) -> PageTable | None:
    """Return ratios to the best baseline of each load, by policy and load; None without a baseline to compare to."""
    points = {(one.panel, one.policy, one.x): one for one in plots.ratio_points(comparison)}
    rows = []
    for cell in comparison.cells:
        ratios = [points.get((plots.ratio_title(title), cell.label, cell.load)) for title in plots.RATIO_MEASURES]
        if any(ratios):
            texts = [text for point in ratios for text in _ratio_texts(point)]
            rows.append(TableRow(cell.label, (f"{cell.load:.3g}", *texts), is_reference=cell.is_reference))
    names = [title.partition(",")[0] for title in plots.RATIO_MEASURES]
    header = [text for name in names for text in (f"{name} /", "baseline", "95 % interval")]
    note = (
        "The geometric mean of the ratios of runs with the same seed: not the quotient of the two means above. Of "
        "windows (--windows) a unit of the interval is a window, with the mean over its seeds. "
        "An interval that contains 1 is undecided."
    )
    return _table("Ratios to the best baseline", ("policy", "load", *header), rows, note) if rows else None


def _ratio_texts(point: plots.PlotPoint | None) -> tuple[str, str, str]:
    """Return ratio, baseline and interval as in `0.880 to 0.945, lower`: the word is the interval's side of 1."""
    if point is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    if point.low is None or point.high is None:
        return f"{point.value:.3f}", point.to, UNKNOWN
    side = "lower" if point.high < 1 else "higher" if point.low > 1 else "undecided"
    return f"{point.value:.3f}", point.to, f"{point.low:.3f} to {point.high:.3f}, {side}"


def share_table(comparison: Comparison) -> PageTable | None:
    """Return the share of requests per replica, by policy and load; None if no row names a replica."""
    names = sorted({name for cell in comparison.cells for name in cell.mean.share})
    rows = []
    for cell, share in ((cell, cell.mean.share) for cell in comparison.cells if cell.mean.share):
        total = sum(share.values())  # less than 1 if a run names no replica
        texts = (f"{cell.load:.3g}", *(f"{share.get(name, 0.0) / total:.1%}" for name in names))
        rows.append(TableRow(cell.label, texts, is_reference=cell.is_reference))
    return _table("Share of requests per replica", ("policy", "load", *names), rows) if rows else None


def acceptance_log(generations: Sequence[ReportGeneration]) -> PageTable:
    """Return the candidates and their results; the last generations if there are too many."""
    rows = []
    for one in generations[-MAX_ROWS:]:
        texts = _text(one.sigma, ".3g"), _text(one.objective_ms, ",.0f"), _text(one.incumbent_objective_ms, ",.0f")
        cells = format_weights(one.weights), *texts, one.decision, one.reason or UNKNOWN
        rows.append(TableRow(str(one.number), cells, frozenset({4} if one.accepted else ())))
    header = ("generation", "weights", "sigma", "p95 TTFT, ms", "incumbent's, ms", "decision", "reason")
    return PageTable("Acceptance log", header, tuple(rows), max(0, len(generations) - MAX_ROWS))


def policies_csv(comparison: Comparison) -> str:
    """Return every measure of every policy and load as CSV: counts, then means over runs."""
    rows = []
    for cell in comparison.cells:
        values = (measure.value(cell.mean) for measure in MEASURES)
        rows.append((cell.label, cell.load, len(cell.rows), cell.mean.n, cell.mean.errors, *values))
    names = [measure.title[0].replace(",", "").replace("%", "percent").replace(" ", "_") for measure in MEASURES]
    return plots.csv_text(["policy", "load", "runs", "requests", "errors", *names], rows)


def tuning_csv(generations: Sequence[ReportGeneration]) -> str:
    """Return the generations as CSV, a column per weight."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))
    rows = []
    for one in generations:
        values = (*map(one.weights.get, weights), one.sigma, one.objective_ms, one.incumbent_objective_ms)
        rows.append((one.number, *values, one.decision, one.reason))
    header = ("generation", *weights, "sigma", "objective_ms", "incumbent_objective_ms", "decision", "reason")
    return plots.csv_text(header, rows)


def report(inputs: ReportInput, *, forms: Sequence[str] = ()) -> tuple[str, dict[str, bytes]]:
    """Return the page, and by name the files that it links to: tables as CSV, plots as SVG and in other `forms`.

    The same results give the same bytes.
    """
    sections = [_comparison_section(one, f"{key}", forms) for key, one in enumerate(inputs.comparisons, start=1)]
    for key, (path, rows) in enumerate(inputs.histories.items(), start=len(sections) + 1):
        sections.append(_tuning_section(path, rows, f"{key}", forms))
    more = f" and {len(sections) - 1} more" if len(sections) > 1 else ""
    title = f"GORGO report: {sections[0]['title']}{more}"
    html = render_page(title, sections, left_out=inputs.left_out)
    parts = [part for section in sections for part in (*section["plots"], section)]
    return html, {name: content for part in parts for name, content in part["files"].items()}


def render_page(
    title: str, sections: Sequence[Section], *, left_out: Sequence[str] = (), footnotes: bool = True
) -> str:
    """Return a page, with all text escaped except our own SVG. `footnotes` explain the measures of comparisons."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    template = environment.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        title=title, sections=sections, left_out=left_out, folder=FILES, version=__version__, footnotes=footnotes
    )


def _printable(value: object) -> object:
    return printable_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _comparison_section(comparison: Comparison, key: str, forms: Sequence[str]) -> Section:
    """Return the section of one trace. `key` is unique in the page: ids and file names begin with it."""
    tables = [load_table(cells, comparison.source) for cells in comparison.loads.values()]
    notes = []
    if comparison.settings > 1:
        notes.append(
            f"One of {comparison.settings} settings of this trace: fleet, limits, filters or version differ, so the "
            "runs of one are neither averaged nor paired with those of another."
        )
    if interrupted := dict.fromkeys(cell.label for cell in comparison.cells if cell.mean.is_partial):
        names = ", ".join(interrupted)
        notes.append(f"Partial: a run was interrupted; its figures are of the requests that had ended ({names}).")
    return {
        "title": comparison.title,
        "note": " ".join(notes),
        "tables": [*tables, *filter(None, (ratio_table(comparison), share_table(comparison)))],
        "plots": [_comparison_plot(kind, comparison, key, forms) for kind in plots.PLOTS],
        "files": {f"{key}-policies.csv": policies_csv(comparison).encode()},
    }


def _comparison_plot(kind: plots.PlotKind, comparison: Comparison, key: str, forms: Sequence[str]) -> Section:
    title, points = f"{kind.title}, {comparison.source}", kind.points(comparison)
    if not points:
        return _left_out(title, kind.empty)
    draw = partial(kind.draw, comparison, points)
    return _plot(title, kind.note, f"{key}-{kind.key}", draw, kind.csv(points), forms)


def _tuning_section(path: str, generations: Sequence[ReportGeneration], key: str, forms: Sequence[str]) -> Section:
    title, draw = "Weights, sigma and objective", partial(plots.tuning_plot, generations)
    plot = _plot(title, "", f"{key}-tuning", draw, tuning_csv(generations), forms) if generations else None
    shown, tables = [plot or _left_out(title, "there is no generation")], [acceptance_log(generations)]
    return {"title": f"Tuning: {path}", "note": "", "tables": tables, "plots": shown, "files": {}}


def _left_out(title: str, reason: str) -> Section:
    return {"title": title, "note": f"Left out: {reason}.", "broad": None, "files": {}}


def _plot(
    title: str, note: str, key: str, draw: Callable[[Layout], Figure], table: str, forms: Sequence[str]
) -> Section:
    """Return a plot for broad and narrow screens with its files."""
    drawn = {
        name: svg_document(partial(draw, layout), key=name)
        for name, layout in ((key, BROAD), (f"{key}-narrow", NARROW))
    }
    broad, narrow = (Markup(svg_element(text, key=name, title=title)) for name, text in drawn.items())
    contents = {f"{key}.svg": drawn[key].encode(), f"{key}.csv": table.encode()}
    contents |= {f"{key}.{form}": plot_file(partial(draw, BROAD), form) for form in forms}
    return {"title": title, "note": note, "broad": broad, "narrow": narrow, "files": contents}
