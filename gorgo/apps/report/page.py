"""The page: sections of tables and plots in the template, all text escaped except our own SVG.

Each plot is drawn twice, for a broad and for a narrow screen. The broad one and its points are files beside the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from itertools import count
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gorgo import __version__
from gorgo.apps.report.plots import PlannedPlot, comparison_plots, tuning_plot
from gorgo.apps.report.runs import Comparison, ReportGeneration, ReportInput
from gorgo.apps.report.style import BROAD, NARROW, svg_document, svg_element
from gorgo.apps.report.tables import (
    acceptance_log,
    error_table,
    load_table,
    policies_csv,
    ratio_table,
    share_table,
    tuning_csv,
)

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
