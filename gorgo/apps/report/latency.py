"""Plots of curves: means and shares of requests against the load, and the tail of TTFT per load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from gorgo.apps.report.runs import Comparison
from gorgo.apps.report.series import PlotPoint, PlotSeries
from gorgo.apps.report.style import (
    BROAD,
    Layout,
    LineStyle,
    add_legend,
    line_styles,
    panels,
    set_load_ticks,
    set_log_ticks,
)

#: Panels and curves that are readable in one figure; tables have the rest.
MAX_PANELS = 4
MAX_CURVES = 16
LOAD_AXIS = "load relative to the trace's own"


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


def drawn_styles(comparison: Comparison, series: PlotSeries) -> dict[str, LineStyle]:
    """Return the styles of the drawn policies that have a point; a policy has the same one in all plots."""
    references = [cell.label for cell in comparison.cells if cell.is_reference]
    styles = line_styles(drawn_labels(comparison), references)
    return {label: style for label, style in styles.items() if label in series.policies}


def points_of(series: PlotSeries, panel: str, policy: str) -> list[PlotPoint]:
    """Return the points of one curve."""
    return [point for point in series.points if (point.panel, point.policy) == (panel, policy)]


def load_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw a panel per measure against the load, with bars from the lowest to the highest run."""
    figure, axes = panels(len(series.panels), layout, height=3.6)
    styles = drawn_styles(comparison, series)
    for panel, title in zip(axes, series.panels, strict=True):
        _draw_load_curves(panel, series, title, styles)
        set_log_ticks(panel, "y")
        panel.set_title(f"{title} (log scale)")
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def slo_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw a panel per SLO: the share of requests within it against the load."""
    figure, axes = panels(len(series.panels), layout, height=3.2, sharey=True)
    styles = drawn_styles(comparison, series)
    for panel, title in zip(axes, series.panels, strict=True):
        _draw_load_curves(panel, series, title, styles)
        panel.set_ylim(0, 1.02)
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panel.set_title(f"{title}, share of requests")
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def _draw_load_curves(panel: Axes, series: PlotSeries, title: str, styles: dict[str, LineStyle]) -> None:
    for label, style in styles.items():
        points = points_of(series, title, label)
        if points:
            _draw_with_bars(panel, points, style)
    panel.set_xlabel(LOAD_AXIS)
    set_load_ticks(panel, [float(point.x) for point in series.points])
    panel.tick_params(labelbottom=True)


def _draw_with_bars(panel: Axes, points: Sequence[PlotPoint], style: LineStyle) -> None:
    below = [point.value - (point.value if point.low is None else point.low) for point in points]
    above = [(point.value if point.high is None else point.high) - point.value for point in points]
    panel.errorbar(
        [float(point.x) for point in points], [point.value for point in points], yerr=np.maximum([below, above], 0.0),
        color=style.colour, linestyle=style.dashes, marker=style.marker, markersize=5, elinewidth=0.8, capsize=2,
        zorder=2 if style.is_reference else 3,
    )  # fmt: skip


def tail_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw the fraction of requests slower than a TTFT, a panel per load; both axes are logarithmic."""
    figure, axes = panels(len(series.panels), layout, sharey=True)
    styles = drawn_styles(comparison, series)
    fewest = min(point.value for point in series.points)
    for panel, load in zip(axes, series.panels, strict=True):
        panel.axhline(0.05, color="#aaaaaa", linewidth=0.8)
        for label, style in styles.items():
            _draw_tail(panel, points_of(series, load, label), style)
        panel.set_title(f"load {load}")
        panel.set_xlabel("TTFT, ms (log scale)")
        panel.set_yscale("log")
        panel.set_ylim(min(fewest, 0.05) * 0.9, 1.1)
        panel.yaxis.set_major_locator(FixedLocator([1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001]))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
        set_log_ticks(panel, "x")
        panel.tick_params(labelbottom=True)
    figure.supylabel("requests slower than this (log scale)", fontsize=9)
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def _draw_tail(panel: Axes, points: Sequence[PlotPoint], style: LineStyle) -> None:
    positive = [float(point.x) for point in points if float(point.x) > 0]
    if positive:  # a logarithmic axis has no 0
        x = np.maximum([float(point.x) for point in points], min(positive))
        y = [point.value for point in points]
        panel.plot(x, y, color=style.colour, linestyle=style.dashes, zorder=2 if style.is_reference else 3)
