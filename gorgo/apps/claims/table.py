"""Tables of verdicts, for a terminal and as Markdown: the same cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from gorgo.apps.claims.verdict import ClaimVerdict

#: Columns behind a verdict's labels.
HEADER_END = ("target", "ratio [95 %]", "met")
#: Below a table that has the mark.
UNSURE = "`~`: the interval contains the target; more seeds could turn the verdict."


@dataclass(frozen=True, slots=True)
class TableSection:
    """One table with its title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def sections(verdicts: Sequence[ClaimVerdict], header: Sequence[str], titles: Mapping[str, str]) -> list[TableSection]:
    """Return a section per group, in the order of the verdicts."""
    return [
        TableSection(titles.get(group, group), header, [cells(one) for one in verdicts if one.group == group])
        for group in dict.fromkeys(verdict.group for verdict in verdicts)
    ]


def cells(verdict: ClaimVerdict) -> tuple[str, ...]:
    """Return a verdict's row: labels, bound, figure, word, and the note if there is one."""
    note = (verdict.note,) if verdict.note else ()
    return (*verdict.labels, _bound(verdict), _figure(verdict), _word(verdict), *note)


def show_sections(found: Iterable[TableSection], console: Console, end: str) -> None:
    """Print every section, then a last line."""
    for section in found:
        if section.title:
            console.print(f"{section.title}\n", style="bold", highlight=False)
        console.print(_table(section))
        if _has_mark(section):
            console.print(UNSURE, style="dim", highlight=False)
        console.print()
    console.print(end, highlight=False, soft_wrap=True)


def as_markdown(found: Iterable[TableSection], end: str) -> str:
    """Return the same as Markdown."""
    parts = []
    for section in found:
        lines = [section.header, ["---"] * len(section.header), *section.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"**{section.title}**\n\n{table}" if section.title else table)
        parts += [UNSURE] if _has_mark(section) else []
    return "\n\n".join([*parts, end]) + "\n"


def _has_mark(section: TableSection) -> bool:
    return any(cell.endswith(" ~") for row in section.rows for cell in row)


def _bound(verdict: ClaimVerdict) -> str:
    if verdict.at_most is not None:
        return f"<= {verdict.at_most:.2f}"
    return "" if verdict.at_least is None else f">= {verdict.at_least:.2f}"


def _figure(verdict: ClaimVerdict) -> str:
    if verdict.value is None:
        return "-"
    if verdict.low is None or verdict.high is None:
        return f"{verdict.value:.3f}"
    return f"{verdict.value:.3f} [{verdict.low:.3f}, {verdict.high:.3f}]"


def _word(verdict: ClaimVerdict) -> str:
    if verdict.met is None:
        return ""
    return ("pass" if verdict.met else "missed") + ("" if verdict.sure else " ~")


def _table(section: TableSection) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in section.header:
        table.add_column(name, no_wrap=name not in ("statement", "note"))
    for row in section.rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    return table
