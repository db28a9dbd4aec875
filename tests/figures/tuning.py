"""The views of the tuner: a row per algorithm on the same budget, and a row per fleet and policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.figures.marked import Cell, Table, View

# --- The view of `python -m experiments --system tuner --only algorithms`: a row per algorithm on the same budget.


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


# --- The views of the group `fleets` of the claims about the tuner, and two further groups: a row per fleet and
# policy.


SEEDS_TUNING_FLEETS = 2
COMMAND_TUNING_FLEETS = (
    f"python -m experiments --system tuner --only fleets --seeds {SEEDS_TUNING_FLEETS} --jobs 1 --json"
)
#: Other fleets, and searches on a twin: a seed is half an hour of processor time.
MORE_SEEDS = 1
MORE_COMMAND = (
    "python -m experiments --system tuner --only 'fleets by twin' --only 'further fleets' "
    f"--seeds {MORE_SEEDS} --jobs 1 --json"
)
#: Random steps of CMA-ES alone, live on three fleets.
STEPS_SEEDS = 5
STEPS_COMMAND = f"python -m experiments --system tuner --only 'steps of cma' --seeds {STEPS_SEEDS} --jobs 1 --json"
#: A log of decisions as the campaign's first filter, and what exploring costs.
LOG_SEEDS = 3
LOG_COMMAND = f"python -m experiments --system tuner --only 'log as filter' --seeds {LOG_SEEDS} --jobs 1 --json"
_LOG_STATEMENT = re.compile(r"(.*), time scale [\d.]+: (\S+), with a log / without, (live blocks|p95 TTFT|p95 E2E)")
_CHANCE_STATEMENT = re.compile(r"(.*), time scale [\d.]+: (\S+) with (.*), ([\d.]+)% by chance / none, p95 TTFT")
_STEPS_STATEMENT = re.compile(r"(.*), time scale [\d.]+: (\S+), tuned live by (\S+) / defaults, p95 (TTFT|E2E)")
#: Columns by the words of a statement.
_SETS = {
    "tuned live": "after tuning",
    "while it was tuned": "while tuning",
    "found by the twin": "searched on a twin",
    "best of the grid": "best of a grid",
}
_STATEMENT_TUNING_FLEETS = re.compile(
    rf"(.*), time scale [\d.]+: (\S+), ({'|'.join(_SETS)}) / defaults, p95 (TTFT|E2E)"
)


def tuning_fleets(results: Sequence[Any]) -> View:
    """Return a row per fleet and traffic: p95 over the defaults', and when weights were first accepted."""
    return _view(results, SEEDS_TUNING_FLEETS)


def tuning_fleets_more(results: Sequence[Any]) -> View:
    """Return the same of the further groups; a fleet that was searched has other columns."""
    return _view(results, MORE_SEEDS)


def tuning_steps(results: Sequence[Any]) -> View:
    """Return a row per fleet and optimizer: p95 over the defaults', and a seed's accepted steps and weights each."""
    (statements,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for one in statements:
        found = _STEPS_STATEMENT.fullmatch(one["text"])
        assert found is not None, f"no statement about steps: {one['text']}"
        cells = rows.setdefault((found[1], f"`{found[3]}`"), {})
        cells[f"p95 {found[4]}"] = [one["value"], one["low"], one["high"]]
        seeds = [note.split(": ") for note in one["note"].split("; ")]
        cells["accepted steps"] = ", ".join(steps for steps, _ in seeds)
        cells["weights in the end"] = "; ".join(weights for _, weights in seeds)
    judged = [one["met"] for one in statements if one["met"] is not None]
    counts = {"fleets": len(rows), "statements": len(judged), "passed": sum(judged), "seeds": STEPS_SEEDS}
    return View(
        tables=[Table(labels=("fleet, traffic", "algorithm"), rows=rows)],
        values={name: float(count) for name, count in counts.items()} | {"target": 0.9, "no worse": 1.01},
    )


def tuning_log(results: Sequence[Any]) -> View:
    """Return a row per fleet: blocks and p95 with a log over those without; and a row per share of chance."""
    (statements,) = results
    fleets: dict[tuple[str, ...], dict[str, Cell]] = {}
    chances: dict[tuple[str, ...], dict[str, Cell]] = {}
    for one in statements:
        cell = [one["value"], one["low"], one["high"]]
        if (found := _LOG_STATEMENT.fullmatch(one["text"])) is not None:
            cells = fleets.setdefault((found[1], f"`{found[2]}`"), {})
            cells[found[3]] = cell
            if found[3] == "live blocks":
                cells["blocks by seed"] = one["note"].replace(";", ",")
        else:
            chance = _CHANCE_STATEMENT.fullmatch(one["text"])
            assert chance is not None, f"no statement about a log: {one['text']}"
            chances[f"{float(chance[4]):g} %",] = {"p95 TTFT over that without": cell}
    return View(
        tables=[Table(labels=("fleet, traffic", "policy"), rows=fleets), Table(labels=("by chance",), rows=chances)],
        values={"seeds": float(LOG_SEEDS)},
    )


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
    found = _STATEMENT_TUNING_FLEETS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no statement of the form {_STATEMENT_TUNING_FLEETS.pattern!r}")
    return found.groups()
