"""Several routers beside one: the rows of each printed table as they stand, and how many of them meet each target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gorgo.apps.several_routers.command import HIT_POINTS, RATIO, TARGETS_HEADER, WON_BACK
from tests.documents import tables
from tests.figures.marked import Cell, Table, View

#: Mooncake's conversation trace, as `gorgo datasets fetch mooncake-conversation` leaves it, packed.
_TRACE = "conversation_trace.jsonl.gz"
#: Groups and their options: a hundred routers take minutes for each seed.
_GROUPS = {
    "routers": f"--trace {_TRACE} --seeds 3",
    "delay": "--seeds 3",
    "replaced": "--seeds 3",
    "overload": "--seeds 3",
    "large": "--seeds 1",
}
COMMANDS = [
    f"python -m gorgo.apps.several_routers --only {name} {words} --out runs/several-routers"
    for name, words in _GROUPS.items()
]
_MISSES = ("hit", "TTFT", "E2E", "hit won back", "TTFT won back", "E2E won back")
_SUMMARY = re.compile(r"All simulated; (\d+) runs, (\d+) s of processor time")


def several_routers(results: Sequence[Any]) -> View:
    """Return what the page may show of the commands' tables."""
    lines = [line for printed in results for line in printed]
    found = [table for printed in results for table in tables("\n".join(printed))]
    summaries = [tuple(map(float, summary.groups())) for line in lines if (summary := _SUMMARY.search(line))]
    values = {
        "runs": sum(runs for runs, _ in summaries),
        "seconds": sum(seconds for _, seconds in summaries),
        "points": HIT_POINTS,
        "percent": 100 * (RATIO - 1),
        "won back, %": 100 * WON_BACK,
    }
    for header, rows in found:
        if tuple(header) == TARGETS_HEADER:
            values |= _counts("all", rows) | _counts("four", [row for row in rows if row[0].endswith("/4")])
    return View(tables=[_by_first_column(header, rows) for header, rows in found], lines=lines, values=values)


def _by_first_column(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    cells: dict[tuple[str, ...], dict[str, Cell]] = {
        (row[0],): dict(zip(header[1:], row[1:], strict=True)) for row in rows
    }
    return Table(labels=(header[0],), rows=cells)


def _counts(name: str, rows: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return how many rows there are, and how many do not miss each target."""
    missed = [row[-1].split(", ") for row in rows]
    return {f"{name}, rows": float(len(rows))} | {
        f"{name}, {target} met": float(sum(target not in each for each in missed)) for target in _MISSES
    }
