"""What became of the faults: a table of those that no test saw, and the share that died by package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.mutants.choice import PACKAGES
from tests.mutants.faults import Fault
from tests.mutants.trial import Tried, Verdict

ALIVE: tuple[Verdict, ...] = ("survived", "not reached")


@dataclass(frozen=True, slots=True)
class Row:
    """A fault and what became of it."""

    fault: Fault
    tried: Tried

    @property
    def alive(self) -> bool:
        return self.tried.verdict in ALIVE


def share_killed(rows: Sequence[Row]) -> float:
    """Of 1; a fault that no test reaches counts as alive. None of none is 1."""
    return 1 - sum(row.alive for row in rows) / len(rows) if rows else 1.0


def shown(rows: Sequence[Row]) -> RenderableType:
    """Survivors with their lines before and after, and the shares."""
    alive = sorted((row for row in rows if row.alive), key=lambda row: (row.fault.path, row.fault.line))
    return Group(*map(_survivor, alive), _table("package", rows, package_of), _table("operator", rows, _operator))


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Everything but the whole text of the files."""
    flat = [{**asdict(row.fault), **asdict(row.tried)} for row in rows]
    return [{name: value for name, value in one.items() if name != "text"} for one in flat]


def package_of(row: Row) -> str:
    """Of `PACKAGES`, or the first two folders."""
    path = row.fault.path
    return next((name for name in PACKAGES if path.startswith(f"{name}/")), "/".join(path.split("/")[:2]))


def _operator(row: Row) -> str:
    return "listed" if row.fault.key.startswith("known: ") else row.fault.label


def _survivor(row: Row) -> Text:
    fault, tried = row.fault, row.tried
    head = f"{fault.path}:{fault.line}  {fault.label}, {tried.verdict}, {tried.tests} tests in {tried.seconds:.0f} s\n"
    return Text(head + "".join(_prefixed("-", fault.old)) + "".join(_prefixed("+", fault.new)))


def _prefixed(sign: str, text: str) -> Iterator[str]:
    return (f"    {sign} {line}\n" for line in text.splitlines())


def _table(what: str, rows: Sequence[Row], part: Callable[[Row], str]) -> Table:
    table = Table(what, *(("faults", "failed", "timed out", "survived", "not reached", "killed")), box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in [*sorted({part(row) for row in rows}), "all"]:
        found = [row for row in rows if name in ("all", part(row))]
        counts = [sum(row.tried.verdict == one for row in found) for one in ("failed", "timed out", *ALIVE)]
        table.add_row(name, *map(str, [len(found), *counts]), f"{share_killed(found):.1%}")
    return table
