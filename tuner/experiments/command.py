"""The command line of `make tuning-table`: every experiment, its verdicts, and the files.

OUT/runs/KEY.json          one run, see `gorgo.apps.claims.run_cache`
OUT/tuning-table.json      the verdicts
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Experiment, Runner
from gorgo.apps.claims.table import HEADER_END, sections, show_sections
from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.config.atomic import write_atomically
from tuner.experiments import algorithms, bad_start, fleets, next_window, no_harm, protocol, reward_hacking
from tuner.experiments.task import Task, TaskRun, run_task

#: Of the table: wide enough for its longest row.
WIDTH = 170
HEADER = ("statement", *HEADER_END, "note")
#: By group, in the order of the table; each is given the seeds.
EXPERIMENTS: Mapping[str, Callable[[Sequence[int]], Experiment[Task, TaskRun]]] = {
    protocol.GROUP: protocol.by_campaign,
    no_harm.GROUP: no_harm.experiment,
    bad_start.GROUP: bad_start.by_campaign,
    next_window.GROUP: next_window.experiment,
    reward_hacking.GROUP: reward_hacking.experiment,
    bad_start.SEARCH_GROUP: bad_start.by_search,
    protocol.SEARCH_GROUP: protocol.by_search,
    fleets.GROUP: fleets.by_campaign,
    fleets.FURTHER_GROUP: fleets.further,
    fleets.SEARCH_GROUP: fleets.by_search,
    algorithms.GROUP: algorithms.experiment,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a bound is missed."""
    options = _parser().parse_args(arguments)
    runner = task_runner(options.out, n_jobs=options.jobs)
    verdicts: list[ClaimVerdict] = []
    for group, experiment in EXPERIMENTS.items():
        if not options.only or group in options.only:
            verdicts += runner.verdicts(experiment(range(options.seeds)), title=group)
            rows = [verdict.as_json() for verdict in verdicts]
            write_atomically(options.out / "tuning-table.json", json.dumps(rows, indent=2).encode() + b"\n")
    show_sections(sections(verdicts, HEADER, {}), Console(width=WIDTH), f"{options.seeds} seeds")
    return int(any(verdict.met is False for verdict in verdicts))


def task_runner(out: Path, *, n_jobs: int) -> Runner[Task, TaskRun]:
    """Return the runner of tasks with its cache in `out`."""
    return Runner(run_task, Task.key, RunCache(out / "runs", TaskRun), n_jobs=n_jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make tuning-table", description="Check the claims about the tuner.")
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"), help="folder of runs and table")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each kind")
    parser.add_argument("--jobs", type=int, default=-1, help="runs at a time; -1 is one per core")
    parser.add_argument("--only", action="append", choices=list(EXPERIMENTS), help="repeatable")
    return parser
