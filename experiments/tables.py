"""Verdicts on figures, and tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.lab.simulate.compare import Ratio, mean_interval

#: Columns behind a verdict's labels.
HEADER_END = ("target", "ratio [95 %]", "met")
#: Below a table that has the mark.
UNSURE = "`~`: the interval contains the target; more seeds could turn the verdict."


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimVerdict:
    """A figure with its interval, the bound on it, and whether the bound is met."""

    group: str  #: Verdicts of one group are shown together; `--only` names it.
    labels: tuple[str, ...]  #: First cells of the row: what is compared.
    value: float | None = None  #: None where no run gave one.
    low: float | None = None  #: Ends of the 95 % interval.
    high: float | None = None
    at_most: float | None = None  #: A row without a bound is shown for comparison.
    at_least: float | None = None
    note: str = ""  #: Further figures of the runs.

    @classmethod
    def of_ratio(cls, group: str, labels: tuple[str, ...], ratio: Ratio | None, **more: Any) -> ClaimVerdict:
        """Return the verdict on a ratio; `value=` shows another figure with the ratio's interval."""
        if ratio is None:
            return cls(group=group, labels=labels, **more | {"value": None})
        return cls(group=group, labels=labels, low=ratio.low, high=ratio.high, **{"value": ratio.value} | more)

    @property
    def met(self) -> bool | None:
        """Whether the figure is within its bounds; None without a bound. The interval does not count."""
        if self.at_most is None and self.at_least is None:
            return None
        return self.value is not None and self._within(self.value)

    @property
    def sure(self) -> bool:
        """Whether the whole interval is on the figure's side of the bound."""
        if self.low is None or self.high is None:
            return False
        return self._within(self.low) == self._within(self.high) == bool(self.met)

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        return {"group": row.pop("group"), "text": ", ".join(row.pop("labels")), **row, "met": self.met}

    def cells(self) -> tuple[str, ...]:
        """Return the row: labels, bound, figure, word, and the note if there is one."""
        bound = "" if self.at_least is None else f">= {self.at_least:.2f}"
        if self.at_most is not None:
            bound = f"<= {self.at_most:.2f}"
        ends = "" if self.low is None or self.high is None else f" [{self.low:.3f}, {self.high:.3f}]"
        figure = "-" if self.value is None else f"{self.value:.3f}{ends}"
        word = "" if self.met is None else ("pass" if self.met else "missed") + ("" if self.sure else " ~")
        return (*self.labels, bound, figure, word, *([self.note] if self.note else []))

    def _within(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


@dataclass(frozen=True, slots=True)
class TableSection:
    """A table below its title."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def sections(
    verdicts: Sequence[ClaimVerdict], header: Sequence[str], titles: Mapping[str, str] | None = None
) -> list[TableSection]:
    """Return a table per group, in the order of the verdicts."""
    return [
        TableSection((titles or {}).get(group, group), header, [one.cells() for one in verdicts if one.group == group])
        for group in dict.fromkeys(verdict.group for verdict in verdicts)
    ]


def as_markdown(found: Iterable[TableSection], end: str) -> str:
    parts = []
    for section in found:
        lines = [section.header, ["---"] * len(section.header), *section.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"**{section.title}**\n\n{table}" if section.title else table)
        parts += [UNSURE] if any(cell.endswith(" ~") for row in section.rows for cell in row) else []
    return "\n\n".join([*parts, end]) + "\n"


def number(value: float | None, form: str, factor: float = 1) -> str:
    return "-" if value is None else format(factor * value, form)


def with_interval(values: Sequence[float], form: str) -> str:
    """Return the mean and, of several seeds, its 95 % interval."""
    shown = [format(value, form) for value in mean_interval(values)] if values else ["-"]
    return shown[0] if len(shown) == 1 else f"{shown[0]} [{shown[1]}-{shown[2]}]"
