"""`gorgo status`: the fleet as the proxy sees it, or as several do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer

from gorgo.cli import options


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
    from gorgo.cli.admin.call import as_expected
    from gorgo.cli.admin.group import call_each, end_with, group_line, print_json
    from gorgo.cli.admin.status_watch import STATUS_PATH, watch_status

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
    from gorgo.cli.admin.status_watch import show_status
    from gorgo.live.training_status import model_line

    show_status(shown)
    with suppress(CallError):  # an older proxy has no such route
        learned = model_line(request_admin("GET", url, "/admin/model", token))
        if learned is not None:
            typer.echo(plain(learned).plain)
