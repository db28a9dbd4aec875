"""Result rows: the same keys for live and simulated runs, as JSON.

Owns the result row; `result_table` shows it, `served` defines the figures beside latencies. Unknown is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from gorgo.config.atomic import PUBLIC, write_atomically

#: Floats represent integers exactly up to here; no latency, count or weight is larger.
MAX_NUMBER = 2**53
# The ranges of figures, which readers of result files check.
Number = Annotated[float, Field(strict=True, ge=-MAX_NUMBER, le=MAX_NUMBER, allow_inf_nan=False)]
Amount = Annotated[float, Field(strict=True, ge=0, le=MAX_NUMBER, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_NUMBER)]
TimeScale = Annotated[float, Field(strict=True, ge=1e-9, le=MAX_NUMBER, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of one measure; None without a sample."""

    mean: Amount | None = None
    p50: Amount | None = None
    p95: Amount | None = None
    p99: Amount | None = None

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
    by the usage of the engines, `cache_hit_estimated` by the estimate of the Router at its choice.
    `prediction_error_ms` is |predicted - measured| TTFT. `slip_ms_p95` is how late requests were sent. `planned`: the
    requests of the trace, more than `n` after an interrupt, None in files of earlier versions. `failures` are counts of
    failed requests by cause, see `gorgo.lab.failures`.

    `queue` is whether requests could wait at the proxy for a replica with capacity, None live and in earlier files.

    `digest` is of everything that determines a simulated run, so rows with equal ones are copies of one run. `setting`
    is of the same without policy, weights, seed and time scale: only runs with equal ones may be averaged or paired.
    Both are None where it is unknown what determined the run: live, from requests in memory, in earlier files.

    `window` is the number, from 0, of the disjoint window of a run that the row is of; None: the run, less a warm-up.

    `tpot_ms` is (E2E - TTFT) / (output tokens - 1) per request, `e2e_per_token_ms` E2E / output tokens. `tokens_per_s`
    are output tokens over the time from the first request to the last end. `goodput` is the share of all requests with
    a first token within 2 s and a last one within 10 s, `prediction_error_ratio` the mean of |predicted - measured| /
    measured TTFT. `preemptions` are those of simulated engines. All are None in files of earlier versions.
    """

    trace: str
    time_scale: TimeScale
    policy: str | None
    weights: Mapping[str, Number] | None
    seed: Count
    source: Literal["simulated", "live"]
    n: Count
    errors: Count
    ttft_ms: Spread
    e2e_s: Spread
    itl_ms: Spread
    cache_hit: Fraction | None
    cache_hit_estimated: Number | None
    share: Mapping[str, Amount]
    prediction_error_ms: Spread
    slip_ms_p95: Number | None
    planned: Count | None = None
    failures: Mapping[str, Count] = field(default_factory=dict)
    tpot_ms: Spread = Spread()
    e2e_per_token_ms: Spread = Spread()
    tokens_per_s: Amount | None = None
    goodput: Fraction | None = None
    prediction_error_ratio: Amount | None = None
    preemptions: Count | None = None
    queue: bool | None = None
    setting: str | None = None
    digest: str | None = None
    window: Count | None = None

    @property
    def is_partial(self) -> bool:
        """Whether the run was interrupted."""
        return self.planned is not None and self.n < self.planned

    def as_json(self) -> dict[str, Any]:
        """The row as it goes into results.json."""
        row = asdict(self)
        del row["prediction_error_ms"]["p99"]  # mean, p50 and p95 only
        return row


def load_text(time_scale: float) -> str:
    """Return a time scale as the load that it gives, relative to the trace's own.

    Example
    -------
    >>> load_text(2.0), load_text(1.25)
    ('load 0.5', 'load 0.8')
    """
    return f"load {1 / time_scale:.3g}"


def write_results(folder: Path, rows: Sequence[ResultRow]) -> None:
    """Write results.json, a list of rows, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "results.json", rows_as_json(rows).encode() + b"\n", mode=PUBLIC)


def rows_as_json(rows: Sequence[ResultRow]) -> str:
    """Return the rows as the text that `--json` prints."""
    return json.dumps([row.as_json() for row in rows], indent=2, allow_nan=False)
