"""The views of the group `fleets` of the claims about the tuner, and two further groups: a row per fleet and policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.figures.marked import Cell, Table, View

SEEDS = 2
COMMAND = f"python -m experiments --system tuner --only fleets --seeds {SEEDS} --jobs 1 --json"
#: Other fleets, and searches on a twin: a seed is half an hour of processor time.
MORE_SEEDS = 1
MORE_COMMAND = (
    "python -m experiments --system tuner --only 'fleets by twin' --only 'further fleets' "
    f"--seeds {MORE_SEEDS} --jobs 1 --json"
)
#: Columns by the words of a statement.
_SETS = {
    "tuned live": "after tuning",
    "while it was tuned": "while tuning",
    "found by the twin": "searched on a twin",
    "best of the grid": "best of a grid",
}
_STATEMENT = re.compile(rf"(.*), time scale [\d.]+: (\S+), ({'|'.join(_SETS)}) / defaults, p95 (TTFT|E2E)")


def tuning_fleets(results: Sequence[Any]) -> View:
    """Return a row per fleet and traffic: p95 over the defaults', and when weights were first accepted."""
    return _view(results, SEEDS)


def tuning_fleets_more(results: Sequence[Any]) -> View:
    """Return the same of the further groups; a fleet that was searched has other columns."""
    return _view(results, MORE_SEEDS)


def _view(results: Sequence[Any], seeds: int) -> View:
    (statements,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for one in statements:
        traffic, policy, words, figure = _words(one["text"])
        cells = rows.setdefault((traffic, f"`{policy}`"), {})
        column = f"{_SETS[words]}, p95 {figure}"
        if words == "while it was tuned":
            cells[column] = one["value"]
            cells["accepted after"] = one["note"].removeprefix("first accepted after ")
        else:
            cells[column] = [one[name] for name in ("value", "low", "high") if one[name] is not None]
            if words == "tuned live":
                cells["weights in the end"] = " and ".join(dict.fromkeys(one["note"].split("; ")))
    judged = [one["met"] for one in statements if one["met"] is not None]
    counts = {"fleets": len(rows), "statements": len(judged), "passed": sum(judged), "seeds": seeds}
    return View(
        tables=[Table(labels=("fleet, traffic", "policy"), rows=rows)],
        values={name: float(count) for name, count in counts.items()} | {"target": 0.9, "no worse": 1.01},
    )


def _words(text: str) -> Sequence[str]:
    found = _STATEMENT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no statement of the form {_STATEMENT.pattern!r}")
    return found.groups()
