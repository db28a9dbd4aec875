"""The status of a proxy on the screen, once or every two seconds.

Owns the console and the loop, which polls on while the proxy does not answer; `status_tables` has the tables.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gorgo.cli.admin.call import CallError, call_admin, request_admin
from gorgo.cli.admin.status_tables import plain, status_view

STATUS_PATH = "/admin/status"
INTERVAL_S = 2.0
#: Lines for a file or a pipe: every column, whatever the terminal.
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
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
