"""The plots: their points, which are the rows of a plot's CSV file, and how they are drawn.

A quantile of several runs is the mean of the runs' quantiles, as in the tables, so that a figure has one value. A plot
of a comparison has a panel per name in its points and a curve per policy, which has the same style in all plots.
`style` has the appearance.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gorgo.lab.report import style
from gorgo.lab.report.runs import Cell, Comparison, ReportGeneration
from gorgo.lab.report.style import BROAD, Layout, LineStyle
from gorgo.lab.simulate.compare import Figure as RowFigure
from gorgo.lab.simulate.compare import Ratio, e2e_s_p95, ratio_of_units, ttft_ms_p95
from gorgo.policies.registry import BASELINES

#: What ratios and the plot against load are of.
RATIO_MEASURES = {"p95 TTFT, ms": ttft_ms_p95, "p95 E2E, s": e2e_s_p95}
#: Weights that get a panel; a policy has two or three that are tuned.
MAX_WEIGHTS = 8
#: Fractions of requests of the tail plot: dense on a logarithmic axis.
TAIL = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)
#: Ticks of the fraction of requests that are slower.
FRACTIONS = (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
#: Of the distance of two loads that the ratios of one load take.
GROUP_WIDTH = 0.76
#: Factor beyond the ratios at which bars are cut: an interval of two runs may span three decades.
RATIO_MARGIN = 1.6
LOAD_AXIS = "load relative to the trace's own"


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """One point of a plot; `low` and `high` are the ends of its bar, `to` is the baseline of a ratio."""

    panel: str
    policy: str
    x: float
    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1
    to: str = ""


#: A figure, and of each panel its title and the points of each policy with its style.
Drawing = tuple[Figure, list[tuple[Axes, str, list[tuple[LineStyle, list[PlotPoint]]]]]]
#: Generations with a value and whether it was accepted, and those with an effective value.
Tried = Sequence[tuple[int, float, bool]]
Steps = Sequence[tuple[int, float]]


def csv_text(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return CSV, numbers with six significant digits; an unknown value is an empty cell."""
    text = io.StringIO()
    cells = ([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
    csv.writer(text, lineterminator="\n").writerows([header, *cells])
    return style.printable_text(text.getvalue())


def load_points(comparison: Comparison) -> list[PlotPoint]:
    """Return means over runs by load, with the lowest and the highest run; none of a single load."""
    points = []
    for title, figure in RATIO_MEASURES.items() if len(comparison.loads) > 1 else ():
        for cell in comparison.cells:
            values = [value for row in cell.rows.values() if (value := figure(row)) is not None]
            if mean := figure(cell.mean):
                points.append(PlotPoint(title, cell.label, cell.load, mean, min(values), max(values), len(values)))
    return points


def ratio_points(comparison: Comparison) -> list[PlotPoint]:
    """Return ratios to the best of the paper's baselines at each load, with their 95 % intervals."""
    points = []
    for title, figure in RATIO_MEASURES.items():
        for cells in comparison.loads.values():
            baselines = [cell for cell in cells if cell.mean.policy in BASELINES and figure(cell.mean) is not None]
            base = min(baselines, key=lambda cell: figure(cell.mean) or 0.0, default=None)
            for cell in cells if base is not None else ():
                if base is not None and cell is not base and (one := ratio(cell, base, figure)) is not None:
                    interval = one.value, one.low, one.high, one.n, base.label
                    points.append(PlotPoint(ratio_title(title), cell.label, cell.load, *interval))
    return points


def ratio_title(title: str) -> str:
    return f"{title.partition(',')[0]} / best baseline"


def ratio(cell: Cell, to: Cell, figure: RowFigure) -> Ratio | None:
    """Return the ratio of paired runs; None without a pair in which the figure is known and positive."""
    pairs = [(pair[-1], row, to.rows[pair]) for pair, row in cell.rows.items() if pair in to.rows]
    return ratio_of_units((window, figure(row), figure(other)) for window, row, other in pairs)


def tail_points(comparison: Comparison) -> list[PlotPoint]:
    """Return the TTFT that a fraction of requests exceeds, down to one request of a run."""
    points = []
    for cell in comparison.cells:
        if samples := [one for one in cell.ttft_ms if len(one)]:
            fractions = [one for one in TAIL if one >= 1 / min(map(len, samples))]
            values = np.mean([np.quantile(one, [1 - fraction for fraction in fractions]) for one in samples], axis=0)
            points += [
                PlotPoint(f"{cell.load:.3g}", cell.label, float(value), fraction, runs=len(samples))
                for fraction, value in zip(fractions, values, strict=True)
            ]
    return points


def load_plot(comparison: Comparison, points: Sequence[PlotPoint], layout: Layout = BROAD) -> Figure:
    """Draw a panel per measure against the load, with bars from the lowest to the highest run."""
    figure, drawn = _figure(comparison, points, layout, LOAD_AXIS, height=3.6)
    for panel, title, curves in drawn:
        for line, curve in curves:
            x = [point.x for point in curve]
            _draw_bars(panel, x, curve, line, linestyle=line.dashes, elinewidth=0.8, capsize=2)
        style.set_load_ticks(panel, [point.x for point in points])
        style.set_log_ticks(panel, "y")
        panel.set_title(f"{title} (log scale)")
    return figure


def ratio_plot(comparison: Comparison, points: Sequence[PlotPoint], layout: Layout = BROAD) -> Figure:
    """Draw each policy at its own place within a load, with thin lines between loads; a bar at 1 is undecided."""
    figure, drawn = _figure(comparison, points, layout, LOAD_AXIS, height=3.4, sharey=True)
    places = {load: index for index, load in enumerate(sorted({point.x for point in points}))}
    for panel, title, curves in drawn:
        panel.axhline(1, color="#555555", linewidth=1)
        for number, (line, curve) in enumerate(curves):
            shift = (number - (len(curves) - 1) / 2) * GROUP_WIDTH / len(curves)
            x = [places[point.x] + shift for point in curve]
            _draw_bars(panel, x, curve, line, linestyle="", elinewidth=1.2, capsize=0)
        for index in range(1, len(places)):
            panel.axvline(index - 0.5, color="#e4e4e4", linewidth=1)
        panel.set_xlim(-0.5, len(places) - 0.5)
        panel.grid(visible=False, axis="x")
        panel.set_xticks(range(len(places)), [f"{load:.3g}" for load in places])
        panel.set_title(f"{title} (log scale)")
    values = [point.value for point in points]
    figure.axes[0].set_ylim(min(0.8, *values) / RATIO_MARGIN, max(1.25, *values) * RATIO_MARGIN)
    style.set_log_ticks(figure.axes[0], "y")
    return figure


def tail_plot(comparison: Comparison, points: Sequence[PlotPoint], layout: Layout = BROAD) -> Figure:
    """Draw the fraction of requests slower than a TTFT, a panel per load; both axes are logarithmic."""
    figure, drawn = _figure(comparison, points, layout, "TTFT, ms (log scale)", sharey=True)
    for panel, load, curves in drawn:
        panel.axhline(0.05, color="#aaaaaa", linewidth=0.8)
        for line, curve in curves:
            if least := [point.x for point in curve if point.x > 0]:  # a logarithmic axis has no 0
                x, y = [max(point.x, min(least)) for point in curve], [point.value for point in curve]
                panel.plot(x, y, color=line.colour, linestyle=line.dashes, zorder=3 - line.is_reference)
        panel.set_title(f"load {load}")
        panel.set_yscale("log")
        panel.set_ylim(min(0.05, *(point.value for point in points)) * 0.9, 1.1)
        panel.yaxis.set_major_locator(FixedLocator(FRACTIONS))
        panel.yaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
        style.set_log_ticks(panel, "x")
    figure.supylabel("requests slower than this (log scale)", fontsize=9)
    return figure


def _draw_bars(panel: Axes, x: Sequence[float], points: Sequence[PlotPoint], line: LineStyle, **more: Any) -> None:
    """Draw values with their bars; `more` are further options of matplotlib."""
    below = [0.0 if point.low is None else max(0.0, point.value - point.low) for point in points]
    above = [0.0 if point.high is None else max(0.0, point.high - point.value) for point in points]
    more |= {"color": line.colour, "marker": line.marker, "markersize": 5, "zorder": 3 - line.is_reference}
    if points:
        panel.errorbar(x, [point.value for point in points], yerr=[below, above], **more)


def _figure(comparison: Comparison, points: Sequence[PlotPoint], layout: Layout, axis: str, **more: Any) -> Drawing:
    """Return a figure with an empty panel per name in the points; `more` are further options of `style.panels`."""
    titles = list(dict.fromkeys(point.panel for point in points))
    figure, axes = style.panels(len(titles), layout, **more)
    for panel in axes:
        panel.set_xlabel(axis)
        panel.tick_params(labelbottom=True)
    references = [cell.label for cell in comparison.cells if cell.is_reference]
    drawn = {point.policy for point in points}
    lines = {label: line for label, line in style.line_styles(comparison.labels, references).items() if label in drawn}
    style.add_legend(figure, [line.line(label) for label, line in lines.items()])
    curves = {title: {label: list[PlotPoint]() for label in lines} for title in titles}
    for point in points:
        curves[point.panel][point.policy].append(point)
    by_line = [[(lines[label], curve) for label, curve in curves[title].items()] for title in titles]
    return figure, list(zip(axes, titles, by_line, strict=True))


@dataclass(frozen=True, slots=True)
class PlotKind:
    """A plot of a comparison: its points, the fields of a point by column of the CSV file, and why it may have none."""

    key: str
    title: str
    columns: Mapping[str, str]
    points: Callable[[Comparison], list[PlotPoint]]
    draw: Callable[[Comparison, Sequence[PlotPoint], Layout], Figure]
    empty: str
    note: str = ""

    def csv(self, points: Sequence[PlotPoint]) -> str:
        return csv_text(self.columns, ([getattr(one, name) for name in self.columns.values()] for one in points))


_AXES = {"measure": "panel", "policy": "policy", "load": "x"}
#: In the order of the page.
PLOTS = (
    PlotKind("p95-against-load", "p95 against load",
             _AXES | {"mean": "value", "lowest": "low", "highest": "high", "runs": "runs"},
             load_points, load_plot, "there is only one load, or no run has a p95"),
    PlotKind("ratio", "Ratio to the best baseline, 95 % interval",
             _AXES | {"ratio": "value", "interval_low": "low", "interval_high": "high", "runs": "runs"}
             | {"baseline": "to"}, ratio_points, ratio_plot, "no run to compare with one of the paper's baselines",
             "Longer intervals are cut at the frame; the table has them whole."),
    PlotKind("ttft-tail", "TTFT, tail of the distribution",
             {"load": "panel", "policy": "policy", "fraction_slower": "value", "ttft_ms": "x", "runs": "runs"},
             tail_points, tail_plot, "no requests.jsonl with a TTFT was saved"),
)  # fmt: skip


def tuning_plot(generations: Sequence[ReportGeneration], layout: Layout = BROAD) -> Figure:
    """Draw a panel per weight, then sigma, then the objective, over the number of the generation."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))[:MAX_WEIGHTS]
    figure, axes = style.panels(len(weights) + 2, Layout(layout.width, 1), height=1.55)
    for panel, weight, colour in zip(axes, weights, style.COLOURS * 2, strict=False):
        tried = [(one.number, one.weights[weight], one.accepted) for one in generations if weight in one.weights]
        steps = [(number, value) for number, value, accepted in tried if accepted]
        steps += [(tried[-1][0], steps[-1][1])] if steps else []  # the accepted weights stay effective to the end
        _draw_generations(panel, style.short_name(weight), tried, steps, colour, colour)
    sigma = [(one.number, one.sigma) for one in generations if one.sigma is not None]
    _draw_generations(axes[-2], "sigma", [], sigma, style.BLACK, style.BLACK)
    tried = [(one.number, one.objective_ms, one.accepted) for one in generations if one.objective_ms is not None]
    incumbents = [
        (one.number, one.incumbent_objective_ms) for one in generations if one.incumbent_objective_ms is not None
    ]
    title = "objective: p95 TTFT of the window, ms"
    _draw_generations(axes[-1], title, tried, incumbents, style.VERMILLION, style.BLUE)
    axes[-1].set_xlabel("generation")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    accepted = Line2D([], [], color=style.GREY, marker="o", linestyle="", label="accepted")
    rejected = Line2D([], [], color=style.GREY, marker="o", markerfacecolor="none", linestyle="", label="rejected")
    incumbent = Line2D([], [], color=style.GREY, drawstyle="steps-post", label="incumbent")
    style.add_legend(figure, [accepted, rejected, incumbent])
    return figure


def _draw_generations(panel: Axes, title: str, tried: Tried, steps: Steps, colour: str, step_colour: str) -> None:
    """Draw candidates as dots, hollow if rejected, and effective values as steps."""
    for wanted, face in ((True, colour), (False, "none")):
        dots = [(number, value) for number, value, accepted in tried if accepted == wanted]
        if dots:
            panel.plot(*zip(*dots, strict=True), "o", markersize=4, color=colour, markerfacecolor=face)
    if steps:
        panel.step(*zip(*steps, strict=True), where="post", color=step_colour, linewidth=1.4)
    values = [value for _, value, _ in tried] + [value for _, value in steps]
    if values and max(values) > min(values) > 0:
        style.set_log_ticks(panel, "y")
    panel.set_title(title)
