"""`python -m experiments`: the comparison of the published systems, the tables of a group of runs, or the fit.

OUT/runs/KEY.json     one run, see `runner`
OUT/compare.html      the comparison as a page
OUT/*.svg, *.png      pictures of the groups, with --pictures
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

from experiments.fit import BASE, SEEDS, START, Values, fit_profile, with_values
from experiments.pictures import write_pictures
from experiments.published import compared, counted, page_of
from experiments.reports import Grid, SystemReport
from experiments.runner import BACKENDS, Runner
from experiments.systems import (
    dynamo,
    gorgo_paper,
    herd,
    live,
    llm_d,
    lodestar,
    perturbed,
    plateau,
    policies,
    push_map,
    ranvier,
    several,
    tuner_claims,
)
from experiments.tables import TableSection, as_markdown
from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import GorgoError
from gorgo.lab.report import require_extra
from gorgo.lab.sim.engine.profiles import FLAGS, find_profile

#: Systems with published figures, in the order of the comparison; and this project's own claims.
PUBLISHED: Mapping[str, ModuleType] = {one.NAME: one for one in (gorgo_paper, lodestar, llm_d, push_map, ranvier)}
SYSTEMS: Mapping[str, ModuleType] = {
    **PUBLISHED,
    **{one.NAME: one for one in (policies, herd, perturbed, plateau, dynamo, live, several, tuner_claims)},
}
HEADER = ("on", "figure", "published", "reproduced here", "ours", "verdict")
#: Of `--quick`: a preview that takes two idle cores less than 15 minutes. Whole windows are cut to so many requests.
QUICK_SEEDS, QUICK_REQUESTS = 1, 2_000
ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 for an error that is the user's."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _fit(given[1:]) if given[:1] == ["fit"] else _run(given)
    except GorgoError as error:
        print(f"experiments: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _run(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    only = options.only or ()
    chosen = [SYSTEMS[name] for name in options.system or (SYSTEMS if only else PUBLISHED)]
    if unknown := set(only) - {ALL, *(name for one in chosen for name in one.GROUPS)}:
        there = "; ".join(f"{one.NAME}: {', '.join(one.GROUPS)}" for one in chosen)
        parser.error(f"--only {min(unknown)}: no such group; there are {there}")
    if not only and (own := [one.NAME for one in chosen if one.NAME not in PUBLISHED]):
        parser.error(f"--system {own[0]} has no published figures; choose its tables by --only {ALL} or a group")
    if options.queue is not None and set(chosen) != {policies}:
        parser.error(f"--queue {options.queue}: choose --system {policies.NAME} alone; other rows say how they queue")
    if options.trace is not None and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: no such file")
    if options.pictures:
        require_extra("a picture")
    grid = Grid(
        seeds=range(min(options.seeds, QUICK_SEEDS) if options.quick else options.seeds), scale=options.scale,
        trace=None if options.trace is None else str(options.trace), counts=options.count or Grid(seeds=()).counts,
        first_requests=QUICK_REQUESTS if options.quick else None, pictures=options.pictures is not None,
        queue=options.queue,
    )  # fmt: skip
    runner = Runner(options.out / "runs", n_jobs=options.jobs, backend=options.backend)
    if only:
        groups = {one: [name for name in one.GROUPS if name in only or ALL in only] for one in chosen}
        reports = {one.NAME: one.report(some, grid, runner) for one, some in groups.items() if some}
    else:
        reports = {"": _comparison(chosen, grid, runner, options.out / "compare.html", quick=options.quick)}
    if options.pictures:
        pictures = [picture for report in reports.values() for picture in report.pictures]
        write_pictures(options.out, pictures, suffix=options.pictures)
    if options.json:
        rows = {name: report.rows for name, report in reports.items()}
        print(json.dumps(rows if len(rows) > 1 else next(iter(rows.values())), indent=2))  # noqa: T201
    else:
        print("".join(as_markdown(report.sections, report.end) for report in reports.values()), end="")  # noqa: T201
    return 0


def _comparison(chosen: Sequence[ModuleType], grid: Grid, runner: Runner, path: Path, *, quick: bool) -> SystemReport:
    """Run every published figure of the systems, write the page, and return the table."""
    claims = [claim for system in chosen for claim in system.claims(grid)]
    runs = runner.runs(list(dict.fromkeys(task for one in claims for task in one.tasks)), title="comparison")
    rows = compared(claims, runs)
    preview = "One seed and short windows: a preview, not a result. " if quick else ""
    about = f"{preview}All is simulated; seeds of each run: {len(grid.seeds)}."
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page_of(rows, about).encode(), mode=PUBLIC)
    cpu_s = sum(run.cpu_s for run in runs.values())
    return SystemReport(
        sections=[
            TableSection(system.TITLE, HEADER, [row.cells() for row in rows if row.claim.system == system.TITLE])
            for system in chosen
        ],
        end=f"{counted(rows)}. {about} {len(runs)} runs, {cpu_s:.0f} s of processor time. Page: {path}",
        rows=[row.as_json() for row in rows],
    )


def _fit(arguments: Sequence[str]) -> int:
    """Fit, with a line on stderr per evaluation, and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments fit",
        description="Search for the engine constants that fit the GORGO paper's table 2.",
    )
    parser.add_argument("--evaluations", type=int, default=60, help="most profiles that are tried")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="runs of each kind")
    _add_runner_options(parser)
    options = parser.parse_args(arguments)

    def shown(values: Values, loss: float) -> None:
        print(f"{loss**0.5:.4f}  {dict(values)}", file=sys.stderr)  # noqa: T201

    runner = Runner(options.out / "runs", n_jobs=options.jobs, backend=options.backend, show_progress=False)
    base = with_values(find_profile(BASE), FLAGS)
    fit = fit_profile(
        base, START, runner, evaluations=options.evaluations, seeds=range(options.seeds), on_evaluation=shown
    )
    print(json.dumps(asdict(fit), indent=2))  # noqa: T201
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Compare published routing systems with this project's simulation of them, figure by figure. With "
        "--only print the tables of groups of runs. `python -m experiments fit` fits the simulated engine.",
    )
    option = parser.add_argument
    option("--system", action="append", choices=list(SYSTEMS), help="this system alone; repeatable")
    option("--only", action="append", metavar="GROUP", help=f"tables of this group, or {ALL}; repeatable")
    option("--quick", action="store_true", help="one seed and short windows: a preview, not a result")
    option("--seeds", type=int, default=3, help="runs of each kind, each with its own seed")
    option("--scale", type=float, default=1.0, help="multiple of the requests of each run")
    option("--trace", type=Path, metavar="FILE", help="Mooncake's conversation trace; default: no rows of it")
    queue = (
        f"of --system {policies.NAME}: the queue of the proxy under every policy, or under none; default: under those "
        "that predict, as `gorgo serve` has it"
    )
    option("--queue", choices=("on", "off"), help=queue)
    option("--count", action="append", type=int, metavar="N", help="so many routers; repeatable")
    option("--json", action="store_true", help="print rows as JSON")
    pictures = "draw the groups, with the extra report"
    option("--pictures", nargs="?", const="svg", choices=("svg", "png"), help=pictures)
    _add_runner_options(parser)
    return parser


def _add_runner_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="folder of runs, page and pictures")
    parser.add_argument("--jobs", type=int, default=-1, help="runs at a time; -1 is one per core")
    parser.add_argument(
        "--backend", choices=BACKENDS, default="loky", help="joblib's: this machine, or a cluster that exists"
    )
