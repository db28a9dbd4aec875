"""Counters and histograms without locks, for one thread, and their families for a scrape.

Owns the series (`MetricStore`), the metrics of a policy that learns (`LearningMetrics`), and those of a router among
its peers (`PeerMetrics`), which are read at a scrape. Leaves what is measured of peers to `gorgo.live.peer_store`.

prometheus_client's own take a lock per update: 1 us for a counter, 3 us for a histogram, ten times as long as here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gorgo.core.metric_spec import MetricSpec, label_of
from gorgo.core.prefix.index import Origin
from gorgo.live.telemetry.metric_table import (
    LABELS,
    PEER_METRICS,
    PROVIDER,
    ReportResult,
    StoreFault,
    Subject,
    buckets_of,
)

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
    """One histogram. `observe` takes a value, which waits: a request has up to fourteen, and to sort many into the
    buckets at once takes a tenth of the time. Whoever observes has to call `fold` now and then.
    """

    __slots__ = ("_bounds", "_counts", "_total", "_waiting", "observe")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        #: By bucket, the infinite one last.
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._total = 0.0
        self._waiting: list[float] = []
        self.observe: Callable[[float], None] = self._waiting.append

    def fold(self) -> None:
        """Sort the values that wait into the buckets."""
        if self._waiting:
            buckets = np.searchsorted(self._bounds, self._waiting)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self._total = sum(self._waiting, self._total)
            self._waiting.clear()

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts by upper bound, as Prometheus expects them, and the sum of all values."""
        self.fold()
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True)), self._total


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

    def fold(self) -> None:
        """Sort the values that wait into the buckets of the histograms."""
        for histogram in self._histograms.values():
            histogram.fold()

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
            family.add_metric(labels, *histogram.buckets())
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
        """Record absolute errors of the model, as shares of the measured `ttft`, `tpot` or `e2e`."""
        histogram = self._histogram("gorgo_model_error_ratio", of)
        for share in shares:
            histogram.observe(share)

    def outcomes(self, taken: int, lost: int) -> None:
        """Record outcomes that the training got, and those that left the ring before."""
        self._count("gorgo_training_outcomes_total", "taken").inc(taken)
        self._count("gorgo_training_outcomes_total", "lost").inc(lost)

    def round(self, result: str, seconds: float | None = None) -> None:
        """Record the end of a round: `adopted`, `refused`, `discarded` or `failed`."""
        self._count("gorgo_training_rounds_total", result).inc()
        if seconds is not None:
            self._histogram("gorgo_training_seconds").observe(seconds)

    def model_written(self, well: bool) -> None:
        self._count("gorgo_model_writes_total", "written" if well else "failed").inc()


# Requests, tokens and rejections by client and model: counters for a scrape, and the last minute for the status. A
# client is the name of a key, never a text that it sent; a model is one that replicas list. Further clients or models
# count as `other`.


#: Clients and models with series of their own: 64 keys with 8 models are 2,500 series.
MAX_CLIENTS = 64
MAX_MODELS = 64
#: Label of further clients and models, and of requests without one.
OTHER, NONE = "other", "none"
#: Shortest time between two searches for labels without a replica, s: while all are listed each one is in vain.
EVICT_S = 1.0
#: Length of the window of the status, s; one entry per second.
WINDOW_S = 60


@dataclass(frozen=True, slots=True)
class ClientRow:
    """The last minute of one client; `rejected` are 429s."""

    name: str
    requests: int
    tokens: int
    rejected: int


class _LastMinute:
    """Sums per second over the last `WINDOW_S`: requests, tokens, rejections."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque(maxlen=WINDOW_S)

    def add(self, now: float, *, requests: int = 0, tokens: int = 0, rejected: int = 0) -> None:
        second, seconds = int(now), self._seconds
        if not seconds or seconds[-1][0] != second:
            seconds.append([second, 0, 0, 0])
        newest = seconds[-1]
        newest[1] += requests
        newest[2] += tokens
        newest[3] += rejected

    def total(self, name: str, now: float) -> ClientRow:
        recent = [entry for entry in self._seconds if now - entry[0] <= WINDOW_S]
        return ClientRow(name, *(sum(entry[index] for entry in recent) for index in (1, 2, 3)))


#: Counters of requests, prompt tokens and output tokens, and the last minute.
_Good = tuple[Counter, Counter, Counter, _LastMinute]


#: Labels whose values are models.
_MODELS = ("model", "gen_ai_request_model")


class ClientUsage:
    """Usage by client.

    Parameters
    ----------
    store:
        Of the proxy's metrics.
    lists_model:
        Whether a replica lists this model.
    clock:
        Of the proxy, s.
    """

    def __init__(self, store: MetricStore, lists_model: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._store = store
        self._lists_model = lists_model
        self._clock = clock
        self._windows: dict[str, _LastMinute] = {}
        self._models: set[str] = set()
        self._evicted_s = -math.inf
        #: What a good answer adds to, by client and model: as many as there are keys and labels of models.
        self._good: dict[tuple[str | None, str | None], _Good] = {}
        #: Series of OpenTelemetry's conventions, by operation, model and error.
        self._served: dict[tuple[str, str | None, str], tuple[Histogram, Histogram, Histogram]] = {}

    def served(
        self, operation: str, model: str | None, status: int, *, e2e_s: float, ttft_s: float | None, output_tokens: int
    ) -> None:
        """Record the times of a request by OpenTelemetry's conventions; `output_tokens` are those of a whole answer."""
        error = str(status) if status >= 400 else ""
        cells = self._served.get((operation, model, error))
        if cells is None:
            kind, make = self._model(model), self._store.histogram
            labels = (operation, PROVIDER, kind)
            cells = (
                make("gen_ai_server_request_duration_seconds", *labels, error),
                make("gen_ai_server_time_to_first_token_seconds", *labels),
                make("gen_ai_server_time_per_output_token_seconds", *labels),
            )
            if kind != OTHER:
                self._served[operation, model, error] = cells
        duration, first, per_token = cells
        duration.observe(e2e_s)
        if ttft_s is not None:
            first.observe(ttft_s)
            if output_tokens > 1 and not error:
                per_token.observe((e2e_s - ttft_s) / (output_tokens - 1))

    def finished(
        self,
        client: str | None,
        model: str | None,
        status: int,
        *,
        now: float,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
    ) -> None:
        """Record the end of a request."""
        good = self._good.get((client, model)) if status == 200 else None
        if good is None:
            good = self._series(client, model, status)
        requests, prompt, output, window = good
        requests.value += 1.0
        if prompt_tokens:
            prompt.value += prompt_tokens
            output.value += output_tokens
        window.add(now, requests=1, tokens=prompt_tokens + output_tokens)

    def _series(self, client: str | None, model: str | None, status: int) -> _Good:
        name, kind, count = self._client(client), self._model(model), self._store.count
        series = (
            count("gorgo_client_requests_total", name, kind, status_class(status)),
            count("gorgo_client_tokens_total", name, kind, "prompt"),
            count("gorgo_client_tokens_total", name, kind, "output"),
            self._windows[name],
        )
        if status == 200 and kind != OTHER:
            self._good[client, model] = series
        return series

    def rejected(self, client: str | None, reason: str) -> None:
        """Record a 429 of the proxy's own."""
        name = self._client(client)
        self._store.count("gorgo_client_rejects_total", name, reason).inc()
        self._windows[name].add(self._clock(), rejected=1)

    def last_minute(self) -> list[ClientRow]:
        """Return the last minute of each client, most tokens first."""
        now = self._clock()
        rows = (window.total(name, now) for name, window in self._windows.items())
        return sorted(rows, key=lambda client: (-client.tokens, -client.requests, client.name))

    def retain(self, clients: Collection[str]) -> None:
        """Drop the series and windows of every other client, and those of models that no replica lists any more."""
        names = {*clients, OTHER, NONE}
        self._models = {model for model in self._models if self._lists_model(model)}
        models = {*self._models, OTHER, NONE}
        self._windows = {name: window for name, window in self._windows.items() if name in names}
        self._good.clear()
        self._served.clear()

        def wanted(spec_labels: Collection[str], values: Key) -> bool:
            labels = dict(zip(spec_labels, values, strict=True))
            return labels.get("client", NONE) in names and all(labels.get(label, NONE) in models for label in _MODELS)

        self._store.retain(lambda spec, values: wanted(spec.labels, values))

    def _evict_models(self) -> bool:
        """Drop the labels of models that no replica lists any more, and their series; return whether there is room."""
        now = self._clock()
        if now - self._evicted_s < EVICT_S:
            return False
        self._evicted_s = now
        left = {model for model in self._models if not self._lists_model(model)}
        self._models -= left
        if left:
            self._good.clear()
            self._served.clear()
            self._store.retain(
                lambda spec, values: (
                    not any(value in left for label, value in zip(spec.labels, values, strict=True) if label in _MODELS)
                )
            )
        return bool(left)

    def _client(self, client: str | None) -> str:
        name = NONE if client is None else client
        if name not in self._windows:
            # One of each is left for `other` and `none`.
            if client is not None and len(self._windows.keys() - {OTHER, NONE}) >= MAX_CLIENTS:
                name = OTHER
            self._windows.setdefault(name, _LastMinute())
        return name

    def _model(self, model: str | None) -> str:
        if model is None:
            return NONE
        if model not in self._models:
            if not self._lists_model(model) or (len(self._models) >= MAX_MODELS and not self._evict_models()):
                return OTHER
            self._models.add(model)
        return model


# The store and the routers that report there.


@dataclass(slots=True)
class PeerCounts:
    """Counts since the start."""

    reports: dict[ReportResult, int] = field(default_factory=lambda: dict.fromkeys(get_args(ReportResult), 0))
    failures: dict[StoreFault, int] = field(default_factory=lambda: dict.fromkeys(get_args(StoreFault), 0))
    written_bytes: int = 0
    read_bytes: int = 0
    #: Sum of the times of writes, s.
    write_s: float = 0.0
    #: Prefixes and cache reports that no report could take.
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class PeerMeasures:
    """What a scrape shows."""

    counts: PeerCounts
    joined: bool
    #: Peers whose load counts.
    peers: int
    differing: dict[Subject, int]
    #: What was evicted of what is known of caches.
    evicted: Mapping[Origin, int]


class PeerMetrics(Collector):
    """Metrics of one router among its peers; none without a store. `read` is set once the process is built."""

    def __init__(self) -> None:
        self.read: Callable[[], PeerMeasures | None] = lambda: None

    def describe(self) -> Iterable[Metric]:
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        families, measures = _families(), self.read()
        if measures is None:
            return families.values()
        counts = measures.counts
        families["gorgo_peer_store_up"].add_metric((), float(measures.joined))
        families["gorgo_peers"].add_metric((), measures.peers)
        families["gorgo_peer_bytes_total"].add_metric(("written",), counts.written_bytes)
        families["gorgo_peer_bytes_total"].add_metric(("read",), counts.read_bytes)
        families["gorgo_peer_write_seconds_total"].add_metric((), counts.write_s)
        families["gorgo_peer_dropped_entries_total"].add_metric((), counts.dropped)
        for origin in Origin:
            families["gorgo_peer_evictions_total"].add_metric((origin.name.lower(),), measures.evicted.get(origin, 0))
        for subject in get_args(Subject):
            families["gorgo_peers_differing"].add_metric((subject,), measures.differing.get(subject, 0))
        for result, count in counts.reports.items():
            families["gorgo_peer_reports_total"].add_metric((result,), count)
        for fault, count in counts.failures.items():
            families["gorgo_peer_store_failures_total"].add_metric((fault,), count)
        return families.values()


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    return {spec.name: kinds[spec.kind](spec.name, spec.description, labels=spec.labels) for spec in PEER_METRICS}
