"""The words of the pages for what the commands print: columns, rows and verdicts in full.

Owns the translations. Commands print narrow tables for a terminal; a page has the room to say what a column is. A view
is made of the printed words, and `in_words` gives it those of the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.figures.marked import Cell, Table, View

#: Column of the claims -> column of the page.
CLAIMS = {
    "on": "traffic and load",
    "of": "policy",
    "against": "compared with",
    "of / against [95 %]": "ratio [95 % interval]",
    "met": "result",
    "hit %": "cached tokens found, %",
}
FLEET = {"all": "all figures", "rho": "rank correlation"}
LEARNED_ROUTERS = {
    "on": "fleet and traffic",
    "against": "baseline",
    "p99": "p99 TTFT, ms",
    "MAPE %": "error of TTFT predictions, %",
    "rho": "rank correlation",
    "hit %": "cached tokens found, %",
    "model TTFT off, %": "mean error of TTFT, %",
    "median, %": "median error of TTFT, %",
    "model TPOT off, %": "mean error of TPOT, %",
    "TPOT median, %": "median error of TPOT, %",
}
CACHE_SOURCES = {
    "p95 TTFT, ms / hit, %": "traffic (p95 TTFT, ms / cached tokens found, %)",
    "mean / p99 TTFT, ms / hit, %": "traffic (mean / p99 TTFT, ms / cached tokens found, %)",
    "bytes a request": "traffic (bytes of reports per request)",
    "from, s": "from second",
    "begins": "what begins then",
    "evictions on": "traffic",
    "with": "source",
}
SEVERAL_ROUTERS = {
    "hit, % / p95 TTFT, ms / p95 E2E, s": "traffic, load and routers",
    "store against one": "several routers with a store against one",
    "alone": "no store",
    "store": "with a store",
    "one": "one router",
    "hit, points": "cached tokens found, points",
    "hit, % / p95 TTFT, ms": "what replaces the killed router",
    "goodput, %": "load",
    "reports late by": "routers, and delay of their reports",
    "hit, %": "cached tokens found, %",
}
TUNING = {"": "result"}

#: A whole cell or its beginning, in order, and what the page says. `~`: the interval contains the target.
_CELLS: Sequence[tuple[str, str]] = (
    (r"^April (\d) like\b", r"window of April \1"),
    (r"^conversation trace\b", "Mooncake conversations"),
    (r"^geometric mean of (\d+)$", r"geometric mean of \1 rows"),
    (r"^WildChat$", "WildChat, the authors' rerun"),
    (r"^<= ", "at most "),
    (r"\bpass ~$", "met, open"),
    (r"\bpass$", "met"),
    (r"\bmissed ~$", "missed, open"),
    (r"^(ART-Chat-like|conversation)@([\d.]+)/(\d+)$", r"\1, load \2, \3 routers"),
    (r"^store$", "a router with the store"),
    (r"^no store$", "a router without a store"),
    (r"^not replaced$", "nothing"),
    (r"^one$", "one router"),
    (r"^alone, 1,000 routes$", "four without a store, 1,000 routes each"),
    (r"^alone$", "four without a store"),
    (r"^([\d.]+ s), 1,000 routes$", r"four, after \1, 1,000 routes each"),
    (r"^([\d.]+ s)$", r"four, after \1"),
    (r"^(art-chat-\w+), load ([\d.]+): (\S+) tuned in mode (\w+), frozen / (\S+), median p95 TTFT$",
     r"`\1` at load \2: `\3`, tuned in mode `\4` and frozen, over `\5`, p95 TTFT"),
    (r"^(gorgo\S*), (\w+): the whole run / fixed defaults, (p95 \w+)$",
     r"`\1`, the whole run in mode `\2` over fixed defaults, \3"),
    (r"^(gorgo\S*) from ([\w. ,]+), (left alone|tuned by switchback) / defaults, p95 E2E after 10,000 requests$",
     r"`\1` from \2, \3, over the defaults, p95 E2E after 10,000 requests"),
)  # fmt: skip


def plain(text: str) -> str:
    """Return what the page says for a cell.

    Example
    -------
    >>> plain("April 7 like, load 0.333"), plain("0.909 [0.889, 0.929] pass ~"), plain("<= 0.90")
    ('window of April 7, load 0.333', '0.909 [0.889, 0.929] met, open', 'at most 0.90')
    """
    for pattern, words in _CELLS:
        text = re.sub(pattern, words, text)
    return text


def in_words(view: View, columns: Mapping[str, str]) -> View:
    """Return the view with the columns and cells of its tables in the words of the page."""
    return replace(view, tables=[_table(table, columns) for table in view.tables])


def _table(table: Table, columns: Mapping[str, str]) -> Table:
    return Table(
        labels=[columns.get(name, name) for name in table.labels],
        rows={
            tuple(map(plain, label)): {columns.get(name, name): _cell(cell) for name, cell in cells.items()}
            for label, cells in table.rows.items()
        },
    )


def _cell(cell: Cell) -> Cell:
    return plain(cell) if isinstance(cell, str) else cell
