"""The record of one request of a replay, and the sums over records while they come, in bounded memory.

Owns what the result row needs. Leaves the table of rows to `gorgo.lab.result_table`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gorgo.lab.failures import count_cause
from gorgo.lab.replay.options import ReplayOptions
from gorgo.lab.results import ResultRow, Spread
from gorgo.lab.served import ServedTally
from gorgo.lab.sim.records import ClientRecord


@dataclass(slots=True, kw_only=True)
class ReplayRecord(ClientRecord):
    """One request, and what only the summary uses. Values that a router does not report are None."""

    policy: str | None = None
    estimated_cached_tokens: float | None = None
    gaps_s: tuple[float, ...] = ()

    @property
    def slip_s(self) -> float:
        """How late it was sent."""
        return max(0.0, self.sent_s - self.scheduled_s)


class LogHistogram:
    """Counts of positive values in bins that grow by 1 %, so a quantile is right within 1 %.

    A replay can have millions of token gaps; this is 16 kB however many there are. The mean is exact.
    """

    LOW, HIGH, GROWTH = 1e-6, 1e4, 1.01

    def __init__(self) -> None:
        self._bins = np.zeros(int(np.log(self.HIGH / self.LOW) / np.log(self.GROWTH)) + 1, dtype=np.int64)
        self._sum = 0.0
        self.count = 0

    def add(self, values: tuple[float, ...]) -> None:
        if values:
            clipped = np.clip(values, self.LOW, self.HIGH)
            places = (np.log(clipped / self.LOW) / np.log(self.GROWTH)).astype(np.int64)
            np.add.at(self._bins, np.minimum(places, len(self._bins) - 1), 1)
            self._sum += float(np.sum(values))
            self.count += len(values)

    def quantile(self, share: float) -> float | None:
        """The middle of the bin in which it lies; None without a value."""
        if not self.count:
            return None
        place = int(np.searchsorted(np.cumsum(self._bins), share * self.count))
        return float(self.LOW * self.GROWTH ** (place + 0.5))

    def spread(self, *, factor: float = 1.0) -> Spread:
        """Mean and quantiles times `factor` (1000 for ms)."""
        if not self.count:
            return Spread()
        p50, p95, p99 = ((self.quantile(share) or 0.0) * factor for share in (0.5, 0.95, 0.99))
        return Spread(self._sum / self.count * factor, p50, p95, p99)


class Tally:
    """Everything the result row needs of the records so far."""

    def __init__(self) -> None:
        self.n = 0
        #: Failed requests by cause.
        self.failures: dict[str, int] = {}
        self._ttft_ms, self._e2e_s, self._slip_ms = array("d"), array("d"), array("d")
        self._prediction_error_ms = array("d")
        self._gaps_s, self._ttft_s = LogHistogram(), LogHistogram()
        self._served = ServedTally()
        self._replicas: Counter[str] = Counter()
        self._policies: Counter[str] = Counter()
        self._cached = _Share()
        self._estimated = _Share()

    def add(self, record: ReplayRecord) -> None:
        """Counts one ended request. Latencies are of those that succeeded; slip is of all."""
        self.n += 1
        self._slip_ms.append(record.slip_s * 1000)
        self._served.add(record)
        if record.error is not None:
            count_cause(self.failures, record.error)
            return
        if record.replica is not None:
            self._replicas[record.replica] += 1
        if record.policy is not None:
            self._policies[record.policy] += 1
        self._cached.add(record.cached_tokens, of=record.input_tokens)
        self._estimated.add(record.estimated_cached_tokens, of=record.input_tokens)
        self._gaps_s.add(record.gaps_s)
        self._add_latency(record)

    def _add_latency(self, record: ReplayRecord) -> None:
        if record.ttft_ms is None or record.e2e_s is None:
            return
        self._ttft_ms.append(record.ttft_ms)
        self._ttft_s.add((record.ttft_ms / 1000,))
        self._e2e_s.append(record.e2e_s)
        if record.predicted_ttft_ms is not None:
            self._prediction_error_ms.append(abs(record.predicted_ttft_ms - record.ttft_ms))

    @property
    def error_count(self) -> int:
        return sum(self.failures.values())

    def ttft_s_p95(self) -> float | None:
        """So far, within 1 %; cheap enough for a progress bar."""
        return self._ttft_s.quantile(0.95)

    def row(self, options: ReplayOptions, *, planned: int | None = None) -> ResultRow:
        """Return the result row; `planned` are the requests of the trace."""
        served = self._replicas.total()
        most_common = self._policies.most_common(1)
        return ResultRow(
            trace=Path(options.trace).name,
            time_scale=options.time_scale,
            policy=options.policy or (most_common[0][0] if most_common else None),
            weights=options.weights,
            seed=options.filters.seed,
            source="live",
            n=self.n,
            errors=self.error_count,
            ttft_ms=Spread.of(self._ttft_ms),
            e2e_s=Spread.of(self._e2e_s),
            itl_ms=self._gaps_s.spread(factor=1000),
            cache_hit=self._cached.value,
            cache_hit_estimated=self._estimated.value,
            share={name: count / served for name, count in sorted(self._replicas.items())},
            prediction_error_ms=Spread.of(self._prediction_error_ms),
            slip_ms_p95=Spread.of(self._slip_ms).p95,
            planned=planned,
            failures=dict(self.failures),
            **self._served.fields(),
        )


class _Share:
    """A sum over a sum, of the requests for which both are known."""

    def __init__(self) -> None:
        self._part, self._whole = 0.0, 0.0

    def add(self, part: float | None, *, of: float) -> None:
        if part is not None:
            self._part += part
            self._whole += of

    @property
    def value(self) -> float | None:
        return self._part / self._whole if self._whole else None
