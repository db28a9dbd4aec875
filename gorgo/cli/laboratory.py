"""`gorgo laboratory`: the table of everything that the comparison claims."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED

if TYPE_CHECKING:
    from gorgo.apps.laboratory import Bench, Session, Target

#: Of the longest row of the table.
TABLE_WIDTH = 130
#: Of `--quick`: minutes instead of the better part of an hour of processor time, and a look, not a result.
QUICK_SEEDS, QUICK_REQUESTS = 2, 2_000
#: As `gorgo datasets fetch mooncake-conversation` leaves it.
CONVERSATION = Path("conversation_trace.jsonl")


def laboratory(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Mooncake's conversation trace. Default: conversation_trace.jsonl if it is here, else without.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run each policy on so many seeds.")] = 10,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default=False, help="Repeatable: this group of targets alone."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two seeds and 2,000 requests of each window: a look, not a result.")
    ] = False,
    config: options.Config = options.REGIONS_YAML,
    out: options.Out = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Runs at a time. Default: one per core.")
    ] = None,
) -> None:
    """Check every claim about the policies, in virtual time.

    Prints each target with the ratio that came out, its 95 % interval and whether it is met; with --out also
    laboratory.md and results.json, and runs that were made before are not made again. The exit code says whether the
    table was made, not whether its targets are met.
    """
    from rich.console import Console

    from gorgo.apps.laboratory import Laboratory, Session, as_markdown, show_findings
    from gorgo.config.atomic import PUBLIC, write_atomically

    asked = Laboratory(
        targets=_targets(trace, only),
        bench=_bench(config, QUICK_REQUESTS if quick else None),
        seeds=range(min(seeds, QUICK_SEEDS) if quick else seeds),
        out=out,
        n_jobs=-1 if jobs is None else jobs,
    )
    session = Session(asked)
    _say_what_comes(session, quick=quick)
    findings = session.run()
    if out is not None:
        write_atomically(out / "laboratory.md", as_markdown(findings).encode(errors="backslashreplace"), mode=PUBLIC)
    console = Console()
    if not console.is_terminal:  # a pipe has no width to obey
        console = Console(width=max(TABLE_WIDTH, console.width))
    show_findings(findings, console)
    if any(row.errors for by_seed in findings.rows.values() for row in by_seed.values()):
        typer.echo("gorgo: some requests failed; results.json says in which runs", err=True)
        raise typer.Exit(FAILED)


def _targets(trace: Path | None, only: list[str] | None) -> list[Target]:
    from gorgo.apps.laboratory import all_targets, groups

    unknown = [name for name in only or () if name not in groups()]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]}: no such group of targets; there are: {', '.join(groups())}")
    targets = all_targets(_conversation(trace))
    return [target for target in targets if not only or target.group in only]


def _conversation(trace: Path | None) -> str | None:
    """The file, if there is one. A file that was asked for and is missing is an error; otherwise it is said aloud."""
    if trace is not None:
        if not trace.is_file():
            raise typer.BadParameter(f"--trace {trace}: no such file")
        return str(trace)
    if CONVERSATION.is_file():
        return str(CONVERSATION)
    typer.echo(
        f"gorgo: no {CONVERSATION} here: THE ROWS OF THE CONVERSATION TRACE ARE LEFT OUT, and geometric means lack "
        "them. `gorgo datasets fetch mooncake-conversation` fetches it; --trace FILE names it elsewhere",
        err=True,
    )
    return None


def _bench(config: Path, first_requests: int | None) -> Bench:
    """The fleet of regions.yaml, the Router told what its engines really are."""
    from gorgo.apps.laboratory import Bench
    from gorgo.apps.simulate.fleet import fleet_of, limits_of
    from gorgo.config.load import load_config
    from gorgo.sim.faults.scenarios import with_accurate_priors

    loaded = load_config(config)
    return Bench(
        fleet=with_accurate_priors(fleet_of(loaded, source=config)),
        limits=limits_of(loaded),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
        first_requests=first_requests,
    )


def _say_what_comes(session: Session, *, quick: bool) -> None:
    from gorgo.apps.laboratory import estimated_cpu_s

    runs, missing = len(session.plan.jobs), len(session.missing)
    minutes = estimated_cpu_s(session.missing) / 60
    typer.echo(
        f"gorgo: {runs} runs, {runs - missing} made before; about {minutes:.0f} minutes of processor time", err=True
    )
    if quick:
        typer.echo("gorgo: --quick: few seeds and short windows; the ratios below are a look, not a result", err=True)
