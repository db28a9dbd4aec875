"""Rank validation: does a policy order replicas as their first tokens do? Read from a decision log, live or simulated.

Owns the table and its statistics. Choices and shadow scores come from samples or from a simulation's requests
(`core.policy.interface`).

Theory of operation. Each row is a request that a policy without an opinion (`random`) sent somewhere, with the rank
that the shadow policy gives that replica. If the shadow orders replicas rightly, time to first token grows with the
rank: the means say by how much, Spearman's rho how surely. Requests that failed, were retried, or had but one candidate
tell nothing of an order and are left out, and counted. Where the routing policy does choose, good ranks and bad ones
come at different times and loads, and the table says who chose.

The interval is Fisher's z with the variance of Bonett and Wright for Spearman's rho. It takes requests as independent;
those of one queue are not, so a run of some minutes should be read as a wider one.

References
----------
Bonett and Wright, Sample size requirements for estimating Pearson, Kendall and Spearman correlations, 2000.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import atanh, sqrt, tanh
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.core.numeric import Floats
from gorgo.errors import ReportError

#: Most requests, about a day of a busy proxy: two numbers each are stored.
MAX_ROWS = 1_000_000
#: A request's row is below 1 kB, a sample's with its terms below 2; more in one line is another file.
MAX_LINE_BYTES = 64 * 1024
#: No fleet is larger, and no first token later: such a number is a damaged one.
MAX_RANK, MAX_TTFT_MS = 100_000, 1e9
#: Fewer say nothing about the width of an interval.
MIN_FOR_INTERVAL = 10
#: The standard normal's 97.5 % quantile.
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class RankRow:
    """Requests whose replica had this rank; `ttft_ms_*` from request received to first content."""

    rank: int
    n: int
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p95: float


@dataclass(frozen=True, slots=True)
class RankTable:
    """Time to first token by the shadow's rank of the replica that was chosen.

    `rho` is Spearman's, of rank and time, `None` where one of them is always the same; `rho_low` and `rho_high` are its
    95 % interval, `None` below `MIN_FOR_INTERVAL` requests. `left_out` counts rows without a rank or a time.
    """

    shadow: str | None
    #: Requests per policy that routed them.
    policies: Mapping[str, int]
    n: int
    left_out: int
    rho: float | None
    rho_low: float | None
    rho_high: float | None
    rows: tuple[RankRow, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rank_table(rows: Iterable[Mapping[str, Any]], *, policy: str | None = None) -> RankTable:
    """Return the table of samples or requests (keys `shadow_rank`, `ttft_ms`; optional `shadow_policy`, `policy`,
    `status`, `error`, `retries`).

    Of several shadow policies the last one counts. `policy` omits requests that other policies routed.

    Example
    -------
    >>> table = rank_table({"shadow_rank": 1 + turn % 2, "ttft_ms": 100.0 * (1 + turn % 2)} for turn in range(20))
    >>> [(row.rank, row.n, row.ttft_ms_mean) for row in table.rows], table.rho
    ([(1, 10, 100.0), (2, 10, 200.0)], 1.0)
    """
    by_shadow: dict[str | None, list[tuple[int, float]]] = {}
    policies: dict[str | None, Counter[str]] = {}
    shadow: str | None = None
    rows_read = 0
    for entry in rows:
        rows_read += 1
        pair = _pair(entry)
        if pair is None or (policy is not None and entry.get("policy") != policy):
            continue
        shadow = entry.get("shadow_policy")
        by_shadow.setdefault(shadow, []).append(pair)
        policies.setdefault(shadow, Counter())[str(entry.get("policy") or "unknown")] += 1
    pairs = by_shadow.get(shadow, [])
    ranks, ttft_ms = np.array([rank for rank, _ in pairs], dtype=np.int64), np.array([ms for _, ms in pairs])
    rho = spearman(ranks.astype(np.float64), ttft_ms)
    low, high = _interval(rho, len(pairs))
    by_rank = tuple(_row(int(rank), ttft_ms[ranks == rank]) for rank in np.unique(ranks))
    return RankTable(
        shadow, dict(policies.get(shadow, Counter())), len(pairs), rows_read - len(pairs), rho, low, high, by_rank
    )


def spearman(first: Floats, second: Floats) -> float | None:
    """Spearman's rho, ties averaged; `None` where there is no telling."""
    if len(first) < 2:
        return None
    one, other = average_ranks(first), average_ranks(second)
    one, other = one - one.mean(), other - other.mean()
    spread = sqrt(float(one @ one) * float(other @ other))
    return None if spread == 0.0 else min(max(float(one @ other) / spread, -1.0), 1.0)


def average_ranks(values: Floats) -> Floats:
    """1 for the least; equal values share the mean of their places.

    >>> average_ranks(np.array([5.0, 1.0, 5.0])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    places: Floats = np.cumsum(counts) - (counts - 1) / 2
    return places[where]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a JSONL file of samples or requests. Raises `ReportError` with the line that is none, or too many."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ReportError(f"{path}: line {number} is longer than {MAX_LINE_BYTES} bytes; expected one request")
            if number > MAX_ROWS:
                raise ReportError(f"{path}: more than {MAX_ROWS:,} lines; expected a shorter log")
            if line.strip():
                yield _object(line, f"{path}: line {number}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise ReportError(f"{where}: expected a JSON object per line")
    return entry


def _pair(entry: Mapping[str, Any]) -> tuple[int, float] | None:
    """Rank and TTFT of a request that went well at its first replica."""
    rank, ttft_ms = entry.get("shadow_rank"), entry.get("ttft_ms")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        return None
    if not isinstance(ttft_ms, int | float) or isinstance(ttft_ms, bool) or not 0 <= ttft_ms <= MAX_TTFT_MS:
        return None
    failed = entry.get("error") is not None or entry.get("status") not in (None, 200)
    return None if failed or entry.get("retries") else (rank, float(ttft_ms))


def _row(rank: int, ttft_ms: Floats) -> RankRow:
    p50, p95 = np.percentile(ttft_ms, [50, 95])
    return RankRow(rank, len(ttft_ms), float(ttft_ms.mean()), float(p50), float(p95))


def _interval(rho: float | None, n: int) -> tuple[float | None, float | None]:
    if rho is None or n < MIN_FOR_INTERVAL:
        return None, None
    if abs(rho) == 1.0:
        return rho, rho
    half = _Z * sqrt((1 + rho * rho / 2) / (n - 3))
    return tanh(atanh(rho) - half), tanh(atanh(rho) + half)
