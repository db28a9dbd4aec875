"""The page as text: sections into the template, everything escaped that is not our own SVG."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from gorgo import __version__
from gorgo.apps.report.runs import ReportInput
from gorgo.apps.report.sections import Section, comparison_section, title_of, tuning_section
from gorgo.apps.report.words import listed

TEMPLATE = "page.html"
#: Titles name so many traces; the sections name the rest.
MAX_TITLES = 3
#: Files that are named as left out; the others are counted.
MAX_LEFT_OUT = 20


def page(found: ReportInput) -> str:
    """The whole HTML page. The same results give the same bytes."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["own_svg"] = Markup  # made by style.svg, where names are escaped
    source = (files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=_title(found), sections=_sections(found), left_out=_left_out(found), version=__version__
    )


def _sections(found: ReportInput) -> list[Section]:
    comparisons = [comparison_section(one, f"c{number}") for number, one in enumerate(found.comparisons)]
    histories = [
        tuning_section(path, generations, f"t{number}")
        for number, (path, generations) in enumerate(found.histories.items())
    ]
    return comparisons + histories


def _title(found: ReportInput) -> str:
    titles = [title_of(one) for one in found.comparisons]
    more = [f"{len(titles) - MAX_TITLES} more"] if len(titles) > MAX_TITLES else []
    return (
        f"GORGO report: {'; '.join([*titles[:MAX_TITLES], *more])}" if titles else f"GORGO report: {_histories(found)}"
    )


def _histories(found: ReportInput) -> str:
    return f"tuning history {listed(found.histories)}"


def _left_out(found: ReportInput) -> list[str]:
    more = len(found.left_out) - MAX_LEFT_OUT
    return [*found.left_out[:MAX_LEFT_OUT], *([f"and {more} more"] if more > 0 else [])]
