"""Plots of groups side by side: ratios with their intervals per load, TTFT by region and by prompt length."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gorgo.apps.report.latency import LOAD_AXIS, drawn_styles, points_of
from gorgo.apps.report.runs import Comparison
from gorgo.apps.report.series import PlotPoint, PlotSeries, prompt_classes
from gorgo.apps.report.style import BROAD, Layout, LineStyle, add_legend, panels, set_log_ticks, short_name

#: Of the distance of two groups that the policies of one group take.
GROUP_WIDTH = 0.76
#: Factor beyond the ratios at which bars are cut: an interval of two runs may span three decades.
RATIO_MARGIN = 1.6
#: Characters of a group's name below its axis.
MAX_GROUP_NAME = 14


def ratio_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw ratios to the best baseline of each load with 95 % intervals; a bar that reaches 1 is undecided."""
    loads = sorted({float(point.x) for point in series.points})
    figure, axes = panels(len(series.panels), layout, height=3.4, sharey=True)
    styles = drawn_styles(comparison, series)
    for panel, title in zip(axes, series.panels, strict=True):
        panel.axhline(1, color="#555555", linewidth=1)
        _draw_groups(panel, series, title, loads, styles)
        panel.set_xticks(range(len(loads)), [f"{load:.3g}" for load in loads])
        panel.set_xlabel(LOAD_AXIS)
        panel.tick_params(labelbottom=True)
        panel.set_title(f"{title} (log scale)")
    values = [point.value for point in series.points]
    axes[0].set_ylim(min(0.8, *values) / RATIO_MARGIN, max(1.25, *values) * RATIO_MARGIN)
    set_log_ticks(axes[0], "y")
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def region_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw TTFT by the region of the replica, a panel per load."""
    return _group_plot(comparison, series, sorted({str(point.x) for point in series.points}), "region", layout)


def prompt_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw TTFT by class of prompt length, a panel per load."""
    found = {point.x for point in series.points}
    classes = [name for name in prompt_classes() if name in found]
    return _group_plot(comparison, series, classes, "prompt tokens", layout)


def _group_plot(comparison: Comparison, series: PlotSeries, groups: Sequence[str], axis: str, layout: Layout) -> Figure:
    """Draw p95 of TTFT as markers with bars down to p50, policies side by side in each group."""
    figure, axes = panels(len(series.panels), layout, height=3.1, sharey=True)
    styles = drawn_styles(comparison, series)
    for panel, load in zip(axes, series.panels, strict=True):
        _draw_groups(panel, series, load, groups, styles)
        panel.set_xticks(range(len(groups)), [short_name(name, MAX_GROUP_NAME) for name in groups])
        panel.set_xlabel(axis)
        panel.set_title(f"load {load}")
        panel.tick_params(labelbottom=True)
    set_log_ticks(axes[0], "y")
    figure.supylabel("p50 to p95 TTFT, ms (log scale)", fontsize=9)
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def _draw_groups(
    panel: Axes,
    series: PlotSeries,
    title: str,
    groups: Sequence[float] | Sequence[str],
    styles: dict[str, LineStyle],
) -> None:
    """Draw each policy at its own place within a group, with thin lines between groups."""
    places = {group: place for place, group in enumerate(groups)}
    step = GROUP_WIDTH / max(1, len(styles))
    for number, (label, style) in enumerate(styles.items()):
        shift = (number - (len(styles) - 1) / 2) * step
        points = [point for point in points_of(series, title, label) if point.x in places]
        if points:
            _draw_bars(panel, [places[point.x] + shift for point in points], points, style)
    for place in range(1, len(groups)):
        panel.axvline(place - 0.5, color="#e4e4e4", linewidth=1)
    panel.set_xlim(-0.5, len(groups) - 0.5)
    panel.grid(visible=False, axis="x")


def _draw_bars(panel: Axes, x: Sequence[float], points: Sequence[PlotPoint], style: LineStyle) -> None:
    values = [point.value for point in points]
    below = [max(0.0, point.value - point.low) if point.low is not None else 0.0 for point in points]
    above = [max(0.0, point.high - point.value) if point.high is not None else 0.0 for point in points]
    panel.errorbar(
        x, values, yerr=[below, above], color=style.colour, linestyle="", marker=style.marker, markersize=5,
        elinewidth=1.2, capsize=0, zorder=2 if style.is_reference else 3,
    )  # fmt: skip
