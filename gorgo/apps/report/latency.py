"""Plots of latencies: distributions per load, and the tail against the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log10

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from gorgo.apps.report.runs import Cell, Comparison, Floats
from gorgo.apps.report.statistics import Measure, mean, quantile_points
from gorgo.apps.report.style import GREY, Look, legend, looks, name, panels

#: Panels and curves that an eye can follow; tables have the rest.
MAX_PANELS = 8
MAX_CURVES = 16
#: Below this a logarithmic axis has too few round numbers of its own.
NARROW_DECADES = 0.8
#: Between two direct labels, as a share of the panel's height.
LABEL_GAP = 0.062


def drawn_loads(comparison: Comparison) -> list[float]:
    """The loads that get a panel: all, or so many spread evenly with both ends."""
    loads = list(comparison.loads)
    if len(loads) <= MAX_PANELS:
        return loads
    return [loads[round(place)] for place in np.linspace(0, len(loads) - 1, MAX_PANELS)]


def drawn_labels(comparison: Comparison) -> list[str]:
    """The policies that get a curve, yardsticks before the cut."""
    yardsticks = {cell.label for cell in comparison.cells if cell.is_yardstick}
    policies = [label for label in comparison.labels if label not in yardsticks]
    return [*policies[: MAX_CURVES - len(yardsticks)], *(label for label in comparison.labels if label in yardsticks)]


def distributions(comparison: Comparison, values: Callable[[Cell], Floats], axis: str) -> Figure:
    """Share of requests that needed at most so long, a panel per load, on a logarithmic axis."""
    loads, labels = drawn_loads(comparison), drawn_labels(comparison)
    figure, axes = panels(len(loads))
    look = looks(labels)
    drawn = set()
    for panel, time_scale in zip(axes, loads, strict=True):
        panel.set_xscale("log")
        panel.axhline(0.95, color="#aaaaaa", linewidth=0.8)
        for cell in comparison.loads[time_scale]:
            if cell.label in look and len(found := values(cell)):
                _curve(panel, found, look[cell.label], front=not cell.is_yardstick)
                drawn.add(cell.label)
        _dress_distribution(panel, time_scale, axis)
    figure.supylabel("share of requests", fontsize=9)
    legend(figure, {label: look[label] for label in labels if label in drawn})
    return figure


def _curve(panel: Axes, values: Floats, look: Look, *, front: bool) -> None:
    points, levels = quantile_points(values)
    least = points[points > 0].min(initial=np.inf)
    panel.plot(
        np.maximum(points, least), levels, color=look.colour, linestyle=look.dashes, linewidth=look.width,
        zorder=3 if front else 2,
    )  # fmt: skip


def _dress_distribution(panel: Axes, time_scale: float, axis: str) -> None:
    panel.set_title(load_title(time_scale))
    panel.set_xlabel(axis)
    panel.set_ylim(0, 1.005)
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.set_yticks([0, 0.25, 0.5, 0.75, 0.95])
    plain_numbers(panel, "x")
    panel.tick_params(labelbottom=True)


def load_title(time_scale: float) -> str:
    """Both ways of saying it: the option's and the load's."""
    return f"time_scale {time_scale:g} (load {1 / time_scale:.3g})"


def plain_numbers(panel: Axes, which: str) -> None:
    """Ticks of a logarithmic axis as 200, 500, 1,000 instead of powers."""
    axis = panel.xaxis if which == "x" else panel.yaxis
    low, high = axis.get_view_interval()
    decades = log10(high / low) if low > 0 else 1.0
    if decades < NARROW_DECADES:
        axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    else:
        steps = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.6 else (1.0, 2.0, 5.0)
        axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:.3g}"))
    axis.set_minor_locator(NullLocator())


def against_load(comparison: Comparison, measures: Sequence[Measure]) -> Figure:
    """One panel per measure: mean over seeds against the relative load, bars from the lowest to the highest seed."""
    labels = drawn_labels(comparison)
    figure, axes = panels(len(measures), height=4.2, sharey=False)
    for panel, measure in zip(axes, measures, strict=True):
        panel.set_yscale("log")
        ends = [
            (label, end, look.colour)
            for label, look in looks(labels).items()
            if (end := _load_curve(panel, comparison, label, measure, look)) is not None
        ]
        panel.set_title(f"{measure.name}, {measure.unit}")
        panel.set_xlabel("load relative to the trace's own (1 / time_scale)")
        panel.set_xticks([1 / time_scale for time_scale in comparison.loads])
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        plain_numbers(panel, "y")
        _label_ends(panel, ends, max(1 / time_scale for time_scale in comparison.loads))
    return figure


def _load_curve(panel: Axes, comparison: Comparison, label: str, measure: Measure, look: Look) -> float | None:
    """Draws one policy; returns the height of its right end."""
    points = []
    for time_scale, cells in comparison.loads.items():
        for cell in cells:
            if cell.label == label and (value := mean(cell, measure)):
                known = [one for run in cell.runs if (one := measure.value(run.row)) is not None]
                points.append((1 / time_scale, value, value - min(known), max(known) - value))
    if not points:
        return None
    x, y, below, above = zip(*points, strict=True)
    bars = np.maximum([below, above], 0.0) if any(below) or any(above) else None
    panel.errorbar(
        x, y, yerr=bars, color=look.colour, linestyle=look.dashes, linewidth=look.width, marker=look.marker,
        markersize=5, elinewidth=0.8, capsize=2, zorder=2 if look.colour == GREY else 3,
    )  # fmt: skip
    return float(y[-1])


def _label_ends(panel: Axes, ends: Sequence[tuple[str, float, str]], right: float) -> None:
    """Names at the right ends of their curves, pushed apart where they would overlap."""
    if not ends:
        return
    low, high = (log10(limit) for limit in panel.get_ylim())
    ranked = sorted(ends, key=lambda end: end[1])
    heights = apart([(log10(value) - low) / (high - low) for _, value, _ in ranked], LABEL_GAP)
    for (label, value, colour), height in zip(ranked, heights, strict=True):
        panel.annotate(
            name(label), xy=(right, value), xycoords="data", xytext=(1.03, height), textcoords="axes fraction",
            color=colour, fontsize=8, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
        )  # fmt: skip


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as needed so that neighbours are at least `gap` apart, kept within 0 to 1.

    >>> apart([0.5, 0.5, 0.9], 0.1)
    [0.45, 0.55, 0.9]
    """
    groups = [[height, 1] for height in heights]  # a block's middle and how many labels it has
    while any(_touch(a, b, gap) for a, b in pairwise(groups)):
        for place in range(len(groups) - 1):
            a, b = groups[place], groups[place + 1]
            if _touch(a, b, gap):
                count = a[1] + b[1]
                groups[place : place + 2] = [[(a[0] * a[1] + b[0] * b[1]) / count, count]]
                break
    placed = [middle + (place - (count - 1) / 2) * gap for middle, count in groups for place in range(int(count))]
    last = len(placed) - 1  # bounds that are a gap apart themselves keep the gaps
    return [round(min(max(height, n * gap), 1 - (last - n) * gap), 6) for n, height in enumerate(placed)]


def _touch(a: Sequence[float], b: Sequence[float], gap: float) -> bool:
    return b[0] - a[0] < gap * (a[1] + b[1]) / 2 - 1e-9
