"""`gorgo demo` and `gorgo replay`: a trace through a running router."""

from __future__ import annotations

from typing import Annotated

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED
from gorgo.cli.tables import wide_console

#: Width of the results table with the longest name of a policy.
TABLE_WIDTH = 100


def replay(
    trace: options.Trace,
    url: Annotated[
        str, typer.Option(help="Base URL of any OpenAI-compatible router or engine.")
    ] = "http://127.0.0.1:8080",
    load: options.Load = None,
    time_scale: options.TimeScale = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    start: options.Start = None,
    end: options.End = None,
    user_sessions: options.UserSessions = False,
    closed_loop: options.ClosedLoop = False,
    model: Annotated[
        str | None, typer.Option(show_default=False, help="Model to request. Default: the first of GET /v1/models.")
    ] = None,
    out: options.Out = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Replay a trace through a running router.

    Each request is sent at its time in the trace, whether or not earlier ones have ended, and a session's name as
    `x-session-id`. A table sums up the result.
    Ctrl-C and SIGTERM end it early, with the table and the files of the requests that have ended. The exit code is 1 if
    any request failed, 130 after Ctrl-C, 143 after SIGTERM.
    """
    from gorgo.lab.failures import failure_lines
    from gorgo.lab.replay import replay_command
    from gorgo.lab.replay_client import ReplayOptions
    from gorgo.lab.results import results_table, rows_as_json

    filters = options.trace_filters(
        limit=limit,
        max_input=max_input,
        max_output=max_output,
        spread=spread,
        start=start,
        end=end,
        seed=seed,
        user_sessions=user_sessions,
    )
    wanted = ReplayOptions(
        trace=options.trace_path(trace),
        url=url,
        filters=filters,
        time_scale=options.time_scale_of(time_scale, load),
        closed_loop=closed_loop,
        out=out,
        model=model,
        api_key=options.api_key(),
    )
    report = replay_command(wanted)
    if as_json:
        typer.echo(rows_as_json([report.row]))
    else:
        wide_console(TABLE_WIDTH).print(results_table([report.row]))
    for line in (*failure_lines(report.row.failures, report.row.n), *filter(None, [report.warning])):
        typer.echo(f"gorgo: {line}", err=True)
    if report.interrupted_by is not None:
        ended = f"{report.row.n:,} of {report.row.planned or 0:,} requests"
        typer.echo(f"gorgo: {report.interrupted_by.name}: partial, the summary is of {ended}", err=True)
    raise typer.Exit(report.exit_code)


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
