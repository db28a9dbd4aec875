"""The view of `tests.bench.relay`: what the relay costs beside others, and where its microseconds go.

`python -m tests.figures.relay` writes the stored result into docs/benchmarks.md, after `... record relay`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.documents import DOCS
from tests.figures.marked import Cell, Table, View
from tests.figures.stored import read_stored

COMMANDS = ("python -m tests.bench.relay --json", "python -m tests.bench.relay --profile --json")
PAGE = DOCS / "benchmarks.md"
RELAYS = ("nginx", "sglang-router", "floor", "gorgo", "gorgo, TLS")
RATIO = "gorgo / sglang-router"
#: Rows of the page: measures of one kind, and the target for gorgo.
ROWS: Mapping[str, tuple[Sequence[str], str]] = {
    "CPU per event, 64 streams, us": (("CPU per event, 64 endless streams",), "1.1x"),
    "CPU per event, streams of 128, us": (("CPU per event, 64 streams of 128",), ""),
    "CPU per request, 500 B, us": (("CPU per request, 500 B",), "3x"),
    "CPU per request, 90 kB, us": (("CPU per request, 90 kB",), "1.5x"),
    "streams at 100 events/s": (("streams at 100 events/s",), "800"),
    "added TTFT p50 / p99, 500 B, ms": (("added TTFT p50, 500 B", "added TTFT p99, 500 B"), "0.5 / 2"),
    "added TTFT p50 / p99, 90 kB, ms": (("added TTFT p50, 90 kB", "added TTFT p99, 90 kB"), "0.7 / 2"),
    "memory of 1,000 open streams, MB": (("memory of 1,000 open streams",), "40"),
}
#: Loads of the profile by column.
LOADS = {"500 B": "requests_small", "90 kB": "requests_large", "event": "events"}
_PART = re.compile(r"(?<=<!-- figures: relay -->\n).*?(?=<!-- /figures -->)", re.DOTALL)
_FLOOR = "floor"


def relay(results: Sequence[Any]) -> View:
    """Return the tables of costs and of stages."""
    measured, profiled = results
    by_name = {measure["name"]: measure for measure in measured["measures"]}
    costs: dict[tuple[str, ...], dict[str, Cell]] = {
        (row,): _costs([by_name[name] for name in names], target) for row, (names, target) in ROWS.items()
    }
    stages: dict[tuple[str, ...], dict[str, Cell]] = {}
    for column, load in LOADS.items():
        for name, of in profiled["stages_us"][load].items():
            title = column if name == "gorgo" else f"{column}, {_FLOOR}"
            for stage, cost_us in (*of.items(), ("sum", sum(of.values()))):
                stages.setdefault((stage,), {})[title] = cost_us
    return View(
        tables=[Table(labels=("figure",), rows=costs), Table(labels=("stage, us",), rows=stages)],
        values={"rounds": float(measured["rounds"]), "replicas": 3.0, "cores": float(_cores(measured["machine"]))},
    )


def _cores(machine: str) -> int:
    found = re.search(r"(\d+) cores", machine)
    return int(found[1]) if found else 0


def _costs(measures: Sequence[Mapping[str, Any]], target: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = {
        name: [one["relays"][name]["median"] for one in measures] if name in measures[0]["relays"] else None
        for name in RELAYS
    }
    ratios = [one["ratios"]["gorgo"] for one in measures if "gorgo" in one["ratios"]]
    return {**cells, RATIO: ratios or None, "target": target}


def page_part(view: View, commit: str, machine: str) -> str:
    """Return what the page says of a view, between its marks."""
    costs, stages = view.tables
    cores, _, _ = machine.partition(" cores")
    about = f"At {commit}, {cores} cores, 3 replicas, medians of {view.values['rounds']:.0f} rounds:"
    columns = [*LOADS, f"event, {_FLOOR}"]
    shown = [about, "", *_rows("figure", (*RELAYS, RATIO, "target"), costs)]
    return "\n".join([*shown, "", *_rows("stage, us", columns, stages), ""])


def _rows(label: str, columns: Sequence[str], table: Table) -> list[str]:
    lines = [f"| {' | '.join((label, *columns))} |", "|---" * (1 + len(columns)) + "|"]
    for (name,), cells in table.rows.items():
        lines.append(f"| {' | '.join((name, *(_shown(cells.get(column)) for column in columns)))} |")
    return lines


def _shown(cell: Cell) -> str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    numbers = [cell] if isinstance(cell, int | float) else cell
    return " / ".join(f"{one:.2f}" if abs(one) < 10 else f"{one:,.0f}" for one in numbers)


def main() -> None:
    stored = read_stored("relay")
    part = page_part(relay(stored.results), stored.commit, stored.runs[0].machine)
    PAGE.write_text(_PART.sub(lambda _: part, PAGE.read_text(), count=1))


if __name__ == "__main__":
    main()
