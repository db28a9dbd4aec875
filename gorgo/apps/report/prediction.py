"""Predicted against measured TTFT, and round trips over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gorgo.apps.report.latency import plain_numbers
from gorgo.apps.report.runs import Comparison, Floats, Run
from gorgo.apps.report.style import GREY, legend, looks, name, panels, replica_looks

#: Groups of requests with like predictions; each needs enough requests for its quantiles.
MAX_GROUPS = 20
MIN_GROUP = 8
MAX_POLICIES = 6
#: Points of a line over time, and replicas that get one.
TIME_BINS = 120
MAX_LINES = 12


@dataclass(frozen=True, slots=True)
class Predictions:
    """What one policy predicted, in ms, for every request that was answered; all loads and seeds together."""

    label: str
    predicted_ms: Floats
    measured_ms: Floats


def predictions(comparison: Comparison) -> list[Predictions]:
    """Of each policy that predicts, where requests were kept."""
    found: dict[str, list[Floats]] = {}
    for cell in comparison.cells:
        for run in cell.runs:
            if run.requests is not None:
                pair = np.stack([run.requests.predicted_ttft_ms, run.requests.ttft_ms])
                found.setdefault(cell.label, []).append(pair[:, ~np.isnan(pair).any(axis=0)])
    joined = {label: np.concatenate(pairs, axis=1) for label, pairs in found.items()}
    return [Predictions(label, pairs[0], pairs[1]) for label, pairs in joined.items() if pairs.shape[1]]


def prediction_words(found: list[Predictions]) -> str:
    """Error and bias of each, in a sentence."""
    sentences = []
    for one in found:
        error_ms = np.abs(one.predicted_ms - one.measured_ms)
        p50, p95 = np.quantile(error_ms, (0.5, 0.95))
        late = float(np.mean(one.measured_ms > one.predicted_ms))
        sentences.append(
            f"{one.label}: half of {len(error_ms):,} predictions are within {p50:,.0f} ms, 95 % within {p95:,.0f} ms; "
            f"{late:.0%} of the requests took longer than predicted."
        )
    return " ".join(sentences)


def prediction_plot(found: list[Predictions]) -> Figure:
    """Measured TTFT of requests with like predictions: median and the middle 80 %, a panel per policy."""
    found = found[:MAX_POLICIES]
    figure, axes = panels(len(found), height=3.4)
    for panel, one in zip(axes, found, strict=True):
        _prediction_panel(panel, one)
    return figure


def _prediction_panel(panel: Axes, one: Predictions) -> None:
    order = np.argsort(one.predicted_ms, kind="stable")
    groups = np.array_split(order, max(1, min(MAX_GROUPS, len(order) // MIN_GROUP)))
    x = [float(np.median(one.predicted_ms[group])) for group in groups]
    low, middle, high = np.array([np.quantile(one.measured_ms[group], (0.1, 0.5, 0.9)) for group in groups]).T
    colour = looks([one.label])[one.label].colour
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.fill_between(x, low, high, color=colour, alpha=0.25, linewidth=0, label="middle 80 %")
    panel.plot(x, middle, color=colour, marker="o", markersize=4, label="median measured")
    ends = [max(1e-3, min(min(x), low.min())), max(max(x), high.max())]
    panel.plot(ends, ends, color=GREY, linestyle="--", linewidth=1, label="as predicted")
    panel.set_title(name(one.label))
    panel.set_xlabel("predicted TTFT, ms")
    panel.set_ylabel("measured TTFT, ms")
    panel.legend(loc="upper left", fontsize=8)
    plain_numbers(panel, "x")
    plain_numbers(panel, "y")


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """Median round trip per stretch of time and replica, of one run; NaN where nothing was sent."""

    label: str
    at_s: Floats
    rtt_ms: dict[str, Floats]


def round_trips(comparison: Comparison) -> RoundTrips | None:
    """Of the run whose requests tell most round trips; None if none does."""
    runs = [(cell.label, run) for cell in comparison.cells for run in cell.runs if run.requests is not None]
    label, run = max(runs, key=lambda one: _told(one[1]), default=("", None))
    if run is None or run.requests is None or not _told(run):
        return None
    requests = run.requests
    edges = np.linspace(0, float(requests.scheduled_s.max()) or 1.0, TIME_BINS + 1)
    bins = np.clip(np.searchsorted(edges, requests.scheduled_s, side="right") - 1, 0, TIME_BINS - 1)
    counts = np.bincount(requests.replica[requests.replica >= 0], minlength=len(requests.replicas))
    busiest = sorted(np.argsort(-counts, kind="stable")[:MAX_LINES], key=lambda n: requests.replicas[n])
    lines = {requests.replicas[n]: _medians(bins, requests.rtt_ms, requests.replica == n) for n in busiest}
    known = {replica: line for replica, line in lines.items() if not np.isnan(line).all()}
    return RoundTrips(label, (edges[:-1] + edges[1:]) / 2, known)


def _told(run: Run) -> int:
    requests = run.requests
    return 0 if requests is None else int(np.count_nonzero(~np.isnan(requests.rtt_ms) & (requests.replica >= 0)))


def _medians(
    bins: np.ndarray[tuple[int], np.dtype[np.int64]], values: Floats, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> Floats:
    wanted = mine & ~np.isnan(values)
    line = np.full(TIME_BINS, np.nan)
    for place in np.unique(bins[wanted]):
        line[place] = np.median(values[wanted & (bins == place)])
    return line


def round_trip_words(found: RoundTrips) -> str:
    """Lowest and highest of each replica."""
    parts = [
        f"{replica} between {np.nanmin(line):,.0f} and {np.nanmax(line):,.0f} ms"
        for replica, line in found.rtt_ms.items()
    ]
    return f"Round trips during one run of {found.label}: {', '.join(parts)}."


def round_trip_plot(found: RoundTrips) -> Figure:
    """A line per replica over the time of the run."""
    figure, (panel,) = panels(1, height=3.0)
    look = replica_looks(list(found.rtt_ms))
    for replica, one in look.items():
        line = found.rtt_ms[replica]
        known = ~np.isnan(line)
        panel.plot(found.at_s[known], line[known], color=one.colour, linestyle=one.dashes, linewidth=1.4)
    panel.set_xlabel("seconds from the start")
    panel.set_ylabel("round trip, ms")
    panel.set_ylim(bottom=0)
    legend(figure, look)
    return figure
