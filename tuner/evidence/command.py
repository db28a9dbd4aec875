"""The table of the evidence: every experiment, its statements, and the files.

Owns the command line of `make tuning-table` and the folder:

    OUT/runs/KEY.json          a run each: what is there is not made again
    OUT/tuning-table.json      the statements
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from gorgo.config.atomic import write_atomically
from tuner.evidence.kept import found_of
from tuner.evidence.statement import Experiment, Statement
from tuner.evidence.targets import EXPERIMENTS

#: Of the table: wide enough for its longest row.
WIDTH = 170


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a statement does not hold."""
    asked = _parser().parse_args(arguments)
    chosen = [one for one in EXPERIMENTS if not asked.only or one.name in asked.only]
    statements: list[Statement] = []
    for experiment in chosen:
        statements += measured(experiment, seeds=range(asked.seeds), out=asked.out, n_jobs=asked.jobs)
        write_atomically(asked.out / "tuning-table.json", _json(statements))
    Console(width=WIDTH).print(as_table(statements, seeds=asked.seeds))
    return int(any(one.met is False for one in statements))


def measured(experiment: Experiment, *, seeds: Sequence[int], out: Path, n_jobs: int) -> list[Statement]:
    """One experiment: its runs as far as they are missing, and what they show."""
    folder = out / "runs"
    runs = dict(found_of(experiment.first(seeds), folder=folder, n_jobs=n_jobs, title=experiment.name))
    if experiment.then is not None:
        later = experiment.then(seeds, runs)
        runs |= found_of(later, folder=folder, n_jobs=n_jobs, title=f"{experiment.name}, second half")
    return experiment.judge(seeds, runs)


def as_table(statements: Sequence[Statement], *, seeds: int) -> Table:
    """One row per statement."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption=f"{seeds} seeds", caption_justify="left"
    )
    for title in ("", "statement", "figure", "95 %", "target", "", "note"):
        table.add_column(title, justify="right" if title in ("figure", "95 %", "target") else "left")
    for one in statements:
        table.add_row(*_cells(one))
    return table


def _cells(one: Statement) -> list[str]:
    interval = "" if one.low is None or one.high is None else f"{one.low:.3f} .. {one.high:.3f}"
    met = {None: "", True: "passed", False: "missed"}[one.met]
    return [
        one.group,
        one.text,
        "-" if one.value is None else f"{one.value:.3f}",
        interval,
        _target(one),
        met,
        one.note,
    ]


def _target(one: Statement) -> str:
    if one.at_most is not None:
        return f"<= {one.at_most:g}"
    return "" if one.at_least is None else f">= {one.at_least:g}"


def _json(statements: Sequence[Statement]) -> bytes:
    rows = [asdict(one) | {"met": one.met} for one in statements]
    return json.dumps(rows, indent=2).encode() + b"\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make tuning-table", description="What the tuner is said to show, measured.")
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"), help="folder of runs and table")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each kind")
    parser.add_argument("--jobs", type=int, default=-1, help="runs at a time; -1 is one per core")
    parser.add_argument("--only", action="append", choices=[one.name for one in EXPERIMENTS], help="repeatable")
    return parser
