"""`gorgo status` on the screen: once, or again and again.

Owns the console and the loop. Where a proxy does not answer for a while (a restart, a network) that is said, and it is
asked again: whoever watches at night wants to see it come back.
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

from gorgo.cli.admin_call import CallError, ask_admin, call_admin
from gorgo.cli.check import STATUS_PATH
from gorgo.cli.status.tables import plain, status_view

INTERVAL_S = 2.0
#: Lines for a file or a pipe: every column, whatever the terminal.
PIPE_WIDTH = 240


def show_status(status: Mapping[str, Any]) -> None:
    """Print it once."""
    console = _console()
    console.print(status_view(status, width=console.width))


def watch_status(url: str, token: str | None, *, as_json: bool) -> None:
    """Until Ctrl-C, which is no failure. Ends with exit code 1 only if the first call fails."""
    looks = _looks(url, token)
    try:
        if as_json:
            for status in looks:
                typer.echo(json.dumps(status, allow_nan=False))
        else:
            _follow(looks)
    except KeyboardInterrupt:
        return


def _follow(looks: Iterator[Mapping[str, Any]]) -> None:
    console = _console()
    if not console.is_terminal:
        for status in looks:
            console.print(_shown(status, console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for status in looks:
            live.update(_shown(status, console.width), refresh=True)


def _shown(status: Mapping[str, Any], width: int) -> RenderableType:
    failure = status.get("failure")
    if failure is None:
        return status_view(status, width=width)
    return Group(Text("no answer, asked again every two seconds", style="bold red"), plain(failure))


def _looks(url: str, token: str | None) -> Iterator[Mapping[str, Any]]:
    """One status after another; `{"failure": WORDS}` where there was none."""
    yield call_admin("GET", url, STATUS_PATH, token)
    while True:
        time.sleep(INTERVAL_S)
        try:
            yield ask_admin("GET", url, STATUS_PATH, token)
        except CallError as failure:
            yield {"failure": str(failure)}


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
