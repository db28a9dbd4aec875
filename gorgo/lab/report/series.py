"""The data of each plot of a comparison: the points that are drawn are the rows of its CSV file.

A quantile of several runs is the mean of the runs' quantiles, as in the tables, so that a figure has one value.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.core.numeric import Floats
from gorgo.lab.report.runs import Cell, Comparison, Measure, Requests, best_baseline, mean_quantiles, ratio
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
        if known := values(cell):
            mean = sum(known) / len(known)
            yield PlotPoint(title, cell.label, 1 / time_scale, mean, min(known), max(known), len(known))


def ratio_series(comparison: Comparison, measures: Sequence[Measure]) -> PlotSeries:
    """Return ratios to the best baseline of each load with their 95 % intervals."""
    points = []
    for measure in measures:
        title = f"{measure.title.partition(',')[0]} / best baseline"
        for time_scale, cells in comparison.loads.items():
            base = best_baseline(cells, measure)
            for cell in cells if base is not None else ():
                if base is not None and cell is not base and (found := ratio(cell, base, measure)) is not None:
                    interval = (found.value, found.low, found.high, found.n, base.label)
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
        known = ~np.isnan(requests.input_tokens)
        places = np.searchsorted(PROMPT_CLASSES, requests.input_tokens)
        for place, name in enumerate(prompt_classes()):
            yield name, requests.ttft_ms[known & (places == place)]

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
            found: dict[str, list[Floats]] = {}
            for requests in cell.requests:
                for group, values in groups(requests):
                    if len(values) >= MIN_REQUESTS:
                        found.setdefault(group, []).append(values)
            for group, samples in found.items():
                p50, p95 = mean_quantiles(samples, (0.5, 0.95))
                points.append(PlotPoint(load_number(time_scale), cell.label, group, p95, p50, None, len(samples)))
    columns = {"panel": "load", "policy": "policy", "x": name, "low": "p50_ttft_ms", "value": "p95_ttft_ms"}
    return PlotSeries(columns | {"runs": "runs"}, tuple(points))


def _columns(panel: str, x: str, value: str, low: str, high: str) -> dict[str, str]:
    return {"panel": panel, "policy": "policy", "x": x, "value": value, "low": low, "high": high, "runs": "runs"}
