"""The view of `tests.attacks`: the worst delay of `/health` under each attack, before and after, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.figures.marked import Cell, Table, View

#: The last commit without the bounds, whose proxy the first command attacks.
BEFORE = "985ee88"


def attacks(results: Sequence[Any]) -> View:
    """Return the table of both results, the first one that of `BEFORE`."""
    before, after = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for column, result in (("before", before), ("after", after)):
        for row in result["rows"]:
            if row["attack"] == "nothing":
                continue
            cells = rows.setdefault((f"{row['kind']}: {row['attack']}",), {})
            cells[f"{row['mib']} MiB, {column}, ms"] = row["delay_ms"]
            if row["mib"] == 32:
                cells[f"memory, {column}, MiB"] = row["memory_mib"]
    worst = {
        column: max(row["delay_ms"] for row in found["rows"])
        for column, found in zip(("before", "after"), results, strict=True)
    }
    idle = max(row["delay_ms"] for row in after["rows"] if row["attack"] == "nothing")
    late = sum(row["delay_ms"] > 50 for row in after["rows"])
    values = {"worst before": worst["before"], "worst after": worst["after"], "idle": idle, "attacks": float(len(rows))}
    return View(
        tables=[Table(labels=("attack",), rows=rows)],
        values=values | {"bound": 50.0, "over the bound": float(late), "MiB": 32.0, "least MiB": 1.0},
        commits=frozenset({before["of"]}),
    )
