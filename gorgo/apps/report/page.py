"""The page: sections of tables and plots in the template, all text escaped except our own SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from gorgo import __version__
from gorgo.apps.report.latency import MAX_CURVES, MAX_PANELS, against_load, ttft_distribution
from gorgo.apps.report.runs import Comparison, ReportGeneration, ReportInput
from gorgo.apps.report.statistics import E2E_P95, TTFT_P95
from gorgo.apps.report.style import svg
from gorgo.apps.report.tables import PageTable, acceptance_log, error_table, load_table, share_table
from gorgo.apps.report.tuning import tuning_plot

TEMPLATE = "page.html"
#: Names in the title; the sections have the others.
MAX_TITLES = 3
#: Files named as left out; further ones are counted.
MAX_LEFT_OUT = 20
#: Load tables of one comparison.
MAX_TABLES = 24


@dataclass(frozen=True, slots=True)
class PagePlot:
    """A plot and a note of omitted data; without `svg` the note has the reason."""

    title: str
    note: str
    svg: Markup | None


@dataclass(frozen=True, slots=True)
class Section:
    """One heading of the page."""

    title: str
    note: str
    tables: Sequence[PageTable]
    plots: Sequence[PagePlot]


def page(found: ReportInput) -> str:
    """Return the whole HTML page. The same results give the same bytes."""
    sections = [_comparison_section(one, f"c{number}") for number, one in enumerate(found.comparisons)]
    for number, (path, generations) in enumerate(found.histories.items()):
        sections.append(_tuning_section(path, generations, f"t{number}"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8"))
    titles = "; ".join(_first([section.title for section in sections], MAX_TITLES))
    left_out = _first(found.left_out, MAX_LEFT_OUT)
    return template.render(title=f"GORGO report: {titles}", sections=sections, left_out=left_out, version=__version__)


def _first(texts: Sequence[str], count: int) -> list[str]:
    more = len(texts) - count
    return [*texts[:count], *([f"{more} more"] if more > 0 else [])]


def _comparison_section(comparison: Comparison, key: str) -> Section:
    """Return the section of one trace. `key` is unique in the page: ids in the plots derive from it."""
    loads, labels = len(comparison.loads), len(comparison.labels)
    tables = [load_table(comparison, time_scale) for time_scale in list(comparison.loads)[:MAX_TABLES]]
    tables += [table for table in (share_table(comparison), error_table(comparison)) if table is not None]
    curves = [f"{MAX_CURVES} of {labels} policies are drawn."] if labels > MAX_CURVES else []
    panels = [f"{MAX_PANELS} of {loads} loads are drawn."] if loads > MAX_PANELS else []
    return Section(
        comparison.title,
        f"{MAX_TABLES} of {loads} loads have a table." if loads > MAX_TABLES else "",
        tables,
        (
            _plot(
                f"p95 against load, {comparison.source}",
                "Left out: there is only one load." if loads < 2 else " ".join(curves),
                None if loads < 2 else lambda: against_load(comparison, (TTFT_P95, E2E_P95)),
                f"{key}-load",
            ),
            _plot(
                f"TTFT distribution, {comparison.source}",
                " ".join(panels + curves)
                if (known := any(len(cell.ttft_ms) for cell in comparison.cells))
                else "Left out: no requests.jsonl with a TTFT was saved.",
                (lambda: ttft_distribution(comparison)) if known else None,
                f"{key}-ttft",
            ),
        ),
    )


def _tuning_section(path: str, generations: Sequence[ReportGeneration], key: str) -> Section:
    note = "" if generations else "Left out: there is no generation."
    plot = _plot("Weights, sigma and objective", note, (lambda: tuning_plot(generations)) if generations else None, key)
    return Section(f"Tuning: {path}", "", [acceptance_log(generations)], [plot])


def _plot(title: str, note: str, draw: Callable[[], Figure] | None, key: str) -> PagePlot:
    return PagePlot(title, note, None if draw is None else Markup(svg(draw, key=key, title=title)))
