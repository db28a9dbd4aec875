"""Plots of where requests went and of what was cached there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from gorgo.apps.report.latency import drawn_labels, drawn_loads, load_title
from gorgo.apps.report.runs import Cell, Comparison
from gorgo.apps.report.statistics import HIT, HIT_ESTIMATED, mean
from gorgo.apps.report.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, name, panels
from gorgo.apps.report.words import mean_share

#: Bars with more parts cannot be told apart; the smallest become one.
MAX_PARTS = 8
#: A part this small has no room for its figure.
LABELLED = 0.06
REST = "others"
_COLOURS = (BLUE, ORANGE, GREEN, SKY, VERMILLION, PURPLE, "#004d40", "#bbbbbb")
_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "")


def parts(comparison: Comparison) -> tuple[str, dict[str, str]]:
    """What a bar is divided into: the kind in words, and for every replica the part it belongs to.

    Replicas where they are few, else regions where those are known, else the replicas with most traffic and the rest.
    """
    total: dict[str, float] = {}
    for cell in comparison.cells:
        for replica, share in mean_share(cell).items():
            total[replica] = total.get(replica, 0.0) + share
    if len(total) <= MAX_PARTS:
        return "replica", {replica: replica for replica in sorted(total)}
    regions = _regions(comparison)
    if set(total) <= set(regions) and len(set(regions.values())) <= MAX_PARTS:
        return "region", {replica: regions[replica] for replica in sorted(total)}
    largest = sorted(sorted(total, key=lambda replica: (-total[replica], replica))[: MAX_PARTS - 1])
    return "replica", {replica: replica if replica in largest else REST for replica in [*largest, *total]}


def _regions(comparison: Comparison) -> dict[str, str]:
    kept = [run.requests for cell in comparison.cells for run in cell.runs if run.requests is not None]
    return {replica: region for requests in kept for replica, region in requests.regions.items()}


def shares(comparison: Comparison) -> Figure:
    """A bar per policy divided by replica (or region), a panel per load."""
    loads, labels = drawn_loads(comparison), _labels(comparison, mean_share)
    kind, belongs = parts(comparison)
    names = list(dict.fromkeys(belongs.values()))
    figure, axes = panels(len(loads), height=0.27 * len(labels) + 0.75)
    for panel, time_scale in zip(axes, loads, strict=True):
        cells = {cell.label: cell for cell in comparison.loads[time_scale]}
        shown = {label: _by_part(cells[label], belongs) if label in cells else {} for label in labels}
        _stack(panel, shown, names)
        panel.set_title(load_title(time_scale))
    handles = [
        Patch(facecolor=_COLOURS[n], hatch=_HATCHES[n], edgecolor="white", label=name(one))
        for n, one in enumerate(names)
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=8.5, title=f"share per {kind}")
    return figure


def _labels(comparison: Comparison, known: Callable[[Cell], object]) -> list[str]:
    """The policies that get a row: the floor has no replicas and no cache."""
    have = {cell.label for cell in comparison.cells if known(cell)}
    return [label for label in drawn_labels(comparison) if label in have]


def _by_part(cell: Cell, belongs: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for replica, share in mean_share(cell).items():
        found[belongs[replica]] = found.get(belongs[replica], 0.0) + share
    return found


def _stack(panel: Axes, shown: Mapping[str, Mapping[str, float]], names: list[str]) -> None:
    places = range(len(shown))
    left = np.zeros(len(shown))
    for number, part in enumerate(names):
        widths = np.array([found.get(part, 0.0) for found in shown.values()])
        colour = _COLOURS[number]
        panel.barh(
            places,
            widths,
            left=left,
            height=0.78,
            color=colour,
            hatch=_HATCHES[number],
            edgecolor="white",
            linewidth=0.6,
        )
        for place, width, start in zip(places, widths, left, strict=True):
            if width >= LABELLED:
                ink = "white" if np.dot(to_rgb(colour), (0.3, 0.59, 0.11)) < 0.45 else "black"
                box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
                panel.text(
                    start + width / 2, place, f"{width:.0%}", ha="center", va="center", color=ink, fontsize=8, bbox=box
                )
        left = left + widths
    panel.set_yticks(places, [name(label) for label in shown])
    panel.set_xlim(0, 1.0005)
    panel.set_ylim(len(shown) - 0.5, -0.5)
    panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.grid(axis="y", visible=False)
    panel.tick_params(labelbottom=True)


def hits(comparison: Comparison) -> Figure:
    """Cache hit as engines report it and as the router believed, joined by a line, a panel per load."""
    loads, labels = drawn_loads(comparison), _labels(comparison, lambda cell: mean(cell, HIT) is not None)
    figure, axes = panels(len(loads), height=0.25 * len(labels) + 0.85)
    for panel, time_scale in zip(axes, loads, strict=True):
        for place, label in enumerate(labels):
            for cell in comparison.loads[time_scale]:
                if cell.label == label:
                    _dumbbell(panel, place, mean(cell, HIT), mean(cell, HIT_ESTIMATED))
        panel.set_yticks(range(len(labels)), [name(label) for label in labels])
        panel.set_ylim(len(labels) - 0.5, -0.5)
        panel.xaxis.set_major_formatter(PercentFormatter(100, decimals=0))
        panel.set_title(load_title(time_scale))
        panel.tick_params(labelbottom=True)
    real = Line2D([], [], color=BLUE, marker="o", linestyle="", label="reported by the engines")
    believed = Line2D(
        [], [], color=VERMILLION, marker="D", markerfacecolor="none", linestyle="", label="believed by the router"
    )
    figure.legend(handles=[real, believed], loc="outside upper left", ncols=2, fontsize=8.5)
    return figure


def _dumbbell(panel: Axes, place: int, real: float | None, believed: float | None) -> None:
    if real is not None and believed is not None:
        panel.plot([real, believed], [place, place], color="#999999", linewidth=1.2, zorder=2)
    if real is not None:
        panel.plot([real], [place], color=BLUE, marker="o", markersize=6, zorder=3)
    if believed is not None:
        panel.plot([believed], [place], color=VERMILLION, marker="D", markerfacecolor="none", markersize=7, zorder=4)
