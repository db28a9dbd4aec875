"""Result rows as a table: named columns, of which the default ones fit a terminal.

Owns the columns and their formats; the rows are `gorgo.lab.results`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gorgo.lab.results import ResultRow, Spread


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
        known = [value for value, competes in zip(values, competing, strict=True) if competes and value is not None]
        best = self.best(known) if self.best is not None and len(known) > 1 else None
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
        found: float | None = getattr(spread(row), part)
        return found

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
