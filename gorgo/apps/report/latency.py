"""Plots of latencies: the distribution of TTFT per load, and the tail against the load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from gorgo.apps.report.runs import REFERENCES, Cell, Comparison
from gorgo.apps.report.statistics import Measure, mean, quantile_points
from gorgo.apps.report.style import LineStyle, add_legend, line_styles, panels, set_log_ticks
from gorgo.apps.results import load_text

#: Panels and curves that are readable in one figure; tables have the rest.
MAX_PANELS = 8
MAX_CURVES = 16


def drawn_loads(comparison: Comparison) -> list[float]:
    """Return the loads that get a panel: all, or `MAX_PANELS` spread evenly with both ends."""
    loads = list(comparison.loads)
    if len(loads) <= MAX_PANELS:
        return loads
    return [loads[round(place)] for place in np.linspace(0, len(loads) - 1, MAX_PANELS)]


def drawn_labels(comparison: Comparison) -> list[str]:
    """Return the policies that get a curve; references are never cut."""
    references = list(dict.fromkeys(cell.label for cell in comparison.cells if cell.is_reference))
    policies = [label for label in comparison.labels if label not in references]
    return [*policies[: MAX_CURVES - len(references)], *references]


def ttft_distribution(comparison: Comparison) -> Figure:
    """Draw the fraction of requests within a TTFT, a panel per load, on a logarithmic axis."""
    loads = drawn_loads(comparison)
    figure, axes = panels(len(loads), sharey=True)
    styles = _styles(comparison)
    drawn = set()
    for panel, time_scale in zip(axes, loads, strict=True):
        panel.axhline(0.95, color="#aaaaaa", linewidth=0.8)
        for cell in comparison.loads[time_scale]:
            if cell.label in styles and len(cell.ttft_ms):
                _draw_quantiles(panel, cell, styles[cell.label])
                drawn.add(cell.label)
        panel.set_title(load_text(time_scale))
        panel.set_xlabel("TTFT, ms (log scale)")
        panel.set_ylim(0, 1.005)
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panel.set_yticks([0, 0.25, 0.5, 0.75, 0.95])
        set_log_ticks(panel, "x")
        panel.tick_params(labelbottom=True)
    figure.supylabel("fraction of requests", fontsize=9)
    add_legend(figure, [style.line(label) for label, style in styles.items() if label in drawn])
    return figure


def _styles(comparison: Comparison) -> dict[str, LineStyle]:
    references = [cell.label for cell in comparison.cells if cell.is_reference]
    return line_styles(drawn_labels(comparison), references)


def _draw_quantiles(panel: Axes, cell: Cell, style: LineStyle) -> None:
    points, levels = quantile_points(cell.ttft_ms)
    least = points[points > 0].min(initial=np.inf)  # a logarithmic axis has no 0
    panel.plot(
        np.maximum(points, least),
        levels,
        color=style.colour,
        linestyle=style.dashes,
        zorder=2 if cell.is_reference else 3,
    )


def against_load(comparison: Comparison, measures: Sequence[Measure]) -> Figure:
    """Draw a panel per measure: mean over seeds against the relative load, bars from the lowest to the highest seed."""
    figure, axes = panels(len(measures), height=3.6)
    styles = _styles(comparison)
    for panel, measure in zip(axes, measures, strict=True):
        for label, style in styles.items():
            _draw_load_curve(panel, comparison, label, measure, style)
        panel.set_title(measure.title)
        panel.set_xlabel("load relative to the trace's own")
        panel.set_xticks([1 / time_scale for time_scale in comparison.loads])
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        set_log_ticks(panel, "y")
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def _draw_load_curve(panel: Axes, comparison: Comparison, label: str, measure: Measure, style: LineStyle) -> None:
    points = []
    for time_scale, cells in comparison.loads.items():
        for cell in cells:
            if cell.label == label and (value := mean(cell, measure)):
                known = [one for run in cell.runs if (one := measure.value(run.row)) is not None]
                points.append((1 / time_scale, value, value - min(known), max(known) - value))
    if points:
        x, y, below, above = zip(*points, strict=True)
        panel.errorbar(
            x, y, yerr=np.maximum([below, above], 0.0), color=style.colour, linestyle=style.dashes, marker=style.marker,
            markersize=5, elinewidth=0.8, capsize=2, zorder=2 if label in REFERENCES else 3,
        )  # fmt: skip
