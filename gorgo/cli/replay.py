"""Commands that measure: replay a trace through a running router, or show the whole thing at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED

if TYPE_CHECKING:
    from rich.console import Console

    from gorgo.apps.results import ResultRow

#: Of the results table with the longest policy's name.
TABLE_WIDTH = 100


def replay(
    trace: options.Trace,
    url: Annotated[
        str, typer.Option(help="Base URL of any OpenAI-compatible router or engine.")
    ] = "http://127.0.0.1:8080",
    time_scale: options.TimeScale = 1.0,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    start: options.Start = None,
    end: options.End = None,
    model: Annotated[
        str | None, typer.Option(show_default=False, help="Model to ask for. Default: the first of GET /v1/models.")
    ] = None,
    out: options.Out = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Replay a trace through a running router.

    Requests are sent when the trace says, whatever became of earlier ones; a table sums it up. The exit code is 1 if
    any request failed.
    """
    from gorgo.apps.replay.options import ReplayOptions
    from gorgo.apps.replay.run import replay_command

    filters = options.trace_filters(
        limit=limit,
        max_input=max_input,
        max_output=max_output,
        spread=spread,
        start=start,
        end=end,
        seed=seed,
    )
    asked = ReplayOptions(
        trace=options.trace_path(trace),
        url=url,
        filters=filters,
        time_scale=options.positive(time_scale),
        out=out,
        model=model,
        api_key=options.api_key(),
    )
    report = replay_command(asked)
    _print_rows([report.row], as_json=as_json)
    for kind, count in sorted(report.errors_by_kind.items()):
        typer.echo(f"{count} x {kind}", err=True)
    raise typer.Exit(report.exit_code)


def demo(
    trace: Annotated[
        str | None, typer.Option(metavar="TRACE", show_default=False, help="Default: the small trace that comes along.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", show_default=False, help="Repeatable. Default: gorgo-ms, gorgo and the four of its paper."
        ),
    ] = None,
    time_scale: options.TimeScale = 1.0,
    limit: options.Limit = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Beside each proxy a tuner, with a small window; policy gorgo unless others are named."
        ),
    ] = False,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Show the whole thing at once.

    Three simulated regions, a proxy, a trace, several policies in turn on fresh fleets, and a table. It starts and
    stops its own processes and leaves nothing behind but --out.
    """
    from gorgo.apps.demo.options import DemoOptions
    from gorgo.apps.demo.run import run_demo
    from gorgo.apps.traces import TraceFilters
    from gorgo.policies.registry import make_policy

    asked = DemoOptions(
        policies=tuple(policy or ()),
        trace=None if trace is None else options.trace_path(trace),
        filters=TraceFilters(limit=limit),
        time_scale=options.positive(time_scale),
        out=out,
        tune=tune,
    )
    for name in asked.chosen:  # one that cannot be is told before the first has run for half a minute
        specs = make_policy(name).weight_specs
        if tune and not any(spec.tunable == "always" for spec in specs):
            raise typer.BadParameter(f"--tune: the policy {name} has no weight that a tuner may move")
    histories: list[str] = []
    rows = run_demo(asked, on_history=histories.append)
    if as_json:
        _print_rows(rows, as_json=True)
    else:
        for text in histories:
            typer.echo(text)
        _show_demo(rows, out)
    raise typer.Exit(FAILED if any(row.errors for row in rows) else 0)


def _print_rows(rows: Sequence[ResultRow], *, as_json: bool) -> None:
    from gorgo.apps.results import results_table, rows_as_json

    if as_json:
        typer.echo(rows_as_json(rows))
    else:
        _console().print(results_table(rows))


def _show_demo(rows: Sequence[ResultRow], out: Path | None) -> None:
    from gorgo.apps.demo.show import show_demo

    show_demo(rows, _console(), out=out)


def _console() -> Console:
    """stdout, never narrower than the results table: a pipe has no width to obey."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(TABLE_WIDTH, console.width))
