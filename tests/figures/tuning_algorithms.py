"""The view of `python -m experiments --system tuner --only algorithms`: a row per algorithm on the same budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.figures.marked import Cell, Table, View

SEEDS = 10
COMMAND = f"python -m experiments --system tuner --only algorithms --seeds {SEEDS} --jobs 1 --json"
_STATEMENT = re.compile(r"(.*): (\S+) searched by (\S+), (\d+) candidates / start, p95 TTFT")
_NOTE = re.compile(r"p95 E2E (\S+); moved in (\d+) of (\d+)")


def tuning_algorithms(results: Sequence[Any]) -> View:
    """Return a row per algorithm: p95 on held-out windows over the start's, and in how many runs the weights moved."""
    (statements,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for one in statements:
        found, note = _STATEMENT.fullmatch(one["text"]), _NOTE.fullmatch(one["note"])
        assert found is not None, f"no statement about an algorithm: {one['text']}"
        assert note is not None, f"no note about an algorithm: {one['note']}"
        rows[f"`{found[3]}`",] = {
            "p95 TTFT": [one["value"], one["low"], one["high"]],
            "p95 E2E": float(note[1]),
            "moved": f"{note[2]} of {note[3]}",
        }
    return View(tables=[Table(labels=("algorithm",), rows=rows)], values={"seeds": float(SEEDS)})
