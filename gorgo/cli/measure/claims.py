"""`gorgo claims`: every claim about the policies, checked in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED
from gorgo.cli.tables import wide_console

if TYPE_CHECKING:
    from gorgo.apps.claims import ClaimCheck, Conditions, RatioTarget

#: Of the longest row of the table.
TABLE_WIDTH = 130
#: Of `--quick`: minutes instead of the better part of an hour of processor time, and a preview, not a result.
QUICK_SEEDS, QUICK_REQUESTS = 2, 2_000
#: As `gorgo datasets fetch mooncake-conversation` leaves it.
CONVERSATION = Path("conversation_trace.jsonl")


def claims(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Mooncake conversation trace. Default: conversation_trace.jsonl in this folder, if any.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per policy, each with its own seed.")] = 10,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default=False, help="Check only this group of targets; repeatable."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two seeds and 2,000 requests of each window: a preview, not a result.")
    ] = False,
    out: options.Out = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Runs at a time. Default: one per core.")
    ] = None,
) -> None:
    """Check every claim about the policies, in virtual time.

    Prints each target with its measured ratio, the 95 % interval and whether it is met. With --out also writes
    claims.md and results.json, and reuses earlier runs. The exit code is 1 if a request failed under a policy of which
    something is claimed; missed targets do not change it.
    """
    from gorgo.apps.claims import ClaimCheck, ClaimOptions
    from gorgo.apps.claims.table import as_markdown, show_sections
    from gorgo.config.atomic import PUBLIC, write_atomically

    options = ClaimOptions(
        targets=_targets(trace, only),
        conditions=_conditions(QUICK_REQUESTS if quick else None),
        seeds=range(min(seeds, QUICK_SEEDS) if quick else seeds),
        out=out,
        n_jobs=-1 if jobs is None else jobs,
    )
    check = ClaimCheck(options)
    _announce(check, quick=quick)
    findings = check.run()
    tables, summary = findings.sections(), findings.summary()
    if out is not None:
        text = as_markdown(tables, summary)
        write_atomically(out / "claims.md", text.encode(errors="backslashreplace"), mode=PUBLIC)
    show_sections(tables, wide_console(TABLE_WIDTH), summary)
    failing = findings.failing()
    if failing:
        typer.echo(f"gorgo: requests failed under {', '.join(failing)}; results.json says in which runs", err=True)
    if {target.policy for target in options.targets} & {*failing}:
        raise typer.Exit(FAILED)


def _targets(trace: Path | None, only: list[str] | None) -> list[RatioTarget]:
    from gorgo.apps.claims import all_targets, groups

    unknown = [name for name in only or () if name not in groups()]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]}: no such group of targets; there are: {', '.join(groups())}")
    targets = all_targets(_conversation(trace))
    return [target for target in targets if not only or target.group in only]


def _conversation(trace: Path | None) -> str | None:
    """Return the trace's file; a missing one is an error if named, else a warning."""
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


def _conditions(first_requests: int | None) -> Conditions:
    """Return the fleet of regions.yaml with accurate priors of its engines."""
    from gorgo.apps.claims import Conditions
    from gorgo.apps.simulate.fleet import fleet_of, limits_of
    from gorgo.config.load import load_config
    from gorgo.sim.faults.scenarios import with_accurate_priors

    loaded = load_config(options.REGIONS_YAML)
    return Conditions(
        fleet=with_accurate_priors(fleet_of(loaded, source=options.REGIONS_YAML)),
        limits=limits_of(loaded),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
        first_requests=first_requests,
    )


def _announce(check: ClaimCheck, *, quick: bool) -> None:
    runs, missing = len(check.tasks), len(check.missing)
    minutes = check.estimated_cpu_s() / 60
    typer.echo(
        f"gorgo: {runs} runs, {runs - missing} made before; about {minutes:.0f} minutes of processor time", err=True
    )
    if quick:
        typer.echo("gorgo: --quick: few seeds and short windows; the ratios are a preview, not a result", err=True)
