"""The rows of the page on what-if questions: how many intervals cover the truth.

`python -m tests.figures.whatif` writes the table of the page, after `python -m tests.figures record whatif-coverage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.documents import DOCS
from tests.figures.marked import Cell, Table, View
from tests.figures.stored import read_stored
from tests.figures.written import write_table

NAME = "whatif-coverage"
COMMAND = "python -m tests.bench.whatif_coverage"
#: Columns by estimator.
_COVERS = {"ips": "IPS covers", "snips": "SNIPS covers", "dr": "DR covers"}


def whatif_coverage(results: Sequence[Any]) -> View:
    """Return a row per weight set and outcome, and the counts of all rows of an estimator."""
    (found,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    values: dict[str, float] = {"of each, %": 95.0}
    for row in found:
        ((name, value),) = row["weights"].items()
        cells = rows.setdefault((f"`{name}` {value:g}, {row['outcome']}",), {"truth": f"{row['truth']:+.1f}"})
        if row["estimator"] == "dr":
            cells["DR, mean"] = f"{row['mean']:+.1f}"
        cells[_COVERS[row["estimator"]]] = f"{row['covered']} of {row['judged']}, ±{row['half']:.1f}"
        values |= {f"{name}: {key}": float(row[key]) for key in ("judged", "refuted", "unsupported")}
    order = ("truth", "DR, mean", *_COVERS.values())
    rows = {label: {column: cells[column] for column in order} for label, cells in rows.items()}
    for estimator in _COVERS:
        values |= _counts(estimator, [row for row in found if row["estimator"] == estimator])
    return View(tables=[Table(labels=("weights, outcome",), rows=rows)], values=values)


def _counts(estimator: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    shares = [100 * row["covered"] / row["judged"] for row in rows]
    covered, judged = (sum(row[key] for row in rows) for key in ("covered", "judged"))
    return {
        f"{estimator}: covered": covered,
        f"{estimator}: intervals": judged,
        f"{estimator}: %": 100 * covered / judged,
        f"{estimator}: least, %": min(shares),
        f"{estimator}: most, %": max(shares),
    }


def main() -> None:
    (table,) = whatif_coverage(read_stored(NAME).results).tables
    write_table(DOCS / "whatif.md", NAME, table)


if __name__ == "__main__":
    main()
