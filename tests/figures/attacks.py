"""The views of attacks and of replicas that fail fast: delays, processor time, memory, and requests lost."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.fast_failures import BEFORE_S, FAILING_S, MIDDLE, START
from tests.documents import DOCS
from tests.figures.marked import Cell, Table, View
from tests.figures.stored import read_stored

# --- The view of `tests.attacks`: the worst delay of `/health` under each attack, processor time in it, and memory.
#
# `python -m tests.figures.attacks` writes the stored results into docs/security.md, after `... record attacks
# attacks-seams`: the second are those on the picker, by KV events, by the store and by fleet sources.


#: The last commit without the bounds, whose proxy the first command attacks.
BEFORE = "985ee88"
PAGE = DOCS / "security.md"
#: Rows and columns of the page.
SHOWN = (
    "body: short floats in tools",
    "body: plain text",
    "events: events of nothing, before a token",
    "events: chunks of one byte, after a token",
    "answer: interim answers",
    "metrics: a label without a value",
)
COLUMNS = ("32 MiB, before, ms", "32 MiB, after, ms", "32 MiB, after, processor ms", "memory, after, MiB")
#: Columns of the other sides' attacks.
SEAM_COLUMNS = ("longest wait, ms", "processor, ms", "memory, MiB")
_PARTS = {
    name: re.compile(rf"(?<=<!-- figures: {name} -->\n).*?(?=<!-- /figures -->)", re.DOTALL)
    for name in ("attacks", "attacks-seams")
}


def attacks(results: Sequence[Any]) -> View:
    """Return the table of both results, the first one that of `BEFORE`."""
    before, after = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for column, result in (("before", before), ("after", after)):
        for row in result["rows"]:
            if row["attack"] == "nothing":
                continue
            cells = rows.setdefault((f"{row['kind']}: {row['attack']}",), {})
            cells[f"{row['mib']} MiB, {column}, ms"] = row["delay_ms"]
            # Results of an earlier harness have none.
            cells[f"{row['mib']} MiB, {column}, processor ms"] = row.get("cpu_ms")
            if row["mib"] == 32:
                cells[f"memory, {column}, MiB"] = row["memory_mib"]
    worst = {
        column: max(row["delay_ms"] for row in found["rows"])
        for column, found in zip(("before", "after"), results, strict=True)
    }
    idle = max(row["delay_ms"] for row in after["rows"] if row["attack"] == "nothing")
    late = sum(row["delay_ms"] > 50 for row in after["rows"])
    busiest = max(row.get("cpu_ms", 0.0) for row in after["rows"])
    values = {"worst before": worst["before"], "worst after": worst["after"], "idle": idle, "attacks": float(len(rows))}
    values["most processor time after"] = busiest
    return View(
        tables=[Table(labels=("attack",), rows=rows)],
        values=values | {"bound": 50.0, "over the bound": float(late), "MiB": 32.0, "least MiB": 1.0},
        commits=frozenset({before["of"]}),
    )


def page_part(view: View) -> str:
    """Return what the page says of a view, between its marks."""
    values, (table,) = view.values, view.tables
    lines = [
        "The table shows how long `/health` waited under each attack, with bodies of 32 MiB, before and after the",
        "bounds were added.",
        "The last two columns are the processor time of one attack and the growth of memory, both after.",
        "",
        f"| {' | '.join(('attack', *COLUMNS))} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for name in SHOWN:
        cells = (table.rows[(name,)][column] for column in COLUMNS)
        shown = ("" if cell is None else f"{round(cell)}" for cell in cells if not isinstance(cell, str | Sequence))
        lines.append(f"| {' | '.join((name, *shown))} |")
    lines += [
        "",
        f"Over all attacks the longest wait is now {values['worst after']:.0f} ms, and {values['idle']:.0f} ms without",
        f"an attack. One attack costs at most {values['most processor time after']:.0f} ms of processor time.",
        "`python -m tests.attacks` repeats them.",
    ]
    return "\n".join([*lines, ""])


def attacks_of_seams(results: Sequence[Any]) -> View:
    """Return the table of all rows."""
    (result,) = results
    keys = ("delay_ms", "cpu_ms", "memory_mib")
    rows: dict[tuple[str, ...], dict[str, Cell]] = {
        (f"{row['kind']}: {row['attack']}",): dict(zip(SEAM_COLUMNS, (row[key] for key in keys), strict=True))
        for row in result["rows"]
    }
    attacked = [row for row in result["rows"] if row["attack"] != "nothing"]
    worst = {f"most {key}": max(row[key] for row in attacked) for key in keys}
    return View(
        tables=[Table(labels=("attack",), rows=rows)],
        values=worst | {"idle": max(row["delay_ms"] for row in result["rows"] if row["attack"] == "nothing")},
    )


def seams_part(view: View) -> str:
    """Return what the page says of it, between its marks."""
    values, (table,) = view.values, view.tables
    lines = [
        "The table shows the same for attacks from the other sides: on the picker, where the wait is that of a health",
        "check by gRPC, and on the proxy by KV events, the store and a fleet source. Each lasts for seconds.",
        "",
        f"| {' | '.join(('attack', *SEAM_COLUMNS))} |",
        "|---" * (1 + len(SEAM_COLUMNS)) + "|",
    ]
    for (name,), cells in table.rows.items():
        shown = (f"{round(cell)}" for cell in cells.values() if isinstance(cell, float | int))
        lines.append(f"| {' | '.join((name, *shown))} |")
    lines += [
        "",
        f"No attack takes more than {values['most cpu_ms']:.0f} ms of processor time within one health check, nor more",
        f"than {values['most memory_mib']:.0f} MiB. The rest of a wait is that of the machine, which other processes",
        f"shared: without an attack it was up to {values['idle']:.0f} ms.",
        "`python -m tests.attacks --seams` repeats them.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    text = PAGE.read_text()
    parts = {
        "attacks": page_part(attacks(read_stored("attacks").results)),
        "attacks-seams": seams_part(attacks_of_seams(read_stored("attacks-seams").results)),
    }
    for name, part in parts.items():
        text = _PARTS[name].sub(lambda _, part=part: part, text)  # type: ignore[misc]
    PAGE.write_text(text)


# --- The view of `tests.chaos.fast_failures`: shares of requests lost, before and after, a row per failure.


#: The last commit without the mends, whose proxy the first command measures.
_COLUMNS = {START: "at the start", MIDDLE: "later"}


def fast_failures(results: Sequence[Any]) -> View:
    """Return the table of both results, the first one that of `BEFORE`; each share in percent of a row's requests."""
    before, after = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for column, result in (("before", before), ("after", after)):
        for row in result["rows"]:
            cells = rows.setdefault((row["fault"],), {})
            cells[f"{_COLUMNS[row['begins']]}, {column}"] = 100 * row["lost"] / row["requests"]
    return View(
        tables=[Table(labels=("fault",), rows=rows)],
        values=_values(after["rows"]) | {"seconds before": BEFORE_S, "seconds": FAILING_S},
        commits=frozenset({before["of"]}),
    )


def _values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        "most lost": max(row["lost"] for row in rows),
        "least requests": min(row["requests"] for row in rows),
        "most requests": max(row["requests"] for row in rows),
        "failures": len({row["fault"] for row in rows}),
    }


if __name__ == "__main__":
    main()
