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
RATIO = "gorgo over sglang-router"
#: What stands between the tables.
STAGES_BELOW = "This table shows where the processor time of gorgo goes, by stage of a request and of an event."
#: First columns of the two tables.
COST, STAGE = "what is measured", "stage (microseconds of CPU)"
#: Rows of the page: measures of one kind, and the target for gorgo.
ROWS: Mapping[str, tuple[Sequence[str], str]] = {
    "CPU per event of 64 endless streams, microseconds": (("CPU per event, 64 endless streams",), "1.1x"),
    "CPU per event of 64 streams of 128 tokens, microseconds": (("CPU per event, 64 streams of 128",), ""),
    "CPU per request of 500 bytes, microseconds": (("CPU per request, 500 B",), "3x"),
    "CPU per request of 90 kB, microseconds": (("CPU per request, 90 kB",), "1.5x"),
    "streams of 100 events/s that one core carries": (("streams at 100 events/s",), "800"),
    "added TTFT of 500 bytes, p50 / p99, ms": (("added TTFT p50, 500 B", "added TTFT p99, 500 B"), "0.5 / 2"),
    "added TTFT of 90 kB, p50 / p99, ms": (("added TTFT p50, 90 kB", "added TTFT p99, 90 kB"), "0.7 / 2"),
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
        tables=[Table(labels=(COST,), rows=costs), Table(labels=(STAGE,), rows=stages)],
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


def page_part(view: View, machine: str) -> str:
    """Return what the page says of a view, between its marks."""
    costs, stages = view.tables
    cores, _, _ = machine.partition(" cores")
    rounds = f"{view.values['rounds']:.0f}"
    about = (
        f"The machine has an {cores} cores. Each relay has 3 replicas, and each cell is the median of {rounds} rounds."
    )
    columns = [*LOADS, f"event, {_FLOOR}"]
    shown = [about, "", *_rows(COST, (*RELAYS, RATIO, "target"), costs)]
    return "\n".join([*shown, "", STAGES_BELOW, "", *_rows(STAGE, columns, stages), ""])


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
    part = page_part(relay(stored.results), stored.runs[0].machine)
    PAGE.write_text(_PART.sub(lambda _: part, PAGE.read_text(), count=1))


if __name__ == "__main__":
    main()
