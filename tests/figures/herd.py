"""The rows of sessions that share a system prompt: every policy side by side, what the two terms change, the tuner.

`python -m tests.figures.herd NAME ...` prints the tables of the pages, after `python -m tests.figures record NAME ...`.
"""

# ruff: noqa: T201 - a command says what it made

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.windows import SHORT_SIGHTED
from gorgo.lab.simulate import FLOOR, PINNED
from gorgo.policies.registry import OURS
from tests.documents import tables
from tests.figures.marked import Cell, Rows, Table, View, numbers_of
from tests.figures.stored import read_stored

_COMMAND = "python -m experiments --system herd --only {} --seeds {} --jobs 1"
#: Commands by the name of the figure.
COMMANDS: Mapping[str, str] = {
    **{name: _COMMAND.format(name, 5) for name in ("herd", "herd-pools", "herd-regions", "herd-regions-pools")},
    "herd-changing": _COMMAND.format("herd-changing", 5),
    "herd-tuner": _COMMAND.format("herd-tuner", 3),
}
CHANGING = ("traffic", "fleet", "KV pools")
LABELS = ("system prompts", "gap, s", "KV pools")
WITHOUT = "without `room` and `shared`"
#: Rows of the means that a page shows, by its column.
MEANS: Mapping[str, str] = {
    "`floor`": FLOOR,
    "`pinned`": PINNED,
    f"`{OURS}`": OURS,
    WITHOUT: SHORT_SIGHTED,
    **{f"`{name}`": name for name in ("preble-e2", "prefix-cache-and-load", "lmetric", "gorgo", "mooncake")},
}
#: Columns of the ratios: what the figure of the default is divided by.
_AGAINST: Mapping[str, str] = {"floor": "`floor`", "pinned": "`pinned`", SHORT_SIGHTED: WITHOUT}
BEST = "best other policy"
_ON = re.compile(r"steady, (\d+) system prompts?, a request per ([\d.]+) s, load 1, \w+(, 1/4 of each pool)?")
_SHARES = re.compile(r"largest share ([\d.]+) after ([\d.]+)")
_MOVED = re.compile(r"moved in (\d) of (\d)")


def herd(results: Sequence[Any]) -> View:
    """Return two tables: means of a few policies, and the ratios of the default; each has a row per setting."""
    (lines,) = results
    ratios: dict[tuple[str, ...], dict[str, Cell]] = {}
    means: dict[tuple[str, ...], dict[str, Cell]] = {}
    shares: dict[tuple[str, ...], dict[str, float]] = {}
    shown = {name: column for column, name in MEANS.items()}
    for header, rows in tables("\n".join(lines)):
        for on, of, *rest in rows:
            if header[1] == "of":
                against, figure, _, ratio, _ = rest
                cells = ratios.setdefault(_label(on), {})
                cells[f"{figure}, {_AGAINST.get(against, BEST)}"] = list(map(float, numbers_of(ratio)))
                if against not in _AGAINST:
                    cells[f"best other, {figure}"] = f"`{against}`"
            elif of in shown:
                means.setdefault(_label(on), {})[shown[of]] = [float(rest[0]), float(rest[2])]
                if of in (OURS, "gorgo"):
                    shares.setdefault(_label(on), {})[of] = float(rest[-1])
    for label, found in shares.items():
        means[label]["largest share, %"] = [found[OURS], found["gorgo"]]
    values = _ends(ratios) | _met(lines)
    return View(tables=[Table(labels=LABELS, rows={key: means[key] | ratios[key] for key in ratios})], values=values)


def changing(results: Sequence[Any]) -> View:
    """Return a table of the default's ratios to the best other policy and to `pinned`, a row per setting."""
    (lines,) = results
    ratios: dict[tuple[str, ...], dict[str, Cell]] = {}
    for header, rows in tables("\n".join(lines)):
        for on, _, against, figure, _, ratio, *_ in rows if header[1] == "of" else ():
            traffic, place = on.removeprefix("changing, ").split(", load 1, ")
            fleet, *part = place.split(", ")
            cells = ratios.setdefault((traffic, fleet, "a quarter" if part else "whole"), {})
            cells[f"{figure}, {_AGAINST.get(against, BEST)}"] = list(map(float, numbers_of(ratio)))
            if against not in _AGAINST:
                cells[f"best other, {figure}"] = f"`{against}`"
    return View(tables=[Table(labels=CHANGING, rows=ratios)], values=_ends(ratios) | _met(lines))


def tuner(results: Sequence[Any]) -> View:
    """Return the numbers of a sentence: in how many runs the search moved the weights, ratios, and the shares."""
    (lines,) = results
    values: dict[str, float] = {}
    for _, rows in tables("\n".join(lines)):
        for text, _, ratio, *_, note in rows:
            values |= {f"{text}, {end}": float(n) for end, n in zip("=<>", numbers_of(ratio), strict=True)}
            if shares := _SHARES.search(note):
                values |= {f"{text}, {n}": 100 * float(share) for n, share in enumerate(shares.groups())}
            if moved := _MOVED.search(note):
                values |= {f"{text}, moved {n}": float(count) for n, count in enumerate(moved.groups())}
    return View(values=values | {"four times the load": 4.0})


#: How each figure is read.
VIEWS: Mapping[str, Callable[[Sequence[Any]], View]] = {
    **dict.fromkeys(COMMANDS, herd), "herd-changing": changing, "herd-tuner": tuner,
}  # fmt: skip


def _label(on: str) -> tuple[str, str, str]:
    match = _ON.fullmatch(on)
    assert match is not None, on
    return match[1], match[2], "a quarter" if match[3] else "whole"


def _ends(ratios: Rows) -> dict[str, float]:
    """Return the least and the most of each column."""
    columns: dict[str, list[float]] = {}
    for cells in ratios.values():
        for column, cell in cells.items():
            if isinstance(cell, list):
                columns.setdefault(column, []).append(cell[0])
    return {
        f"{end} {column}": value
        for column, found in columns.items()
        for end, value in (("least", min(found)), ("most", max(found)))
    }


def _met(lines: Sequence[str]) -> dict[str, float]:
    (counts,) = [found for line in lines if (found := re.match(r"(\d+) of (\d+) targets met", line))]
    return {"targets met": float(counts[1]), "targets": float(counts[2])}


def page_table(view: View, columns: Sequence[str], *, pools: str | None = None) -> Iterator[str]:
    """Yield a page's table of these columns; of one size of the pools, without its column."""
    (table,) = view.tables
    header = [*table.labels, *columns]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for label, cells in table.rows.items():
        if pools in (None, label[2]):
            shown = (_printed(cells[column], column) if column in cells else "" for column in columns)
            yield f"| {' | '.join([*label, *shown])} |"


def _printed(cell: Cell, column: str) -> str:
    if not isinstance(cell, list):
        return str(cell)
    if column.endswith("%") or column in MEANS:
        return ", ".join(f"{value:,.0f}" for value in cell)
    return f"{cell[0]:.3f} [{cell[1]:.3f}, {cell[2]:.3f}]"


def main() -> None:
    for name in sys.argv[1:]:
        view = VIEWS[name](read_stored(name).results)
        (table,) = view.tables
        first = next(iter(table.rows.values()))
        means = [column for column in first if column in MEANS or column.endswith("%")]
        print(f"\n{name}: {view.values}\n")
        print("\n".join(page_table(view, means)), "\n")
        print("\n".join(page_table(view, [column for column in first if column not in means])))


if __name__ == "__main__":
    main()
