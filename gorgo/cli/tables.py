"""Plain aligned tables: columns by two spaces, numbers to the right, unknown as `-`. Easy to read, grep and cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Cell = str | int | float | None


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return the rows under their header.

    >>> print(table(["replica", "rtt ms"], [["us-0", 2.04], ["eu-0", None]]))
    replica  rtt ms
    us-0        2.0
    eu-0          -
    """
    columns = range(len(header))
    right = [all(not isinstance(row[column], str) for row in rows) and bool(rows) for column in columns]
    text = [list(header), *([_shown(cell) for cell in row] for row in rows)]
    width = [max(len(row[column]) for row in text) for column in columns]
    return "\n".join(
        "  ".join(
            row[column].rjust(width[column]) if right[column] else row[column].ljust(width[column])
            for column in columns
        ).rstrip()
        for row in text
    )


def wide_console(width: int) -> Console:
    """Return a console on stdout; on a pipe, which has no width, at least `width` columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(width, console.width))


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if cell.is_integer() and abs(cell) >= 1000 else f"{cell:,.1f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
