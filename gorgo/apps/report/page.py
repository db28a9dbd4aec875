"""The page: sections of tables and plots in the template, all text escaped except our own SVG.

Each plot is drawn twice, for a broad and for a narrow screen. The broad one and its points are files beside the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from gorgo import __version__
from gorgo.apps.report.plots import PlannedPlot, comparison_plots
from gorgo.apps.report.runs import Comparison, ReportGeneration, ReportInput
from gorgo.apps.report.style import BROAD, NARROW, Layout, svg_document, svg_element
from gorgo.apps.report.tables import (
    PageTable,
    acceptance_log,
    error_table,
    load_table,
    policies_csv,
    ratio_table,
    share_table,
)
from gorgo.apps.report.tuning import tuning_csv, tuning_plot

TEMPLATE = "page.html"
#: The folder beside the page with its plots and figures.
FILES = "report"
#: Names in the title; the sections have the others.
MAX_TITLES = 3
#: Files named as left out; further ones are counted.
MAX_LEFT_OUT = 20
#: Load tables of one comparison.
MAX_TABLES = 24


@dataclass(frozen=True, slots=True)
class PagePlot:
    """A plot for broad and narrow screens, the names of its files, and a note of omitted data.

    Without a drawing the note has the reason.
    """

    title: str
    note: str
    broad: Markup | None = None
    narrow: Markup | None = None
    files: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One heading of the page; `files` has the figures of its tables."""

    title: str
    note: str
    tables: Sequence[PageTable]
    plots: Sequence[PagePlot]
    files: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReportPages:
    """The page, and the contents of the files that it links to by name."""

    html: str
    files: Mapping[str, str] = field(default_factory=dict)


def report(found: ReportInput, slos_ms: Sequence[float]) -> ReportPages:
    """Return the page and its files. The same results give the same bytes."""
    contents: dict[str, str] = {}
    sections = [
        _comparison_section(one, slos_ms, f"{number}", contents)
        for number, one in enumerate(found.comparisons, start=1)
    ]
    for number, (path, generations) in enumerate(found.histories.items(), start=len(sections) + 1):
        sections.append(_tuning_section(path, generations, f"{number}", contents))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8"))
    titles = "; ".join(_first([section.title for section in sections], MAX_TITLES))
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
    tables += [table for table in more if table is not None]
    plots = [_plot(plan, f"{key}-{plan.key}", contents) for plan in comparison_plots(comparison, slos_ms)]
    name = f"{key}-policies.csv"
    contents[name] = policies_csv(comparison)
    return Section(comparison.title, " ".join(_notes(comparison)), tables, plots, (name,))


def _notes(comparison: Comparison) -> Iterator[str]:
    partial = list(dict.fromkeys(cell.label for cell in comparison.cells if cell.is_partial))
    if partial:
        names = ", ".join(_first(partial, MAX_TITLES))
        yield f"Partial: a run was interrupted; its figures are of the requests that had ended ({names})."
    if len(comparison.loads) > MAX_TABLES:
        yield f"{MAX_TABLES} of {len(comparison.loads)} loads have a table."


def _tuning_section(path: str, generations: Sequence[ReportGeneration], key: str, contents: dict[str, str]) -> Section:
    def draw(layout: Layout) -> Figure:
        return tuning_plot(generations, layout)

    note = "" if generations else "Left out: there is no generation."
    plan = PlannedPlot("tuning", "Weights, sigma and objective", note, draw if generations else None)
    plot = _plot(plan, f"{key}-{plan.key}", contents, tuning_csv(generations))
    return Section(f"Tuning: {path}", "", [acceptance_log(generations)], [plot])


def _plot(plan: PlannedPlot, key: str, contents: dict[str, str], table: str = "") -> PagePlot:
    if plan.draw is None:
        return PagePlot(plan.title, plan.note)
    broad = svg_document(_laid_out(plan.draw, BROAD), key=key)
    narrow = svg_document(_laid_out(plan.draw, NARROW), key=f"{key}-narrow")
    names = (f"{key}.svg", f"{key}.csv")
    contents |= dict(zip(names, (broad, plan.series.csv() if plan.series is not None else table), strict=True))
    return PagePlot(
        plan.title,
        plan.note,
        Markup(svg_element(broad, key=key, title=plan.title)),
        Markup(svg_element(narrow, key=f"{key}-narrow", title=plan.title)),
        names,
    )


def _laid_out(draw: Callable[[Layout], Figure], layout: Layout) -> Callable[[], Figure]:
    return lambda: draw(layout)
