"""Pictures as SVG files. matplotlib, of the extra `report`, is imported when something is drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gorgo.apps.learned_routers.pictures import Picture, PicturePanel, PicturePoint
from gorgo.apps.report import require_extra
from gorgo.config.atomic import PUBLIC, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gorgo.apps.report.style import LineStyle

#: A PNG is a third of an SVG with hundreds of points.
Suffix = Literal["svg", "png"]
#: Of the distance of two groups of bars that the bars of one take.
_GROUP_WIDTH = 0.8
_MAX_NAME = 24


def write_pictures(folder: Path, pictures: Sequence[Picture], *, suffix: Suffix = "svg") -> list[Path]:
    """Write FOLDER/NAME.SUFFIX of each, and return the paths. Raises `MissingExtra` without the extra `report`."""
    require_extra("a picture")
    from gorgo.apps.report.style import png_document, svg_document

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures:
        key = re.sub(r"[^A-Za-z0-9]+", "-", picture.name).strip("-")
        path = folder / f"{key}.{suffix}"
        drawn = partial(draw, picture)
        document = svg_document(drawn, key=key).encode() if suffix == "svg" else png_document(drawn)
        write_atomically(path, document, mode=PUBLIC)
        paths.append(path)
    return paths


def draw(picture: Picture) -> Figure:
    """Return the figure of a picture."""
    from gorgo.apps.report.style import BROAD, add_legend, line_styles, panels

    labels = list(dict.fromkeys(label for panel in picture.panels for label in panel.curves))
    dashed = list(dict.fromkeys(label for panel in picture.panels for label in panel.dashed))
    styles = line_styles([*labels, *(label for label in dashed if label not in labels)])
    # `panels` shares one axis of x, which is right for one picture: its panels differ in y alone.
    figure, axes = panels(len(picture.panels), BROAD, height=3.2)
    for axis, panel in zip(axes, picture.panels, strict=True):
        (_draw_bars if panel.kind == "bars" else _draw_lines)(axis, panel, styles)
        for label, value in panel.dashed.items():
            axis.axhline(value, linestyle="--", color=styles[label].colour, linewidth=1.2)
        for x, begins in panel.marks.items():
            axis.axvline(x, linestyle=":", color="0.4", linewidth=1.0)
            axis.annotate(begins, (x, 1.0), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, va="top")
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x_label)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelbottom=True)
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def _draw_lines(axis: Axes, panel: PicturePanel, styles: dict[str, LineStyle]) -> None:
    for label, points in panel.curves.items():
        style = styles[label]
        x = [float(point.x) for point in points]
        axis.plot(
            x, [point.value for point in points], color=style.colour, linestyle=style.dashes, marker=style.marker,
            markersize=3, linewidth=1.3,
        )  # fmt: skip
        axis.fill_between(
            x, [point.low for point in points], [point.high for point in points], color=style.colour, alpha=0.12,
            linewidth=0,
        )  # fmt: skip


def _draw_bars(axis: Axes, panel: PicturePanel, styles: dict[str, LineStyle]) -> None:
    groups = list(dict.fromkeys(point.x for points in panel.curves.values() for point in points))
    width = _GROUP_WIDTH / max(1, len(panel.curves))
    for number, (label, points) in enumerate(panel.curves.items()):
        shift = (number - (len(panel.curves) - 1) / 2) * width
        places = [groups.index(point.x) + shift for point in points]
        axis.bar(
            places, [point.value for point in points], width=width, color=styles[label].colour, yerr=_reach(points),
            ecolor="#333333", error_kw={"elinewidth": 0.8},
        )  # fmt: skip
    from gorgo.apps.report.style import short_name

    names = [short_name(str(group), _MAX_NAME) for group in groups]
    axis.set_xticks(
        range(len(groups)), names, rotation=30 if len(groups) > 3 else 0, ha="right" if len(groups) > 3 else "center"
    )


def _reach(points: Sequence[PicturePoint]) -> list[list[float]]:
    return [[point.value - point.low for point in points], [point.high - point.value for point in points]]
