"""Plots of a tuning history: weights, step size and objective over the generations."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gorgo.apps.report.latency import plain_numbers
from gorgo.apps.report.runs import ReportGeneration
from gorgo.apps.report.style import BLACK, BLUE, COLOURS, GREY, VERMILLION, WIDTH, name

#: Weights that get a panel; a policy has two or three that are tuned.
MAX_WEIGHTS = 8


def tuning_plot(generations: Sequence[ReportGeneration]) -> Figure:
    """One panel per weight, then sigma, then the objective, over the number of the generation."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))[:MAX_WEIGHTS]
    figure = Figure(figsize=(WIDTH, 1.55 * (len(weights) + 2) + 0.5), layout="constrained")
    axes = figure.subplots(len(weights) + 2, 1, sharex=True, squeeze=False).ravel().tolist()
    for panel, weight, colour in zip(axes, weights, COLOURS * 2, strict=False):
        tried = [(one.number, one.weights[weight], one.accepted) for one in generations if weight in one.weights]
        _tried(panel, tried, colour)
        panel.set_title(name(weight))
    _line(axes[-2], [(one.number, one.sigma) for one in generations], BLACK, "sigma")
    _objective(axes[-1], generations)
    axes[-1].set_xlabel("generation")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    handles = [
        Line2D([], [], color=GREY, marker="o", linestyle="", label="accepted"),
        Line2D([], [], color=GREY, marker="o", markerfacecolor="none", linestyle="", label="rejected"),
        Line2D([], [], color=GREY, drawstyle="steps-post", label="incumbent"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=8.5)
    return figure


def _tried(panel: Axes, tried: Sequence[tuple[int, float, bool]], colour: str) -> None:
    """What was tried as dots, and the weights in force (the last accepted ones) as steps."""
    _dots(panel, tried, colour)
    steps = [(number, value) for number, value, accepted in tried if accepted]
    if steps:
        steps.append((tried[-1][0], steps[-1][1]))
        panel.step(*zip(*steps, strict=True), where="post", color=colour, linewidth=1.4)
    _scale(panel, [value for _, value, _ in tried])


def _dots(panel: Axes, tried: Sequence[tuple[int, float, bool]], colour: str) -> None:
    for wanted, face in ((True, colour), (False, "none")):
        points = [(number, value) for number, value, accepted in tried if accepted == wanted]
        if points:
            panel.plot(
                *zip(*points, strict=True), linestyle="", marker="o", markersize=4, color=colour, markerfacecolor=face
            )


def _line(panel: Axes, points: Sequence[tuple[int, float | None]], colour: str, title: str) -> None:
    known = [(number, value) for number, value in points if value is not None]
    if known:
        panel.plot(*zip(*known, strict=True), color=colour, linewidth=1.2)
        _scale(panel, [value for _, value in known])
    panel.set_title(title)


def _objective(panel: Axes, generations: Sequence[ReportGeneration]) -> None:
    tried = [(one.number, one.objective_ms, one.accepted) for one in generations if one.objective_ms is not None]
    _dots(panel, tried, VERMILLION)
    known = [(one.number, one.incumbent_objective_ms) for one in generations if one.incumbent_objective_ms is not None]
    if known:
        panel.step(*zip(*known, strict=True), where="post", color=BLUE, linewidth=1.4)
    _scale(panel, [value for _, value, _ in tried] + [value for _, value in known])
    panel.set_title("objective: p95 TTFT of the window, ms")


def _scale(panel: Axes, values: Sequence[float]) -> None:
    """Logarithmic where there is something to see by it."""
    if values and min(values) > 0 and max(values) > min(values):
        panel.set_yscale("log")
        plain_numbers(panel, "y")
