"""Counters and histograms without locks, for one thread, and their families for a scrape.

Owns the series (`MetricStore`), and the metrics of a policy that learns (`LearningMetrics`).

prometheus_client's own take a lock per update: 1 us for a counter, 3 us for a histogram, ten times as long as here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gorgo.core.metric_spec import MetricSpec, label_of
from gorgo.live.telemetry.metric_table import LABELS, buckets_of

#: A metric's name and the values of its labels.
Key = tuple[str, ...]


class Counter:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1.0) -> None:
        self.value += by


class Histogram:
    """One histogram; `counts` has an entry per bucket, the infinite one last."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus expects them."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


class MetricStore(Collector):
    """All counters and histograms of a table. Series without labels, or with known values, exist from the start:
    a counter that appears with its first event has no rate for it.
    """

    def __init__(self, table: Sequence[MetricSpec]) -> None:
        self._specs = {spec.name: spec for spec in table if spec.kind != "gauge"}
        self._counts: dict[Key, Counter] = {}
        self._histograms: dict[Key, Histogram] = {}
        for spec in self._specs.values():
            make: Callable[..., object] = self.count if spec.kind == "counter" else self.histogram
            if not spec.labels:
                make(spec.name)
            elif len(spec.labels) == 1:
                for value in label_of(spec.name, *spec.labels, labels=LABELS).values:
                    make(spec.name, value)

    def count(self, *key: str) -> Counter:
        """Return the counter of a metric and its label values, by position."""
        cell = self._counts.get(key)
        if cell is None:
            cell = self._counts[key] = Counter()
        return cell

    def histogram(self, *key: str) -> Histogram:
        cell = self._histograms.get(key)
        if cell is None:
            cell = self._histograms[key] = Histogram(buckets_of(key[0]))
        return cell

    def retain(self, wanted: Callable[[MetricSpec, Key], bool]) -> None:
        """Drop all series for which `wanted` is false."""
        self._counts = {key: cell for key, cell in self._counts.items() if wanted(self._specs[key[0]], key[1:])}
        self._histograms = {key: cell for key, cell in self._histograms.items() if wanted(self._specs[key[0]], key[1:])}

    def describe(self) -> Iterable[Metric]:
        return [_family(spec) for spec in self._specs.values()]

    def collect(self) -> Iterable[Metric]:
        families = {name: _family(spec) for name, spec in self._specs.items()}
        for (name, *labels), count in self._counts.items():
            family = families[name]
            assert isinstance(family, CounterMetricFamily), name
            family.add_metric(labels, count.value)
        for (name, *labels), histogram in self._histograms.items():
            family = families[name]
            assert isinstance(family, HistogramMetricFamily), name
            family.add_metric(labels, histogram.buckets(), histogram.total)
        return families.values()


def status_class(status: int) -> str:
    """Return the class of a status; 499 (client disconnected) is its own."""
    return "499" if status == 499 else f"{status // 100}xx"


def _family(spec: MetricSpec) -> CounterMetricFamily | HistogramMetricFamily:
    kind = CounterMetricFamily if spec.kind == "counter" else HistogramMetricFamily
    return kind(spec.name, spec.description, labels=spec.labels)


# Metrics of a policy that learns: its model, the errors of its predictions, rounds of training, rules that decided.


@dataclass(frozen=True, slots=True)
class ModelGauges:
    """The model in use: version, samples of its training, and when it was trained, seconds since the epoch."""

    version: int
    samples: int
    trained_s: float


class LearningMetrics:
    """The counters of one proxy. Each method records one event."""

    def __init__(self, cells: MetricStore) -> None:
        self._count, self._histogram = cells.count, cells.histogram
        #: `None` without a model.
        self.model: ModelGauges | None = None

    def decided(self, fallback: str | None) -> None:
        """Record a dispatch and the rule that decided in place of the main one."""
        if fallback is not None:
            self._count("gorgo_fallbacks_total", fallback).inc()

    def errors(self, of: str, shares: Iterable[float]) -> None:
        """Record absolute errors of the model, as shares of the measured `ttft` or `tpot`."""
        histogram = self._histogram("gorgo_model_error_ratio", of)
        for share in shares:
            histogram.observe(share)

    def outcomes(self, taken: int, lost: int) -> None:
        """Record outcomes that the training got, and those that left the ring before."""
        self._count("gorgo_training_outcomes_total", "taken").inc(taken)
        self._count("gorgo_training_outcomes_total", "lost").inc(lost)

    def round(self, result: str, seconds: float | None = None) -> None:
        """Record the end of a round: `adopted`, `discarded` or `failed`."""
        self._count("gorgo_training_rounds_total", result).inc()
        if seconds is not None:
            self._histogram("gorgo_training_seconds").observe(seconds)

    def model_written(self, well: bool) -> None:
        self._count("gorgo_model_writes_total", "written" if well else "failed").inc()
