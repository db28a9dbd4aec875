"""What the page shows of one comparison or one tuning history: tables, and figures with their sentences.

A plot for which the data are not there is left out, and its sentence says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from gorgo.apps.report import words
from gorgo.apps.report.latency import MAX_CURVES, MAX_PANELS, against_load, distributions, drawn_labels, drawn_loads
from gorgo.apps.report.prediction import (
    prediction_plot,
    prediction_words,
    predictions,
    round_trip_plot,
    round_trip_words,
    round_trips,
)
from gorgo.apps.report.routing import hits, shares
from gorgo.apps.report.runs import Cell, Comparison, Floats, ReportGeneration
from gorgo.apps.report.statistics import E2E_P50, E2E_P95, E2E_P99, HIT, HIT_ESTIMATED, TTFT_P50, TTFT_P95, TTFT_P99
from gorgo.apps.report.statistics import Measure as _Measure
from gorgo.apps.report.style import svg
from gorgo.apps.report.tables import PageTable, acceptance_log, error_table, load_table
from gorgo.apps.report.tuning import tuning_plot

#: Our own policies: the verdict on them is told in words.
OURS = ("gorgo-ms", "gorgo")
#: Load tables of one comparison.
MAX_TABLES = 24
NO_REQUESTS = "Left out: it needs requests.jsonl, which was not kept for any of these runs."
NO_ROUND_TRIPS = "Left out: the requests' records do not tell round trips (rtt_ms)."


@dataclass(frozen=True, slots=True)
class PagePlot:
    """A plot with its words; without `svg` the words say why it is left out."""

    title: str
    sentences: tuple[str, ...]
    svg: str | None = None
    table: PageTable | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """One heading of the page."""

    title: str
    lede: tuple[str, ...]
    tables: tuple[PageTable, ...]
    plots: tuple[PagePlot, ...]


def comparison_section(comparison: Comparison, key: str) -> Section:
    """Everything about one trace. `key` is unique in the page: ids in the plots begin with it."""
    draw = _Plots(comparison, key)
    return Section(
        title=title_of(comparison),
        lede=(_compared(comparison), _source(comparison), *headline(comparison)),
        tables=tuple(load_table(comparison, time_scale) for time_scale in list(comparison.loads)[:MAX_TABLES]),
        plots=(
            draw.against_load(),
            draw.distribution("TTFT", lambda cell: cell.ttft_ms, "ms", (TTFT_P50, TTFT_P99)),
            draw.distribution("E2E", lambda cell: cell.e2e_s, "s", (E2E_P50, E2E_P99)),
            draw.shares(),
            draw.hits(),
            draw.predictions(),
            draw.round_trips(),
            PagePlot("Errors", (words.errors(comparison),), table=error_table(comparison)),
        ),
    )


def title_of(comparison: Comparison) -> str:
    """As in `chat-small.jsonl.gz, simulated`."""
    return f"{comparison.trace}, {comparison.source}"


def headline(comparison: Comparison) -> list[str]:
    """The finding in words: who has the lowest tail where, and what of it is shown."""
    return [
        *(words.best_of(measure, words.loads_of(comparison, measure)) for measure in (TTFT_P95, E2E_P95)),
        *(sentence for measure in (TTFT_P95, E2E_P95) for sentence in words.evidence(comparison, measure, OURS)),
    ]


def _compared(comparison: Comparison) -> str:
    runs = [run for cell in comparison.cells for run in cell.runs]
    sizes = sorted({run.row.n for run in runs})
    n = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    seeds = sorted({run.row.seed for run in runs})
    scales = words.listed(f"{time_scale:g}" for time_scale in comparison.loads)
    yardsticks = list(dict.fromkeys(cell.label for cell in comparison.cells if cell.is_yardstick))
    policies = [label for label in comparison.labels if label not in yardsticks]
    beside = f", with {words.listed(yardsticks)} as yardsticks" if yardsticks else ""
    return (
        f"{comparison.trace} at time_scale {scales}; {words.counted(len(seeds), 'seed')}; {n} requests a run. "
        f"Compared: {words.listed(policies) if policies else 'no policy'}{beside}."
    )


def _source(comparison: Comparison) -> str:
    if comparison.simulated:
        return "All figures here are simulated: virtual time, model engines, the same Router as the live proxy."
    return "Live: real processes in wall time. The rows do not say whether the engines behind them were simulated ones."


class _Plots:
    """The plots of one comparison; every title and caption of simulated figures says so."""

    def __init__(self, comparison: Comparison, key: str) -> None:
        self._of = comparison
        self._key = key
        self._mark = " (simulated)" if comparison.simulated else ""

    def _plot(self, title: str, sentences: Sequence[str], name: str, draw: Callable[[], Figure]) -> PagePlot:
        shown = f"{title}{self._mark}"
        marked = (*sentences, *self._limits(), *(["All figures simulated."] if self._of.simulated else []))
        return PagePlot(shown, marked, svg(draw, key=f"{self._key}-{name}", title=f"{shown}. {' '.join(sentences)}"))

    def _limits(self) -> list[str]:
        loads, labels = len(self._of.loads) - len(drawn_loads(self._of)), len(self._of.labels)
        left = [f"Drawn are {MAX_PANELS} loads of {len(self._of.loads)}."] if loads > 0 else []
        return left + (
            [f"Drawn are {MAX_CURVES} policies of {labels}."] if labels > len(drawn_labels(self._of)) else []
        )

    def _without(self, title: str, why: str) -> PagePlot:
        return PagePlot(f"{title}{self._mark}", (why,))

    def against_load(self) -> PagePlot:
        title = "p95 against load"
        if len(self._of.loads) < 2:
            return self._without(title, "Left out: there is only one load.")
        sentences = [words.best_of(measure, words.loads_of(self._of, measure)) for measure in (TTFT_P95, E2E_P95)]
        return self._plot(title, sentences, "load", lambda: against_load(self._of, (TTFT_P95, E2E_P95)))

    def distribution(
        self, name: str, values: Callable[[Cell], Floats], unit: str, measures: tuple[_Measure, _Measure]
    ) -> PagePlot:
        title = f"{name} distribution"
        if not any(len(values(cell)) for cell in self._of.cells):
            return self._without(title, NO_REQUESTS)
        sentences = [
            words.best_of(measure, self._quantiles(values, level))
            for measure, level in zip(measures, (0.5, 0.99), strict=True)
        ]
        return self._plot(
            title, sentences, name.lower(), lambda: distributions(self._of, values, f"{name}, {unit} (log scale)")
        )

    def _quantiles(self, values: Callable[[Cell], Floats], level: float) -> Mapping[float, Mapping[str, float]]:
        """Of what is drawn: all requests of all seeds together."""
        return {
            time_scale: {
                cell.label: float(np.quantile(found, level))
                for cell in self._of.contenders(time_scale)
                if len(found := values(cell))
            }
            for time_scale in self._of.loads
        }

    def shares(self) -> PagePlot:
        title = "Where requests went"
        if not any(words.mean_share(cell) for cell in self._of.cells):
            return self._without(title, "Left out: no answer named its replica.")
        return self._plot(title, [words.spread_of_load(self._of)], "share", lambda: shares(self._of))

    def hits(self) -> PagePlot:
        title = "Cache hit, real and believed"
        real = words.loads_of(self._of, HIT)
        if not any(real.values()):
            return self._without(title, "Left out: the engines did not report cached tokens.")
        sentences = [words.best_of(HIT, real), words.belief(self._of, HIT, HIT_ESTIMATED)]
        return self._plot(title, sentences, "hit", lambda: hits(self._of))

    def predictions(self) -> PagePlot:
        title = "Predicted and measured TTFT"
        found = predictions(self._of)
        if not found:
            return self._without(title, "Left out: no request that was kept has a predicted TTFT.")
        return self._plot(title, [prediction_words(found)], "prediction", lambda: prediction_plot(found))

    def round_trips(self) -> PagePlot:
        title = "Round trips over time"
        found = round_trips(self._of)
        if found is None:
            return self._without(title, NO_ROUND_TRIPS)
        return self._plot(title, [round_trip_words(found)], "rtt", lambda: round_trip_plot(found))


def tuning_section(path: str, generations: Sequence[ReportGeneration], key: str) -> Section:
    """Weights, sigma and objective over generations, and the acceptance log."""
    sentence = words.tuning(generations)
    plot = PagePlot("Weights, sigma and objective", (sentence,))
    if generations:
        picture = svg(lambda: tuning_plot(generations), key=key, title=f"{plot.title}. {sentence}")
        plot = PagePlot(plot.title, plot.sentences, picture)
    return Section(f"Tuning: {path}", (sentence,), (acceptance_log(generations),), (plot,))
