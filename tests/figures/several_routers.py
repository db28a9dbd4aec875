"""Several routers beside one: the rows of each printed table, and how many of four routers meet each target; and one
router of several processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from experiments.systems.several import HIT_POINTS, RATIO, TARGETS_HEADER, WON_BACK
from tests.documents import tables
from tests.figures.marked import Cell, Table, View, numbers_of
from tests.figures.wording import SEVERAL_ROUTERS, in_words

#: Mooncake's conversation trace, as `gorgo datasets fetch mooncake-conversation` leaves it, packed.
_TRACE = "conversation_trace.jsonl.gz"
#: Groups and their options: three seeds where targets are judged. Eight routers take longer than all of the others.
_GROUPS: Sequence[tuple[str, str]] = (
    ("routers", f"--trace {_TRACE} --count 4 --seeds 3"),
    ("routers", f"--trace {_TRACE} --count 2 --count 8 --seeds 1"),
    ("overload", "--seeds 3"),
    ("replaced", "--seeds 3"),
    ("delay", "--seeds 1"),
)
COMMANDS = [f"python -m experiments --system routers --only {name} {words}" for name, words in _GROUPS]
PROCESSES = "python -m experiments --system routers --only processes --seeds 5 --jobs 1"
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
        four = [row for row in rows if row[0].endswith("/4")]
        if tuple(header) == TARGETS_HEADER and four:
            values |= _counts(four)
    return in_words(View(tables=list(_by_first_column(found)), lines=lines, values=values), SEVERAL_ROUTERS)


def _by_first_column(found: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]) -> Iterator[Table]:
    """Yield a table per first column: one command has other rows of a table than the next."""
    by_label: dict[str, dict[tuple[str, ...], dict[str, Cell]]] = {}
    for header, rows in found:
        cells = by_label.setdefault(header[0], {})
        cells |= {(row[0],): dict(zip(header[1:], map(_cell, row[1:]), strict=True)) for row in rows}
    for label, cells in by_label.items():
        yield Table(labels=(label,), rows=cells)


def _cell(text: str) -> Cell:
    """Return the numbers of a cell in their order, or the text of one without."""
    return [float(number.replace(",", "")) for number in numbers_of(text)] or text


def _counts(rows: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return how many rows of four routers there are, and how many do not miss each target."""
    missed = [row[-1].split(", ") for row in rows]
    return {"rows of four": float(len(rows))} | {
        f"{target} met": float(sum(target not in each for each in missed)) for target in _MISSES
    }


def processes(results: Sequence[Any]) -> View:
    """Return a row per number of processes: cached tokens found, both p95, at half the load and at all of it."""
    (lines,) = results
    ((_, rows),) = tables("\n".join(lines))
    names = ("cached tokens found, %", "p95 TTFT, ms", "p95 E2E, s")
    shown: dict[tuple[str, ...], dict[str, Cell]] = {
        (count,): {name: list(pair) for name, pair in zip(names, zip(*map(_figures, cells), strict=True), strict=True)}
        for count, *cells in rows
    }
    return View(tables=[Table(labels=("processes",), rows=shown)])


def _figures(cell: str) -> list[float]:
    return [float(figure) for figure in cell.split(" / ")]
