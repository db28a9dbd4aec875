"""The view of `tests.chaos.fast_failures`: shares of requests lost, before and after, a row per failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.fast_failures import BEFORE_S, FAILING_S, MIDDLE, START
from tests.figures.marked import Cell, Table, View

#: The last commit without the mends, whose proxy the first command measures.
BEFORE = "985ee88"
_COLUMNS = {START: "at the start", MIDDLE: "later"}


def fast_failures(results: Sequence[Any]) -> View:
    """Return the table of both results, the first one that of `BEFORE`; each share in percent of a row's requests."""
    before, after = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for column, result in (("before", before), ("after", after)):
        for row in result["rows"]:
            cells = rows.setdefault((row["fault"],), {})
            cells[f"{_COLUMNS[row['begins']]}, {column}"] = 100 * row["lost"] / row["requests"]
    return View(
        tables=[Table(labels=("fault",), rows=rows)],
        values=_values(after["rows"]) | {"seconds before": BEFORE_S, "seconds": FAILING_S},
        commits=frozenset({before["of"]}),
    )


def _values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "most lost": max(row["lost"] for row in rows),
        "least requests": min(row["requests"] for row in rows),
        "most requests": max(row["requests"] for row in rows),
        "failures": len({row["fault"] for row in rows}),
    }
