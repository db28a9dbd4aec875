"""`gorgo demo`: several policies on one trace, with its own proxy and engines."""

from __future__ import annotations

from typing import Annotated

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED
from gorgo.cli.measure.replay import TABLE_WIDTH
from gorgo.cli.tables import wide_console


def demo(
    trace: Annotated[
        str | None, typer.Option(metavar="TRACE", show_default=False, help="Trace to replay. Default: the shipped one.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Policy to run; repeatable. Default: gorgo-ms, gorgo and four others.",
        ),
    ] = None,
    load: options.Load = None,
    time_scale: options.TimeScale = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Tune on a part of the trace: rows by default, while tuned, frozen; policy gorgo."),
    ] = False,
    out: options.Out = None,
    as_json: options.Json = False,
) -> None:
    """Replay a trace under several policies in three simulated regions.

    Each policy runs in a real proxy before a fresh fleet of simulated engines; a table compares them. The command
    starts and stops its own processes and writes nothing but --out. If requests fail, a line per cause says why.
    """
    from gorgo.lab.demo import DemoOptions, run_demo, show_demo
    from gorgo.lab.failures import failure_lines
    from gorgo.lab.results import rows_as_json
    from gorgo.lab.traces import TraceFilters
    from gorgo.policies.registry import make_policy

    wanted = DemoOptions(
        policies=tuple(policy or ()),
        trace=None if trace is None else options.trace_path(trace),
        filters=TraceFilters(limit=limit, max_input=max_input),
        time_scale=options.time_scale_of(time_scale, load),
        out=out,
        tune=tune,
    )
    for name in wanted.chosen:  # reject before the first has run for half a minute
        specs = make_policy(name).weight_specs
        if tune and not any(spec.tunable == "yes" for spec in specs):
            raise typer.BadParameter(f"--tune: the policy {name} has no weight that a tuner may move")
    words: list[str] = []
    rows = run_demo(wanted, on_words=words.append)
    if as_json:
        typer.echo(rows_as_json(rows))
    else:
        for text in words:
            typer.echo(text)
        show_demo(rows, wide_console(TABLE_WIDTH), out=out, tune=tune)
    for row in rows:
        for line in failure_lines(row.failures, row.n):
            typer.echo(f"gorgo: {row.policy}: {line}", err=True)
    raise typer.Exit(FAILED if any(row.errors for row in rows) else 0)
