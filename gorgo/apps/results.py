"""Result rows: the same keys for live and simulated runs, as JSON and as a table.

Owns the row of DESIGN 7.4 and how it is shown. Who measures fills it in. Unknown is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of one measure; None without a sample."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls()
        mean = float(np.mean(values))
        p50, p95, p99 = (float(q) for q in np.quantile(values, (0.5, 0.95, 0.99)))
        return cls(mean, p50, p95, p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One policy on one trace.

    Latencies are of requests that succeeded, counted from their scheduled time. `cache_hit` is cached / prompt tokens
    by the engines' own usage, `cache_hit_believed` the same by what the router believed when it chose.
    `prediction_error_ms` is |predicted - measured| TTFT. `slip_ms_p95` is how late requests were sent.
    """

    trace: str
    time_scale: float
    policy: str | None
    weights: Mapping[str, float] | None
    seed: int
    source: Literal["simulated", "live"]
    n: int
    errors: int
    ttft_ms: Spread
    e2e_s: Spread
    itl_ms: Spread
    cache_hit: float | None
    cache_hit_believed: float | None
    share: Mapping[str, float]
    prediction_error_ms: Spread
    slip_ms_p95: float | None

    def as_json(self) -> dict[str, Any]:
        """The row as it goes into results.json."""
        row = asdict(self)
        del row["prediction_error_ms"]["p99"]  # DESIGN 7.4 names mean, p50 and p95 alone
        return row
