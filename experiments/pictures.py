"""Pictures of comparisons: bars per traffic, curves over an x, and curves over time; with the extra `report`.

Every point is a mean over seeds; its bar or band goes from the least seed to the most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Literal

from experiments.comparison import VariantComparison, value_of
from experiments.runner import Runs
from experiments.simulated import TaskRun
from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.lab.report import require_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gorgo.lab.report.style import LineStyle

Kind = Literal["bars", "lines", "times"]
#: A PNG is a third of an SVG with hundreds of points.
Suffix = Literal["svg", "png"]
#: Of the distance of two groups of bars that the bars of one take, and the longest name below one.
_GROUP_WIDTH, _MAX_NAME = 0.8, 24


@dataclass(frozen=True, slots=True)
class Pictured:
    """How the comparisons of a group become pictures, one per family.

    `bars` and `lines` have a point per comparison, `times` one per slice of the runs of one comparison.
    """

    kind: Kind
    #: Title of each panel -> its figure: a key of `MEASURES` or of the values of a run; of a slice for `times`.
    stats: Mapping[str, str]
    x_label: str = ""  #: Of lines.


@dataclass(frozen=True, slots=True)
class Point:
    """A point: `x` is a name for bars. `low` and `high` are the least and the most of the seeds."""

    x: str | float
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, x: str | float, values: Sequence[float]) -> Point:
        return cls(x, mean(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves or bars by label, and what begins at an x."""

    title: str
    x_label: str
    kind: Kind
    curves: Mapping[str, Sequence[Point]]
    marks: Mapping[float, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels side by side; `name` is that of the file, without its extension."""

    name: str
    panels: Sequence[Panel]


def pictures_of(
    found: Sequence[VariantComparison], runs: Runs, seeds: Sequence[int], pictured: Mapping[str, Pictured]
) -> list[Picture]:
    """Return a picture per family of the comparisons whose group has one."""
    families: dict[tuple[str, str], list[VariantComparison]] = {}
    for one in found:
        if one.group in pictured:
            families.setdefault((one.group, one.family), []).append(one)
    return [
        Picture(family, list(_panels(some, runs, seeds, pictured[group]))) for (group, family), some in families.items()
    ]


def _panels(some: Sequence[VariantComparison], runs: Runs, seeds: Sequence[int], spec: Pictured) -> Iterator[Panel]:
    x_label = {"bars": some[0].base.fleet.name, "lines": spec.x_label, "times": f"{some[0].title}; seconds"}[spec.kind]
    ordered = sorted(some, key=lambda one: float(one.x)) if spec.kind == "lines" else some
    for title, figure in spec.stats.items():
        curves: dict[str, list[Point]] = {}
        for one in ordered:
            for variant in one.variants:
                points = _points(one, one.runs_of(variant, runs, seeds), spec.kind, figure)
                curves.setdefault(variant, []).extend(points)
        shown = {label: points for label, points in curves.items() if points}
        yield Panel(title, x_label, spec.kind, shown, some[0].marks)


def _points(one: VariantComparison, runs: Sequence[TaskRun], kind: Kind, figure: str) -> Iterator[Point]:
    if kind == "times":
        slices = list(zip(*(run.slices for run in runs), strict=False))
        places: list[str | float] = [mean(each["begins_s"] or 0.0 for each in some) for some in slices]
        values = [[each[figure] for each in some] for some in slices]
    else:
        places, values = [one.x], [[value_of(run, figure) for run in runs]]
    for x, some in zip(places, values, strict=True):
        if known := [value for value in some if value is not None]:
            yield Point.of(x, known)


def write_pictures(folder: Path, pictures: Sequence[Picture], *, suffix: Suffix = "svg") -> list[Path]:
    """Write FOLDER/NAME.SUFFIX of each, and return the paths. Raises `MissingExtra` without the extra `report`."""
    require_extra("a picture")
    from gorgo.lab.report.style import png_document, svg_document

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures:
        key = re.sub(r"[^A-Za-z0-9]+", "-", picture.name).strip("-")
        drawn = partial(draw, picture)
        document = svg_document(drawn, key=key).encode() if suffix == "svg" else png_document(drawn)
        write_atomically(path := folder / f"{key}.{suffix}", document, mode=PUBLIC)
        paths.append(path)
    return paths


def draw(picture: Picture) -> Figure:
    from gorgo.lab.report.style import BROAD, add_legend, line_styles, panels

    styles = line_styles(list(dict.fromkeys(label for panel in picture.panels for label in panel.curves)))
    # `panels` shares one axis of x, which is right for one picture: its panels differ in y alone.
    figure, axes = panels(len(picture.panels), BROAD, height=3.2)
    for axis, panel in zip(axes, picture.panels, strict=True):
        (_draw_bars if panel.kind == "bars" else _draw_lines)(axis, panel, styles)
        for x, begins in panel.marks.items():
            axis.axvline(x, linestyle=":", color="0.4", linewidth=1.0)
            axis.annotate(begins, (x, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, va="top")
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x_label)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelbottom=True)
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def _draw_lines(axis: Axes, panel: Panel, styles: Mapping[str, LineStyle]) -> None:
    for label, points in panel.curves.items():
        style, x = styles[label], [float(point.x) for point in points]
        line = {"color": style.colour, "linestyle": style.dashes, "marker": style.marker}
        axis.plot(x, [point.value for point in points], markersize=3, linewidth=1.3, **line)  # type: ignore[arg-type]
        low, high = [point.low for point in points], [point.high for point in points]
        axis.fill_between(x, low, high, color=style.colour, alpha=0.12, linewidth=0)


def _draw_bars(axis: Axes, panel: Panel, styles: Mapping[str, LineStyle]) -> None:
    from gorgo.lab.report.style import short_name

    groups = list(dict.fromkeys(point.x for points in panel.curves.values() for point in points))
    width = _GROUP_WIDTH / max(1, len(panel.curves))
    for number, (label, points) in enumerate(panel.curves.items()):
        shift = (number - (len(panel.curves) - 1) / 2) * width
        places = [groups.index(point.x) + shift for point in points]
        reach = [[point.value - point.low for point in points], [point.high - point.value for point in points]]
        axis.bar(
            places, [point.value for point in points], width=width, color=styles[label].colour, yerr=reach,
            ecolor="#333333", error_kw={"elinewidth": 0.8},
        )  # fmt: skip
    names, many = [short_name(str(group), _MAX_NAME) for group in groups], len(groups) > 3
    axis.set_xticks(range(len(groups)), names, rotation=30 if many else 0, ha="right" if many else "center")
