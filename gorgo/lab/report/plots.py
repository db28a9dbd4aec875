"""The plots: their data, how each is drawn, in which order they stand on the page, and what each needs or omits.

The points that are drawn are the rows of a plot's CSV file. A quantile of several runs is the mean of the runs'
quantiles, as in the tables, so that a figure has one value. `style` has the appearance. A plot of a comparison has a
panel per name in its series and a curve per policy, which has the same style in all plots.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from gorgo.core.numeric import Floats
from gorgo.lab.report.runs import (
    RATIO_MEASURES,
    Cell,
    Comparison,
    Measure,
    ReportGeneration,
    Requests,
    best_baseline,
    mean_quantiles,
    ratio,
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
from gorgo.lab.results import load_text

#: Upper bounds of the classes of prompt length, tokens; the last class has no bound.
PROMPT_CLASSES = (512, 2_048, 8_192, 32_768)
#: Fewest requests of a class in a run: the p95 of fewer is the slowest request.
MIN_REQUESTS = 20
#: Fractions of requests of the tail plot: dense on a logarithmic axis.
TAIL = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001)


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """One point of a plot; `low` and `high` are the ends of its bar, `to` is the baseline of a ratio."""

    panel: str
    policy: str
    x: float | str
    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1
    to: str = ""


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """The points of one plot, and the names of the fields of a point as columns of a CSV file."""

    columns: dict[str, str]
    points: tuple[PlotPoint, ...]

    @property
    def panels(self) -> list[str]:
        return list(dict.fromkeys(point.panel for point in self.points))

    @property
    def policies(self) -> set[str]:
        return {point.policy for point in self.points}

    def csv(self) -> str:
        """Return the points as CSV, numbers with six significant digits."""
        rows = ([getattr(point, name) for name in self.columns] for point in self.points)
        return csv_text([*self.columns.values()], rows)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return CSV; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def load_number(time_scale: float) -> str:
    """Return the load as in `load_text`, without the word."""
    return load_text(time_scale).removeprefix("load ")


def load_series(comparison: Comparison, measures: Sequence[Measure]) -> PlotSeries:
    """Return means over runs by load, with the lowest and the highest run."""
    points = [point for one in measures for point in _spreads(comparison, one.title, one.known) if point.value]
    return PlotSeries(_columns("measure", "load", "mean", "lowest", "highest"), tuple(points))


def slo_series(comparison: Comparison, slos_ms: Sequence[float]) -> PlotSeries:
    """Return the share of all requests with a first token within each SLO; a failed request is not within it."""

    def within(slo_ms: float) -> Callable[[Cell], list[float]]:
        return lambda cell: [np.count_nonzero(one.ttft_ms <= slo_ms) / one.count for one in cell.requests if one.count]

    titles = {f"TTFT within {slo_ms:,g} ms": slo_ms for slo_ms in slos_ms}
    points = [point for title, slo_ms in titles.items() for point in _spreads(comparison, title, within(slo_ms))]
    return PlotSeries(_columns("slo", "load", "share", "lowest", "highest"), tuple(points))


def _spreads(comparison: Comparison, title: str, values: Callable[[Cell], list[float]]) -> Iterator[PlotPoint]:
    """Return the mean, the lowest and the highest run of each policy and load."""
    for time_scale, cell in comparison.placed:
        if measured := values(cell):
            mean = sum(measured) / len(measured)
            yield PlotPoint(title, cell.label, 1 / time_scale, mean, min(measured), max(measured), len(measured))


def ratio_series(comparison: Comparison, measures: Sequence[Measure]) -> PlotSeries:
    """Return ratios to the best baseline of each load with their 95 % intervals."""
    points = []
    for measure in measures:
        title = f"{measure.title.partition(',')[0]} / best baseline"
        for time_scale, cells in comparison.loads.items():
            base = best_baseline(cells, measure)
            for cell in cells if base is not None else ():
                if base is not None and cell is not base and (estimate := ratio(cell, base, measure)) is not None:
                    interval = (estimate.value, estimate.low, estimate.high, estimate.n, base.label)
                    points.append(PlotPoint(title, cell.label, 1 / time_scale, *interval))
    columns = _columns("measure", "load", "ratio", "interval_low", "interval_high")
    return PlotSeries(columns | {"to": "baseline"}, tuple(points))


def region_series(comparison: Comparison, loads: Sequence[float]) -> PlotSeries:
    """Return p95 and p50 of TTFT by the region of the replica."""

    def groups(requests: Requests) -> Iterator[tuple[str, Floats]]:
        for name in np.unique(requests.region):
            if name:
                yield str(name), requests.ttft_ms[requests.region == name]

    return _grouped(comparison, loads, groups, "region")


def prompt_series(comparison: Comparison, loads: Sequence[float]) -> PlotSeries:
    """Return p95 and p50 of TTFT by class of prompt length."""

    def groups(requests: Requests) -> Iterator[tuple[str, Floats]]:
        if len(requests.input_tokens) != len(requests.ttft_ms):
            return
        has_length = ~np.isnan(requests.input_tokens)
        places = np.searchsorted(PROMPT_CLASSES, requests.input_tokens)
        for index, name in enumerate(prompt_classes()):
            yield name, requests.ttft_ms[has_length & (places == index)]

    return _grouped(comparison, loads, groups, "prompt_tokens")


def prompt_classes() -> list[str]:
    """Return the names of the classes of prompt length, shortest first."""
    return [*(f"to {bound:,}" for bound in PROMPT_CLASSES), f"over {PROMPT_CLASSES[-1]:,}"]


def tail_series(comparison: Comparison, loads: Sequence[float]) -> PlotSeries:
    """Return the TTFT that a fraction of requests exceeds, down to one request of a run."""
    points = []
    for time_scale in loads:
        for cell in comparison.loads[time_scale]:
            samples = [one.ttft_ms for one in cell.requests if len(one.ttft_ms)]
            if not samples:
                continue
            fewest = min(map(len, samples))
            fractions = [one for one in TAIL if one >= 1 / fewest]
            values = mean_quantiles(samples, [1 - one for one in fractions])
            for fraction, value in zip(fractions, values, strict=True):
                points.append(PlotPoint(load_number(time_scale), cell.label, value, fraction, runs=len(samples)))
    return PlotSeries(
        {"panel": "load", "policy": "policy", "value": "fraction_slower", "x": "ttft_ms", "runs": "runs"}, tuple(points)
    )


def _grouped(
    comparison: Comparison,
    loads: Sequence[float],
    groups: Callable[[Requests], Iterator[tuple[str, Floats]]],
    name: str,
) -> PlotSeries:
    points = []
    for time_scale in loads:
        for cell in comparison.loads[time_scale]:
            samples_by_group: dict[str, list[Floats]] = {}
            for requests in cell.requests:
                for group, values in groups(requests):
                    if len(values) >= MIN_REQUESTS:
                        samples_by_group.setdefault(group, []).append(values)
            for group, samples in samples_by_group.items():
                p50, p95 = mean_quantiles(samples, (0.5, 0.95))
                points.append(PlotPoint(load_number(time_scale), cell.label, group, p95, p50, None, len(samples)))
    columns = {"panel": "load", "policy": "policy", "x": name, "low": "p50_ttft_ms", "value": "p95_ttft_ms"}
    return PlotSeries(columns | {"runs": "runs"}, tuple(points))


def _columns(panel: str, x: str, value: str, low: str, high: str) -> dict[str, str]:
    return {"panel": panel, "policy": "policy", "x": x, "value": value, "low": low, "high": high, "runs": "runs"}


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
    return [loads[round(position)] for position in np.linspace(0, len(loads) - 1, MAX_PANELS)]


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
    drawn = {point.x for point in series.points}
    classes = [name for name in prompt_classes() if name in drawn]
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
    places = {group: index for index, group in enumerate(groups)}
    step = GROUP_WIDTH / max(1, len(curves))
    for number, (style, points) in enumerate(curves):
        shift = (number - (len(curves) - 1) / 2) * step
        if points:
            x = [places[point.x] + shift for point in points]
            _draw_bars(panel, x, points, style, linestyle="", elinewidth=1.2, capsize=0)
    for index in range(1, len(groups)):
        panel.axvline(index - 0.5, color="#e4e4e4", linewidth=1)
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
    incumbents = [
        (one.number, one.incumbent_objective_ms) for one in generations if one.incumbent_objective_ms is not None
    ]
    _draw_generations(axes[-1], "objective: p95 TTFT of the window, ms", tried, incumbents, VERMILLION, BLUE)
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
