"""Result rows: the same keys for live and simulated runs, as JSON; their figures, and a table of them.

Owns the result row, the definitions of the figures beside latencies (time per token, throughput, goodput, error of
predictions) for simulated and live records alike, the bounds of a request served well, and the table. Unknown is None,
never 0.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.lab.sim.records import ClientRecord

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
        values = asdict(self)
        del values["prediction_error_ms"]["p99"]  # mean, p50 and p95 only
        return values


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


#: Bounds of a request served well: first token, last token.
TTFT_MS, E2E_S = 2000.0, 10.0


def is_good(record: ClientRecord) -> bool:
    """Return whether a request was served within the bounds."""
    if record.error is not None or record.ttft_ms is None or record.e2e_s is None:
        return False
    return record.ttft_ms <= TTFT_MS and record.e2e_s <= E2E_S


class ServedTally:
    """Sums over records as they end, in bounded memory per request.

    Example
    -------
    >>> from gorgo.lab.replay_client import ReplayRecord
    >>> tally = ServedTally()
    >>> tally.add(ReplayRecord(id="1", scheduled_s=0.0, sent_s=0.0, input_tokens=9, ttft_ms=100.0, e2e_s=0.5,
    ...     output_tokens=5, predicted_ttft_ms=90.0))
    >>> found = tally.fields()
    >>> found["tpot_ms"].mean, found["e2e_per_token_ms"].mean, found["tokens_per_s"], found["goodput"]
    (100.0, 100.0, 10.0, 1.0)
    >>> round(found["prediction_error_ratio"], 3)
    0.1
    """

    def __init__(self) -> None:
        self._offered = self._good = self._tokens = 0
        self._tpot_ms, self._e2e_per_token_ms, self._error_ratio = array("d"), array("d"), array("d")
        self._begun_s, self._ended_s = float("inf"), float("-inf")

    def add(self, record: ClientRecord) -> None:
        """Count one ended request; a failed one was offered, and has no other part."""
        self._offered += 1
        self._good += is_good(record)
        self._begun_s = min(self._begun_s, record.scheduled_s)
        if record.error is not None or record.ttft_ms is None or record.e2e_s is None:
            return
        self._ended_s = max(self._ended_s, record.scheduled_s + record.e2e_s)
        if record.predicted_ttft_ms is not None and record.ttft_ms > 0:
            self._error_ratio.append(abs(record.predicted_ttft_ms - record.ttft_ms) / record.ttft_ms)
        if record.output_tokens:
            self._tokens += record.output_tokens
            self._e2e_per_token_ms.append(1e3 * record.e2e_s / record.output_tokens)
        if record.output_tokens is not None and record.output_tokens > 1:
            self._tpot_ms.append((1e3 * record.e2e_s - record.ttft_ms) / (record.output_tokens - 1))

    def fields(self) -> dict[str, Any]:
        """Return the fields of a result row."""
        lasted_s = self._ended_s - self._begun_s
        return {
            "tpot_ms": Spread.of(self._tpot_ms),
            "e2e_per_token_ms": Spread.of(self._e2e_per_token_ms),
            "tokens_per_s": self._tokens / lasted_s if self._tokens and lasted_s > 0 else None,
            "goodput": self._good / self._offered if self._offered else None,
            "prediction_error_ratio": Spread.of(self._error_ratio).mean,
        }


@dataclass(frozen=True, slots=True)
class ResultColumn:
    """One column: its value, its format, and whether the best (lowest or highest) is bold.

    `title` has up to three lines: a measure, its part and its unit. Neighbours of one measure name it once.
    """

    title: tuple[str, ...]
    value: Callable[[ResultRow], float | None]
    form: str
    best: Callable[[Sequence[float]], float] | None = None
    #: Texts of values that are no amounts.
    words: Mapping[float, str] = field(default_factory=dict)

    def heading(self, before: ResultColumn | None) -> str:
        """Return the lines of the title behind the column `before`."""
        repeated = before is not None and len(self.title) > 1 and before.title[0] == self.title[0]
        return "\n".join(("", *self.title[1:]) if repeated else self.title)

    def cells(self, rows: Sequence[ResultRow], baselines: Collection[str]) -> list[str]:
        """Return a cell per row; `baselines` do not compete."""
        values = [self.value(row) for row in rows]
        competing = (row.policy not in baselines for row in rows)
        competitors = [
            value for value, competes in zip(values, competing, strict=True) if competes and value is not None
        ]
        best = self.best(competitors) if self.best is not None and len(competitors) > 1 else None
        return [
            self._cell(value, bold=value is not None and value == best and row.policy not in baselines)
            for value, row in zip(values, rows, strict=True)
        ]

    def _cell(self, value: float | None, *, bold: bool) -> str:
        if value is None:
            return "-"
        text = self.words.get(value) or format(value, self.form)
        return f"[bold]{text}[/bold]" if bold else text


def percent(share: float | None) -> float | None:
    """Return a share in percent; unknown stays unknown."""
    return None if share is None else 100 * share


def _spreads(
    name: str, title: str, unit: str, spread: Callable[[ResultRow], Spread], form: str
) -> dict[str, ResultColumn]:
    def value(part: str, row: ResultRow) -> float | None:
        figure: float | None = getattr(spread(row), part)
        return figure

    parts = ("mean", "p50", "p95", "p99")
    return {f"{name}-{part}": ResultColumn((title, part, unit), partial(value, part), form, min) for part in parts}


#: Every column by the name of `--column`.
COLUMNS: Mapping[str, ResultColumn] = {
    "queue": ResultColumn(("que-", "ue"), attrgetter("queue"), "d", words={True: "on", False: "off"}),
    "err": ResultColumn(("err",), attrgetter("errors"), "d"),
    **_spreads("ttft", "TTFT", "ms", attrgetter("ttft_ms"), ".0f"),
    **_spreads("e2e", "E2E", "s", attrgetter("e2e_s"), ".2f"),
    **_spreads("itl", "ITL", "ms", attrgetter("itl_ms"), ".0f"),
    **_spreads("tpot", "TPOT", "ms", attrgetter("tpot_ms"), ".1f"),
    **_spreads("e2e-per-token", "E2E/token", "ms", attrgetter("e2e_per_token_ms"), ".1f"),
    "tokens-per-s": ResultColumn(("out", "tokens", "/s"), attrgetter("tokens_per_s"), ".0f", max),
    "goodput": ResultColumn(("good-", "put", "%"), lambda row: percent(row.goodput), ".1f", max),
    "mape": ResultColumn(("pred.", "error", "%"), lambda row: percent(row.prediction_error_ratio), ".0f", min),
    "preemptions": ResultColumn(("pre-", "emp-", "ted"), attrgetter("preemptions"), "d"),
    "hit": ResultColumn(("hit", "real", "%"), lambda row: percent(row.cache_hit), ".1f", max),
    "hit-estimated": ResultColumn(("hit", "estim.", "%"), lambda row: percent(row.cache_hit_estimated), ".1f"),
}

#: Narrow enough for 80 characters with the longest policy's name.
DEFAULT = ("err", "ttft-p50", "ttft-p95", "ttft-p99", "e2e-p50", "e2e-p95", "itl-p95", "hit", "hit-estimated")
#: A row of a simulation says whether it queued.
SIMULATED = ("queue", *DEFAULT)
HITS = "hit: share of prompt tokens found in cache, as engines report it and as the router estimated"


def results_table(
    rows: Sequence[ResultRow], *, baselines: Collection[str] = (), columns: Sequence[str] = DEFAULT
) -> Group:
    """The rows side by side, the best of each measure in bold; shares in the order of the replicas' names.

    `baselines` are shown and do not compete. `columns` are names of `COLUMNS`.
    """
    replicas = sorted({name for row in rows for name in row.share})
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True, vertical="bottom")
    chosen = [COLUMNS[name] for name in columns]
    for before, column in zip([None, *chosen], chosen, strict=False):
        table.add_column(column.heading(before), justify="right", no_wrap=True)
    table.add_column("share\n%", no_wrap=True, vertical="bottom")
    cells_by_column = [column.cells(rows, baselines) for column in chosen]
    for row, *cells in zip(rows, *cells_by_column, strict=True):
        table.add_row(row.policy or "-", *cells, _shares(row, replicas))
    shares = f"share: {' / '.join(replicas)}" if replicas else ""
    notes = [HITS] if {"hit", "hit-estimated"} & set(columns) else []
    return Group(table, Text("\n" + "; ".join(filter(None, [*notes, shares])), style="dim"))


def _shares(row: ResultRow, replicas: Sequence[str]) -> str:
    return "/".join(f"{row.share.get(name, 0.0):.0%}".removesuffix("%") for name in replicas) or "-"
