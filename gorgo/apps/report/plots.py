"""The plots of a comparison: the order on the page, what each needs, and a note of what it omits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from gorgo.apps.report.groups import prompt_plot, ratio_plot, region_plot
from gorgo.apps.report.latency import MAX_CURVES, drawn_loads, load_plot, slo_plot, tail_plot
from gorgo.apps.report.runs import Comparison
from gorgo.apps.report.series import (
    MIN_REQUESTS,
    PlotSeries,
    load_series,
    prompt_series,
    ratio_series,
    region_series,
    slo_series,
    tail_series,
)
from gorgo.apps.report.statistics import RATIO_MEASURES
from gorgo.apps.report.style import Layout

NO_REQUESTS = "Left out: no requests.jsonl with a TTFT was saved."
ONE_LOAD = "Left out: there is only one load."
NO_P95 = "Left out: no run has a p95."
NO_BASELINE = "Left out: no run to compare with one of the paper's baselines."
NO_GROUP = f"Left out: no group has {MIN_REQUESTS} requests of a run."
FEW = f"Groups of fewer than {MIN_REQUESTS} requests of a run are left out."
LONG_BARS = "Longer intervals are cut at the frame; the table has them whole."
FAILED = "A failed request is not within an SLO."


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
    loads = drawn_loads(comparison)
    tails = tail_series(comparison, loads)
    unsaved = "" if tails.points else NO_REQUESTS
    single = "" if len(comparison.loads) > 1 else ONE_LOAD
    curves, panels = _omitted(comparison), _omitted(comparison, loads)

    def plan(
        key: str,
        title: str,
        series: PlotSeries,
        draw: Callable[[Comparison, PlotSeries, Layout], Figure],
        reason: str,
        *notes: str,
    ) -> PlannedPlot:
        title = f"{title}, {comparison.source}"
        if reason:
            return PlannedPlot(key, title, reason, None)
        note = " ".join(filter(None, notes))
        return PlannedPlot(key, title, note, lambda layout: draw(comparison, series, layout), series)

    p95 = load_series(comparison, RATIO_MEASURES)
    ratios = ratio_series(comparison, RATIO_MEASURES)
    slos = slo_series(comparison, slos_ms)
    regions, prompts = region_series(comparison, loads), prompt_series(comparison, loads)
    few_regions, few_prompts = ("" if one.points else NO_GROUP for one in (regions, prompts))
    ratio_title, slo_title = "Ratio to the best baseline, 95 % interval", "Requests within an SLO against load"
    region_title, prompt_title = "TTFT by region of the replica", "TTFT by prompt length"
    return [
        plan("p95-against-load", "p95 against load", p95, load_plot, single or ("" if p95.points else NO_P95), curves),
        plan("ratio", ratio_title, ratios, ratio_plot, "" if ratios.points else NO_BASELINE, LONG_BARS, curves),
        plan("slo-against-load", slo_title, slos, slo_plot, unsaved or single, FAILED, curves),
        plan("ttft-tail", "TTFT, tail of the distribution", tails, tail_plot, unsaved, panels),
        plan("ttft-by-region", region_title, regions, region_plot, unsaved or few_regions, FEW, panels),
        plan("ttft-by-prompt-length", prompt_title, prompts, prompt_plot, unsaved or few_prompts, FEW, panels),
    ]  # fmt: skip


def _omitted(comparison: Comparison, loads: Sequence[float] | None = None) -> str:
    """Return what bounds leave out of a plot, empty if nothing."""
    count, labels = len(comparison.loads), len(comparison.labels)
    notes = [f"{len(loads)} of {count} loads are drawn."] if loads is not None and len(loads) < count else []
    notes += [f"{MAX_CURVES} of {labels} policies are drawn."] if labels > MAX_CURVES else []
    return " ".join(notes)
