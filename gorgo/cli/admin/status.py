"""`gorgo status`: the fleet as the proxy sees it, or as several do, once or every two seconds.

Owns the command, the console and the loop, which polls on while the proxy does not answer. Leaves the tables to
`gorgo.cli.admin.status_tables`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gorgo.cli import options
from gorgo.cli.admin.call import CallError, call_admin, request_admin
from gorgo.cli.admin.status_tables import plain, status_view


def status(
    url: options.AdminUrls = options.ADMIN_URLS,
    watch: Annotated[bool, typer.Option("--watch", help="Poll every two seconds, until Ctrl-C.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show the fleet as the proxy sees it.

    Alerts, the fleet by region, the last decisions with the terms of every candidate, and the weights with their
    history; `-` is unknown or stale. A line has the weights in force and whether they are frozen, the last one the
    model of a policy that learns. The status page shows the rest too. With --watch, --json prints a line per poll.
    Several --url are shown in turn; a last line compares their weights.
    """
    from gorgo.cli.admin.call import as_expected, call_each, end_with, group_line, print_json

    token = options.admin_token()
    if watch:
        if len(url) > 1:
            raise typer.BadParameter("--watch: expected one --url")
        with as_expected(url[0]):
            watch_status(url[0], token, as_json=as_json)
        return
    answers, failures = call_each("GET", url, STATUS_PATH, token)
    if as_json:
        print_json(answers, of=len(url))
    else:
        for address, shown in answers.items():
            with as_expected(address):
                if len(url) > 1:
                    typer.echo(f"{address}:")
                _show(address, shown, token)
        if len(answers) > 1:
            with as_expected(", ".join(answers)):
                typer.echo(group_line({address: shown["routing"] for address, shown in answers.items()}))
    end_with(failures, of=len(url))


def _show(url: str, shown: Mapping[str, Any], token: str | None) -> None:
    """Print the status of one proxy and the line of a model."""
    from gorgo.cli.admin.call import CallError, request_admin
    from gorgo.cli.admin.status_tables import plain
    from gorgo.live.training_status import model_line

    show_status(shown)
    with suppress(CallError):  # an older proxy has no such route
        learned = model_line(request_admin("GET", url, "/admin/model", token))
        if learned is not None:
            typer.echo(plain(learned).plain)


STATUS_PATH = "/admin/status"
INTERVAL_S = 2.0
#: Lines for a file or a pipe: every column, whatever the terminal, unless `COLUMNS` says how wide.
PIPE_WIDTH = 240


def show_status(status: Mapping[str, Any]) -> None:
    """Print the status once."""
    console = _console()
    console.print(status_view(status, width=console.width))


def watch_status(url: str, token: str | None, *, as_json: bool) -> None:
    """Show the status until Ctrl-C, which is no failure; exit code 1 only if the first call fails."""
    polls = _polls(url, token)
    try:
        if as_json:
            for status in polls:
                typer.echo(json.dumps(status, allow_nan=False))
        else:
            _follow(polls)
    except KeyboardInterrupt:
        return


def _follow(polls: Iterator[Mapping[str, Any]]) -> None:
    console = _console()
    if not console.is_terminal:
        for status in polls:
            console.print(_shown(status, console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for status in polls:
            live.update(_shown(status, console.width), refresh=True)


def _shown(status: Mapping[str, Any], width: int) -> RenderableType:
    failure = status.get("failure")
    if failure is None:
        return status_view(status, width=width)
    return Group(Text("no answer; polling every two seconds", style="bold red"), plain(failure))


def _polls(url: str, token: str | None) -> Iterator[Mapping[str, Any]]:
    """Yield one status after another; `{"failure": TEXT}` without an answer."""
    yield call_admin("GET", url, STATUS_PATH, token)
    while True:
        time.sleep(INTERVAL_S)
        try:
            yield request_admin("GET", url, STATUS_PATH, token)
        except CallError as failure:
            yield {"failure": str(failure)}


def _console() -> Console:
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else PIPE_WIDTH, highlight=False)
