"""The plots: how each is drawn, in which order they stand on the page, and what each needs or omits.

`series` has the points, `style` the appearance. A plot of a comparison has a panel per name in its series and a curve
per policy, which has the same style in all plots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from gorgo.lab.report.runs import RATIO_MEASURES, Comparison, ReportGeneration
from gorgo.lab.report.series import (
    MIN_REQUESTS,
    PlotPoint,
    PlotSeries,
    load_series,
    prompt_classes,
    prompt_series,
    ratio_series,
    region_series,
    slo_series,
    tail_series,
)
from gorgo.lab.report.style import (
    BLACK,
    BLUE,
    BROAD,
    COLOURS,
    GREY,
    VERMILLION,
    Layout,
    LineStyle,
    add_legend,
    line_styles,
    panels,
    set_load_ticks,
    set_log_ticks,
    short_name,
)

#: Panels and curves that are readable in one figure; tables have the rest.
MAX_PANELS = 4
MAX_CURVES = 16
#: Weights that get a panel; a policy has two or three that are tuned.
MAX_WEIGHTS = 8
#: Of the distance of two groups that the policies of one group take.
GROUP_WIDTH = 0.76
#: Factor beyond the ratios at which bars are cut: an interval of two runs may span three decades.
RATIO_MARGIN = 1.6
#: Characters of a group's name below its axis.
MAX_GROUP_NAME = 14
LOAD_AXIS = "load relative to the trace's own"
#: Ticks of the fraction of requests that are slower.
FRACTIONS = (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)

#: The points of each policy, with its style.
Curves = Sequence[tuple[LineStyle, Sequence[PlotPoint]]]
DrawPlot = Callable[[Comparison, PlotSeries, Layout], Figure]
#: Draws the curves of the panel of a title.
DrawPanel = Callable[[Axes, str, Curves], None]


@dataclass(frozen=True, slots=True)
class PlannedPlot:
    """A plot before it is drawn; without `draw` the note has the reason."""

    key: str
    title: str
    note: str
    draw: Callable[[Layout], Figure] | None
    series: PlotSeries | None = None


def comparison_plots(comparison: Comparison, slos_ms: Sequence[float]) -> list[PlannedPlot]:
    """Return the plots of a comparison in the order of the page."""
    loads, labels = drawn_loads(comparison), len(comparison.labels)
    tails = tail_series(comparison, loads)
    unsaved = "" if tails.points else "no requests.jsonl with a TTFT was saved"
    single = "" if len(comparison.loads) > 1 else "there is only one load"
    curves = f"{MAX_CURVES} of {labels} policies are drawn." if labels > MAX_CURVES else ""
    cut = f"{len(loads)} of {len(comparison.loads)} loads are drawn." if len(loads) < len(comparison.loads) else ""
    small = f"Groups of fewer than {MIN_REQUESTS} requests of a run are left out."
    no_group = f"no group has {MIN_REQUESTS} requests of a run"

    def plan(
        key: str, title: str, series: PlotSeries, draw: DrawPlot, reason: str, empty: str, *notes: str
    ) -> PlannedPlot:
        title, reason = f"{title}, {comparison.source}", reason or ("" if series.points else empty)
        if reason:
            return PlannedPlot(key, title, f"Left out: {reason}.", None)
        note = " ".join(filter(None, notes))
        return PlannedPlot(key, title, note, lambda layout: draw(comparison, series, layout), series)

    return [
        plan("p95-against-load", "p95 against load", load_series(comparison, RATIO_MEASURES), load_plot, single,
             "no run has a p95", curves),
        plan("ratio", "Ratio to the best baseline, 95 % interval", ratio_series(comparison, RATIO_MEASURES), ratio_plot,
             "", "no run to compare with one of the paper's baselines",
             "Longer intervals are cut at the frame; the table has them whole.", curves),
        plan("slo-against-load", "Requests within an SLO against load", slo_series(comparison, slos_ms), slo_plot,
             unsaved or single, "", "A failed request is not within an SLO.", curves),
        plan("ttft-tail", "TTFT, tail of the distribution", tails, tail_plot, unsaved, "", cut, curves),
        plan("ttft-by-region", "TTFT by region of the replica", region_series(comparison, loads), region_plot, unsaved,
             no_group, small, cut, curves),
        plan("ttft-by-prompt-length", "TTFT by prompt length", prompt_series(comparison, loads), prompt_plot, unsaved,
             no_group, small, cut, curves),
    ]  # fmt: skip


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


def _figure(
    comparison: Comparison,
    series: PlotSeries,
    layout: Layout,
    draw: DrawPanel,
    *,
    axis: str,
    height: float = 2.9,
    sharey: bool = True,
    side: str = "",
) -> Figure:
    """Draw a panel per name in the series. Axes that are shared have their ticks set once, after all panels."""
    figure, axes = panels(len(series.panels), layout, height=height, sharey=sharey)
    references = [cell.label for cell in comparison.cells if cell.is_reference]
    styles = line_styles(drawn_labels(comparison), references)
    styles = {label: style for label, style in styles.items() if label in series.policies}
    for panel, title in zip(axes, series.panels, strict=True):
        curves = [
            (style, [point for point in series.points if (point.panel, point.policy) == (title, label)])
            for label, style in styles.items()
        ]
        draw(panel, title, curves)
        panel.set_xlabel(axis)
        panel.tick_params(labelbottom=True)
    if side:
        figure.supylabel(side, fontsize=9)
    add_legend(figure, [style.line(label) for label, style in styles.items()])
    return figure


def _draw_bars(
    panel: Axes, x: Sequence[float], points: Sequence[PlotPoint], style: LineStyle, **appearance: object
) -> None:
    """Draw values with their bars; `appearance` are further options of matplotlib."""
    below = [0.0 if point.low is None else max(0.0, point.value - point.low) for point in points]
    above = [0.0 if point.high is None else max(0.0, point.high - point.value) for point in points]
    values, options = [point.value for point in points], {"color": style.colour, "marker": style.marker, **appearance}
    panel.errorbar(x, values, yerr=[below, above], markersize=5, zorder=_order(style), **options)  # type: ignore[arg-type]


def _order(style: LineStyle) -> int:
    return 2 if style.is_reference else 3


def _draw_curves(panel: Axes, series: PlotSeries, curves: Curves) -> None:
    """Draw curves against the load."""
    for style, points in curves:
        if points:
            x = [float(point.x) for point in points]
            _draw_bars(panel, x, points, style, linestyle=style.dashes, elinewidth=0.8, capsize=2)
    set_load_ticks(panel, [float(point.x) for point in series.points])


def load_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw a panel per measure against the load, with bars from the lowest to the highest run."""

    def draw(panel: Axes, title: str, curves: Curves) -> None:
        _draw_curves(panel, series, curves)
        set_log_ticks(panel, "y")
        panel.set_title(f"{title} (log scale)")

    return _figure(comparison, series, layout, draw, axis=LOAD_AXIS, height=3.6, sharey=False)


def slo_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw a panel per SLO: the share of requests within it against the load."""

    def draw(panel: Axes, title: str, curves: Curves) -> None:
        _draw_curves(panel, series, curves)
        panel.set_ylim(0, 1.02)
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panel.set_title(f"{title}, share of requests")

    return _figure(comparison, series, layout, draw, axis=LOAD_AXIS, height=3.2)


def tail_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw the fraction of requests slower than a TTFT, a panel per load; both axes are logarithmic."""
    fewest = min(point.value for point in series.points)

    def draw(panel: Axes, load: str, curves: Curves) -> None:
        panel.axhline(0.05, color="#aaaaaa", linewidth=0.8)
        for style, points in curves:
            x, least = [float(point.x) for point in points], [float(point.x) for point in points if float(point.x) > 0]
            if least:  # a logarithmic axis has no 0
                y = [point.value for point in points]
                panel.plot(
                    np.maximum(x, min(least)), y, color=style.colour, linestyle=style.dashes, zorder=_order(style)
                )
        panel.set_title(f"load {load}")
        panel.set_yscale("log")
        panel.set_ylim(min(fewest, 0.05) * 0.9, 1.1)
        panel.yaxis.set_major_locator(FixedLocator(FRACTIONS))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
        set_log_ticks(panel, "x")

    side = "requests slower than this (log scale)"
    return _figure(comparison, series, layout, draw, axis="TTFT, ms (log scale)", side=side)


def ratio_plot(comparison: Comparison, series: PlotSeries, layout: Layout = BROAD) -> Figure:
    """Draw ratios to the best baseline of each load with 95 % intervals; a bar that reaches 1 is undecided."""
    loads = sorted({float(point.x) for point in series.points})

    def draw(panel: Axes, title: str, curves: Curves) -> None:
        panel.axhline(1, color="#555555", linewidth=1)
        _draw_groups(panel, loads, [f"{load:.3g}" for load in loads], curves)
        panel.set_title(f"{title} (log scale)")

    figure = _figure(comparison, series, layout, draw, axis=LOAD_AXIS, height=3.4)
    values = [point.value for point in series.points]
    figure.axes[0].set_ylim(min(0.8, *values) / RATIO_MARGIN, max(1.25, *values) * RATIO_MARGIN)
    set_log_ticks(figure.axes[0], "y")
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

    def draw(panel: Axes, load: str, curves: Curves) -> None:
        _draw_groups(panel, groups, [short_name(name, MAX_GROUP_NAME) for name in groups], curves)
        panel.set_title(f"load {load}")

    side = "p50 to p95 TTFT, ms (log scale)"
    figure = _figure(comparison, series, layout, draw, axis=axis, height=3.1, side=side)
    set_log_ticks(figure.axes[0], "y")
    return figure


def _draw_groups(panel: Axes, groups: Sequence[float] | Sequence[str], names: Sequence[str], curves: Curves) -> None:
    """Draw each policy at its own place within a group, with thin lines between groups."""
    places = {group: place for place, group in enumerate(groups)}
    step = GROUP_WIDTH / max(1, len(curves))
    for number, (style, points) in enumerate(curves):
        shift = (number - (len(curves) - 1) / 2) * step
        if points:
            x = [places[point.x] + shift for point in points]
            _draw_bars(panel, x, points, style, linestyle="", elinewidth=1.2, capsize=0)
    for place in range(1, len(groups)):
        panel.axvline(place - 0.5, color="#e4e4e4", linewidth=1)
    panel.set_xlim(-0.5, len(groups) - 0.5)
    panel.grid(visible=False, axis="x")
    panel.set_xticks(range(len(groups)), names)


def tuning_plot(generations: Sequence[ReportGeneration], layout: Layout = BROAD) -> Figure:
    """Draw a panel per weight, then sigma, then the objective, over the number of the generation."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))[:MAX_WEIGHTS]
    figure, axes = panels(len(weights) + 2, Layout(layout.width, 1), height=1.55)
    for panel, weight, colour in zip(axes, weights, COLOURS * 2, strict=False):
        points = [(one.number, one.weights[weight], one.accepted) for one in generations if weight in one.weights]
        steps = [(number, value) for number, value, accepted in points if accepted]
        # The accepted weights stay effective to the end.
        steps += [(points[-1][0], steps[-1][1])] if steps else []
        _draw_generations(panel, short_name(weight), points, steps, colour, colour)
    sigma = [(one.number, one.sigma) for one in generations if one.sigma is not None]
    _draw_generations(axes[-2], "sigma", [], sigma, BLACK, BLACK)
    tried = [(one.number, one.objective_ms, one.accepted) for one in generations if one.objective_ms is not None]
    known = [(one.number, one.incumbent_objective_ms) for one in generations if one.incumbent_objective_ms is not None]
    _draw_generations(axes[-1], "objective: p95 TTFT of the window, ms", tried, known, VERMILLION, BLUE)
    axes[-1].set_xlabel("generation")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    accepted = Line2D([], [], color=GREY, marker="o", linestyle="", label="accepted")
    rejected = Line2D([], [], color=GREY, marker="o", markerfacecolor="none", linestyle="", label="rejected")
    add_legend(figure, [accepted, rejected, Line2D([], [], color=GREY, drawstyle="steps-post", label="incumbent")])
    return figure


def _draw_generations(
    panel: Axes,
    title: str,
    tried: Sequence[tuple[int, float, bool]],
    steps: Sequence[tuple[int, float]],
    colour: str,
    step_colour: str,
) -> None:
    """Draw candidates as dots, hollow if rejected, and effective values as steps."""
    for wanted, face in ((True, colour), (False, "none")):
        dots = [(number, value) for number, value, accepted in tried if accepted == wanted]
        if dots:
            panel.plot(*zip(*dots, strict=True), "o", markersize=4, color=colour, markerfacecolor=face)
    if steps:
        panel.step(*zip(*steps, strict=True), where="post", color=step_colour, linewidth=1.4)
    values = [value for _, value, _ in tried] + [value for _, value in steps]
    if values and max(values) > min(values) > 0:
        set_log_ticks(panel, "y")
    panel.set_title(title)
