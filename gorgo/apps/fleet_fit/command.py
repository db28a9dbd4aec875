"""`python -m gorgo.apps.fleet_fit`: fit the profile, or print the paper's tables beside the simulated ones.

OUT/runs/KEY.json     one run, see `gorgo.apps.claims.run_cache`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.claims.table import TableSection, show_sections
from gorgo.apps.fleet_fit.comparison import FigureRow, FleetComparison, compare
from gorgo.apps.fleet_fit.fit import BASE, RHO_MIN, SEEDS, START, fit_profile
from gorgo.apps.fleet_fit.measure import FitRun, FitTask, measure, with_values
from gorgo.apps.fleet_fit.published import FIGURE_NAMES, WINDOWS
from gorgo.apps.fleet_fit.search import FitEvaluation
from gorgo.sim.engine.fitted import FLAGS
from gorgo.sim.engine.profiles import find_profile
from gorgo.sim.faults.scenarios import OTHER_PROFILE
from gorgo.sim.named_fleets import QWEN_L40S

#: Of the tables: wide enough for their longest row.
WIDTH = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; raise `UnknownProfile`."""
    options = _parser().parse_args(arguments)
    runner: Runner[FitTask, FitRun] = Runner(
        measure,
        FitTask.key,
        RunCache(options.out / "runs", FitRun),
        n_jobs=options.jobs,
        show_progress=options.verb == "tables",
    )
    if options.verb == "fit":
        _fit(options, runner)
    else:
        found = compare(find_profile(options.profile), find_profile(OTHER_PROFILE), range(options.seeds), runner)
        if options.json:
            Console().print_json(json.dumps(asdict(found)))
        else:
            show_sections(_sections(found), Console(width=WIDTH), _summary(found))
    return 0


def _fit(options: argparse.Namespace, runner: Runner[FitTask, FitRun]) -> None:
    """Fit, with a line on stderr per evaluation, and print the result."""
    console = Console(stderr=True)

    def shown(one: FitEvaluation) -> None:
        console.print(f"{one.loss**0.5:.4f}  {dict(one.values)}", highlight=False, soft_wrap=True)

    base = with_values(find_profile(BASE), FLAGS)
    fit = fit_profile(
        base, START, runner, evaluations=options.evaluations, seeds=range(options.seeds), on_evaluation=shown
    )
    Console().print_json(json.dumps(asdict(fit)))


def _sections(found: FleetComparison) -> Iterator[TableSection]:
    yield TableSection(
        "Table 2: simulated (measured); * is more than 30 % off",
        ("window", "policy", *FIGURE_NAMES, "hits"),
        [(*row, f"{found.hits[row[0]][row[1]]:.0%}") for row in _rows(found.stats)],
    )
    yield TableSection(
        "Simulated / measured, geometric mean over policies",
        ("window", "fitted on", *FIGURE_NAMES, "all", "within 30 %", "rho"),
        [
            (
                row.window,
                "yes" if row.fitted else "held out",
                *(f"{ratio:.2f}" for ratio in row.ratios.values()),
                f"{row.ratio:.3f}",
                f"{row.within:.0%}",
                "-" if row.rho is None else f"{row.rho:.1f}",
            )
            for row in found.windows
        ],
    )
    for title, sweep in (("Table 3, load sweep", found.sweep), ("Table 3, with a surge", found.surge_sweep)):
        yield TableSection(
            f"{title}: simulated (measured)",
            ("on", "policy", "figure", "simulated (measured)"),
            [(row.window, row.policy, row.figure, f"{row.simulated:.4g} ({row.measured:g})") for row in sweep],
        )
    for title, stats in (("Table 5", found.half_load), ("April 7 of tables 2 and 5, with a surge", found.surge)):
        yield TableSection(f"{title}: simulated (measured); * as above", ("on", "policy", *FIGURE_NAMES), _rows(stats))
    yield TableSection(
        "The paper's claims",
        ("on", "of", "against", "figure", "published", "simulated"),
        [
            (row.on, row.of, row.against, row.figure, f"{row.published:.2f}", f"{row.simulated:.2f}")
            for row in found.claims
        ],
    )


def _rows(stats: Sequence[FigureRow]) -> list[tuple[str, ...]]:
    """Return a row per window and policy."""
    by_run: dict[tuple[str, str], list[str]] = {}
    for row in stats:
        mark = "" if row.met else " *"
        by_run.setdefault((row.window, row.policy), []).append(f"{row.simulated:.4g} ({row.measured:g}){mark}")
    return [(*name, *cells) for name, cells in by_run.items()]


def _summary(found: FleetComparison) -> str:
    met = sum(row.met for row in found.stats)
    ordered = sum((row.rho or 0.0) >= RHO_MIN for row in found.windows)
    return (
        f"{found.profile}, {found.seeds} seeds, simulated: {met} of {len(found.stats)} figures within 30 %, order of "
        f"policies as measured in {ordered} of {len(WINDOWS)} windows"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gorgo.apps.fleet_fit", description="Fit and compare the fleet.")
    parser.add_argument("--out", type=Path, default=Path("runs/fleet-fit"), help="folder of runs")
    parser.add_argument("--jobs", type=int, default=-1, help="runs at a time; -1 is one per core")
    verbs = parser.add_subparsers(dest="verb", required=True)
    fit = verbs.add_parser("fit", help="search for the constants that fit the paper's table 2")
    fit.add_argument("--evaluations", type=int, default=60, help="most profiles that are tried")
    fit.add_argument("--seeds", type=int, default=len(SEEDS), help="runs of each kind")
    tables = verbs.add_parser("tables", help="print the paper's tables beside the simulated ones")
    tables.add_argument("--profile", default=QWEN_L40S, help="engine of every replica")
    tables.add_argument("--seeds", type=int, default=3, help="runs of each kind")
    tables.add_argument("--json", action="store_true", help="every figure as JSON")
    return parser
