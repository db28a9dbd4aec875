"""Result rows: the same keys for live and simulated runs, as JSON and as a table.

Owns the result row and its table. Unknown is None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

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
    failed requests by cause, see `gorgo.apps.failures`.
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


@dataclass(frozen=True, slots=True)
class _ResultColumn:
    """One column of the table: its value, its format, and whether the best (lowest or highest) is bold."""

    title: str
    value: Callable[[ResultRow], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = None

    def cells(self, rows: Sequence[ResultRow], baselines: Collection[str]) -> list[str]:
        values = [self.value(row) for row in rows]
        competing = (row.policy not in baselines for row in rows)
        known = [value for value, competes in zip(values, competing, strict=True) if competes and value is not None]
        best = self.best(known) if self.best is not None and len(known) > 1 else None
        return [
            self._cell(value, bold=value is not None and value == best and row.policy not in baselines)
            for value, row in zip(values, rows, strict=True)
        ]

    def _cell(self, value: float | None, *, bold: bool) -> str:
        if value is None:
            return "-"
        text = format(value, self.form)
        return f"[bold]{text}[/bold]" if bold else text


#: Narrow enough for 80 characters with the longest policy's name.
_COLUMNS = (
    _ResultColumn("err", lambda row: row.errors, "d"),
    _ResultColumn("TTFT\np50\nms", lambda row: row.ttft_ms.p50, ".0f", min),
    _ResultColumn("\np95\nms", lambda row: row.ttft_ms.p95, ".0f", min),
    _ResultColumn("\np99\nms", lambda row: row.ttft_ms.p99, ".0f", min),
    _ResultColumn("E2E\np50\ns", lambda row: row.e2e_s.p50, ".2f", min),
    _ResultColumn("\np95\ns", lambda row: row.e2e_s.p95, ".2f", min),
    _ResultColumn("ITL\np95\nms", lambda row: row.itl_ms.p95, ".0f", min),
    _ResultColumn("hit\nreal\n%", lambda row: _percent(row.cache_hit), ".1f", max),
    _ResultColumn("\nestim.\n%", lambda row: _percent(row.cache_hit_estimated), ".1f"),
)


HITS = "hit: share of prompt tokens found in cache, as engines report it and as the router estimated"


def results_table(rows: Sequence[ResultRow], *, baselines: Collection[str] = ()) -> Group:
    """The rows side by side, the best of each measure in bold; shares in the order of the replicas' names.

    `baselines` are shown and do not compete.
    """
    replicas = sorted({name for row in rows for name in row.share})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True, vertical="bottom")
    for column in _COLUMNS:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("share\n%", no_wrap=True, vertical="bottom")
    columns = [column.cells(rows, baselines) for column in _COLUMNS]
    for row, *cells in zip(rows, *columns, strict=True):
        table.add_row(row.policy or "-", *cells, _shares(row, replicas))
    shares = f"; share: {' / '.join(replicas)}" if replicas else ""
    return Group(table, Text(f"\n{HITS}{shares}", style="dim"))


def _shares(row: ResultRow, replicas: Sequence[str]) -> str:
    return "/".join(f"{row.share.get(name, 0.0):.0%}".removesuffix("%") for name in replicas) or "-"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
