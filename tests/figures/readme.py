"""`python -m tests.figures.readme`: the tables and the picture of the README, made from the stored results."""

from __future__ import annotations

from gorgo.config.atomic import PUBLIC, write_atomically
from tests.documents import ROOT
from tests.figures.comparison import BURST_HEADER, PICTURE, picture
from tests.figures.marked import Table
from tests.figures.table import view_of
from tests.figures.written import write_table

README = ROOT / "README.md"
#: Of each figure the table that the README has, by its first column.
SHOWN = {"demo": "policy", "comparison": "On what", "burst": BURST_HEADER[0], "claims": "missed target"}


def table_of(name: str) -> Table:
    (table,) = [table for table in view_of([name]).tables if tuple(table.labels) == (SHOWN[name],)]
    return table


def main() -> None:
    write_atomically(PICTURE, picture().encode(), mode=PUBLIC)
    for name in SHOWN:
        write_table(README, name, table_of(name))


if __name__ == "__main__":
    main()
