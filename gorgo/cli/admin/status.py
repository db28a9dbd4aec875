"""`gorgo status`: the fleet as the proxy sees it."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from gorgo.cli import options


def status(
    url: options.AdminUrl = options.ADMIN_URL,
    watch: Annotated[bool, typer.Option("--watch", help="Poll every two seconds, until Ctrl-C.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show the fleet as the proxy sees it.

    Alerts, the fleet by region, the last decisions with the terms of every candidate, and the weights with their
    history; `-` is unknown or stale. A line has the weights in force and whether they are frozen, the last one the
    model of a policy that learns. The status page shows the rest too. With --watch, --json prints a line per poll.
    """
    from gorgo.cli.admin.call import CallError, as_expected, call_admin, request_admin
    from gorgo.cli.admin.status_tables import plain
    from gorgo.cli.admin.status_watch import STATUS_PATH, show_status, watch_status
    from gorgo.live.training.status import model_line

    token = options.admin_token()
    with as_expected(url):
        if watch:
            watch_status(url, token, as_json=as_json)
            return
        shown = call_admin("GET", url, STATUS_PATH, token)
        if as_json:
            options.print_json(shown)
            return
        show_status(shown)
        with suppress(CallError):  # an older proxy has no such route
            learned = model_line(request_admin("GET", url, "/admin/model", token))
            if learned is not None:
                typer.echo(plain(learned).plain)
