"""Marked parts of a page against stored results, number by number, whatever the words around them say.

    <!-- figures: NAME -->      what follows, up to `<!-- /figures -->`, shows the stored result NAME (or several: A, B)
    <!-- not stored: NAME -->   what follows was measured, and no result is stored: `table.NOT_STORED` says why

Owns the marks and the comparison. In a table a row is found by the cells of its label columns, and each other cell is
held against the stored value of its column; in a fenced block each line with a digit was printed as it stands; in prose
each number is one of the stored values. A number agrees if the stored value rounds to it at the printed precision.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

#: What a cell has to say: this text, this number, these numbers in order, or no number at all.
Cell = str | float | Sequence[float] | None
Rows = Mapping[tuple[str, ...], Mapping[str, Cell]]

_MARK = re.compile(r"^<!-- (figures|not stored): ([\w., -]+?) -->$|^<!-- (/figures) -->$")
_NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z][/-])(?:(?<!\d)[-+])?\d[\d,]*(?:\.\d+)?(?=x?(?!\w|\.\d))")
_COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")
_DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
#: Of prose: code, links' targets, and what is between angle brackets.
_ASIDE = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows by the cells under `labels`; of each row its other cells by their column's header."""

    labels: Sequence[str]
    rows: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What pages may show of a result.

    Parameters
    ----------
    tables:
        A table of a page is held against the first whose label columns it has, and against those with the same ones.
    lines:
        As a command printed them.
    values:
        Numbers of prose, by what they mean.
    commits, dates:
        Where the result is from; any other that is named is wrong.
    """

    tables: Sequence[Table] = ()
    lines: Sequence[str] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    commits: frozenset[str] = frozenset()
    dates: frozenset[str] = frozenset()

    @classmethod
    def joined(cls, views: Sequence[View]) -> View:
        """All of them, for a part that shows several results."""
        return cls(
            tables=[table for view in views for table in view.tables],
            lines=[line for view in views for line in view.lines],
            values={f"{number} {name}": v for number, view in enumerate(views) for name, v in view.values.items()},
            commits=frozenset().union(*(view.commits for view in views)),
            dates=frozenset().union(*(view.dates for view in views)),
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A marked part of a page; `line` is that of its mark."""

    stored: bool
    names: tuple[str, ...]
    line: int
    text: str


def parts_of(text: str) -> tuple[list[Part], str]:
    """Marked parts in order, and the page without them. Raises `ValueError` for a mark without its other half."""
    parts: list[Part] = []
    opened: tuple[bool, tuple[str, ...], int] | None = None
    inside: list[str] = []
    outside: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _MARK.match(line)
        if mark is None:
            (outside if opened is None else inside).append(line)
        elif mark[3] is None:
            if opened is not None:
                raise ValueError(f"line {number}: a mark within that of line {opened[2]}")
            opened = (mark[1] == "figures", tuple(re.split(r",\s*", mark[2])), number)
        else:
            if opened is None:
                raise ValueError(f"line {number}: closes nothing")
            parts.append(Part(*opened, "\n".join(inside)))
            opened, inside = None, []
    if opened is not None:
        raise ValueError(f"line {opened[2]}: not closed")
    return parts, "\n".join(outside)


def problems(text: str, view: View) -> list[str]:
    """What the text says that the view does not, one sentence each."""
    found: list[str] = []
    numbers = 0
    for kind, lines in _pieces(text):
        numbers += sum(bool(re.search(r"\d", line)) for line in lines)
        if kind == "table":
            found += _in_table(lines, view)
        elif kind == "fence":
            printed = {line.rstrip() for line in view.lines}
            found += [f"not printed: {line}" for line in lines if re.search(r"\d", line) and line not in printed]
        else:
            found += _in_prose(lines, view)
    return found if numbers else [*found, "no figure in it"]


def numbers_of(text: str) -> list[str]:
    """The numbers of a text as printed; those that are part of a word (p95, 2c, L40S), of code or a link are none."""
    return _NUMBER.findall(_DATE.sub("", _COMMIT.sub("", _ASIDE.sub("", text))))


def agrees(printed: str, value: float) -> bool:
    """Whether the value rounds to what is printed.

    Example
    -------
    >>> agrees("93.0", 92.96), agrees("93.1", 92.96), agrees("1,054", 1054.4)
    (True, False, True)
    """
    digits = printed.replace(",", "")
    places = len(digits.partition(".")[2])
    return abs(value - float(digits)) <= 0.5 * 10.0**-places + 1e-9


def tables_outside(text: str) -> list[list[str]]:
    """Header of each table whose cells are mostly figures: such a table was measured."""
    found = []
    for kind, lines in _pieces(text):
        if kind == "table":
            header, *rows = [cells(line) for line in lines if not re.fullmatch(r"[|\s:-]+", line)]
            shares = [_share_of_figures(column) for column in zip(*rows, strict=True)][1:]
            if shares and max(shares) > 0.5:
                found.append(header)
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _share_of_figures(column: Sequence[str]) -> float:
    """Of cells that begin with a number which is not code."""
    return sum(re.match(r"[*+-]*\d", cell) is not None for cell in column) / len(column)


def _pieces(text: str) -> Iterator[tuple[str, list[str]]]:
    """Runs of lines of one kind: table, fence or prose."""
    lines, fenced = iter(text.splitlines()), False
    kind, run = "prose", list[str]()
    for line in lines:
        if line.startswith("```"):
            yield kind, run
            fenced, run = not fenced, []
            kind = "fence" if fenced else "prose"
            continue
        now = "fence" if fenced else "table" if line.startswith("|") else "prose"
        if now != kind:
            yield kind, run
            kind, run = now, []
        run.append(line)
    yield kind, run


def _in_table(lines: Sequence[str], view: View) -> Iterator[str]:
    header, _, *rows = [cells(line) for line in lines]
    table = next((table for table in view.tables if set(table.labels) <= set(header)), None)
    if table is None:
        yield f"no stored table has rows named by columns of | {' | '.join(header)} |"
        return
    of_label: dict[tuple[str, ...], Mapping[str, Cell]] = {}
    for other in view.tables:
        if tuple(other.labels) == tuple(table.labels):
            of_label = {**other.rows, **of_label}
    if len(set(header)) < len(header):
        yield f"two columns of one name in | {' | '.join(header)} |"
    above: dict[str, str] = {}
    for row in rows:
        shown = dict(zip(header, row, strict=True))
        above |= {label: shown[label] for label in table.labels if shown[label]}
        label = tuple(above[name] for name in table.labels)
        stored = of_label.get(label)
        if stored is None:
            yield f"no stored row {' | '.join(label)}"
            continue
        for name, cell in shown.items():
            if name not in table.labels and (name not in stored or not _says(cell, stored[name])):
                yield f"{' | '.join(label)}, {name}: {cell}, stored {stored.get(name, 'nothing')}"


def _says(cell: str, stored: Cell) -> bool:
    if isinstance(stored, str):
        return cell == stored
    values = [] if stored is None else [stored] if isinstance(stored, int | float) else list(stored)
    shown = numbers_of(cell)
    return len(shown) == len(values) and all(map(agrees, shown, values))


def _in_prose(lines: Iterable[str], view: View) -> Iterator[str]:
    text = "\n".join(lines)
    yield from (f"commit {found}, stored {_words(view.commits)}" for found in set(_COMMIT.findall(text)) - view.commits)
    yield from (f"date {found}, stored {_words(view.dates)}" for found in set(_DATE.findall(text)) - view.dates)
    for number in numbers_of(text):
        if not any(agrees(number, value) for value in view.values.values()):
            yield f"{number} is no stored value"


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
