"""The plot of a tuning history: weights, step size and objective over the generations."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gorgo.apps.report.runs import ReportGeneration
from gorgo.apps.report.series import csv_text
from gorgo.apps.report.style import (
    BLACK,
    BLUE,
    BROAD,
    COLOURS,
    GREY,
    VERMILLION,
    Layout,
    add_legend,
    panels,
    set_log_ticks,
    short_name,
)

#: Weights that get a panel; a policy has two or three that are tuned.
MAX_WEIGHTS = 8


def tuning_plot(generations: Sequence[ReportGeneration], layout: Layout = BROAD) -> Figure:
    """Draw a panel per weight, then sigma, then the objective, over the number of the generation."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))[:MAX_WEIGHTS]
    figure, axes = panels(len(weights) + 2, Layout(layout.width, 1), height=1.55)
    for panel, weight, colour in zip(axes, weights, COLOURS * 2, strict=False):
        points = [(one.number, one.weights[weight], one.accepted) for one in generations if weight in one.weights]
        steps = [(number, value) for number, value, accepted in points if accepted]
        # The accepted weights stay effective to the end.
        _draw_panel(
            panel, short_name(weight), points, steps and [*steps, (points[-1][0], steps[-1][1])], colour, colour
        )
    sigma = [(one.number, one.sigma) for one in generations if one.sigma is not None]
    _draw_panel(axes[-2], "sigma", [], sigma, BLACK, BLACK)
    tried = [(one.number, one.objective_ms, one.accepted) for one in generations if one.objective_ms is not None]
    known = [(one.number, one.incumbent_objective_ms) for one in generations if one.incumbent_objective_ms is not None]
    _draw_panel(axes[-1], "objective: p95 TTFT of the window, ms", tried, known, VERMILLION, BLUE)
    axes[-1].set_xlabel("generation")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    accepted = Line2D([], [], color=GREY, marker="o", linestyle="", label="accepted")
    rejected = Line2D([], [], color=GREY, marker="o", markerfacecolor="none", linestyle="", label="rejected")
    add_legend(figure, [accepted, rejected, Line2D([], [], color=GREY, drawstyle="steps-post", label="incumbent")])
    return figure


def _draw_panel(
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


def tuning_csv(generations: Sequence[ReportGeneration]) -> str:
    """Return the generations as CSV, a column per weight."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))
    rows = [
        (one.number, *(one.weights.get(weight) for weight in weights), one.sigma, one.objective_ms,
         one.incumbent_objective_ms, "accepted" if one.accepted else "rejected", one.reason)
        for one in generations
    ]  # fmt: skip
    header = ("generation", *weights, "sigma", "objective_ms", "incumbent_objective_ms", "decision", "reason")
    return csv_text(header, rows)
