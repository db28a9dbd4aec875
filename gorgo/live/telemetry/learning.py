"""Metrics of a policy that learns: its model, the errors of its predictions, rounds of training, rules that decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gorgo.live.telemetry.counters import MetricStore


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
