"""`python -m tests.figures.readme`: the README's tables and picture and the first tables of the results, made from the
stored results.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gorgo.config.atomic import PUBLIC, write_atomically
from tests.documents import DOCS, ROOT
from tests.figures.comparison import BURST_HEADER, HEADER, PICTURE, picture
from tests.figures.marked import Table
from tests.figures.table import view_of
from tests.figures.written import write_table

README, RESULTS = ROOT / "README.md", DOCS / "results.md"


@dataclass(frozen=True, slots=True)
class Shown:
    """A table of a page: the figures that its mark names, and its first column."""

    page: Path
    figures: str
    column: str


SHOWN = (
    Shown(README, "demo", "policy"),
    Shown(README, "comparison, burst", HEADER[0]),
    Shown(RESULTS, "comparison", HEADER[0]),
    Shown(RESULTS, "burst", BURST_HEADER[0]),
)


def table_of(shown: Shown) -> Table:
    """Return the rows that the figures have under this column, in their order."""
    tables = view_of(shown.figures.split(", ")).tables
    rows = [row for table in tables if tuple(table.labels) == (shown.column,) for row in table.rows.items()]
    return Table(labels=(shown.column,), rows=dict(rows))


def main() -> None:
    write_atomically(PICTURE, picture().encode(), mode=PUBLIC)
    for shown in SHOWN:
        write_table(shown.page, shown.figures, table_of(shown))


if __name__ == "__main__":
    main()
