"""`gorgo drain`: take a replica of a running proxy out of service for new requests."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from gorgo.cli import options


def drain(
    name: Annotated[str, typer.Argument(help="Name of the replica, as in regions.yaml.")],
    undo: Annotated[bool, typer.Option("--undo", help="End the drain: the replica gets new requests again.")] = False,
    url: options.AdminUrl = options.ADMIN_URL,
    as_json: options.Json = False,
) -> None:
    """Drain a replica: no new requests; open streams continue.

    With a state file the drain holds over restarts, until --undo or an edit of `draining` in regions.yaml.
    """
    from gorgo.cli.admin.call import as_expected, call_admin

    path = f"/admin/replicas/{quote(name, safe='')}/drain"
    answer = call_admin("POST", url, path, options.admin_token(), {"drain": not undo})
    with as_expected(url):
        in_flight, durable = int(answer["in_flight"]), bool(answer["durable"])
        if as_json:
            options.print_json(answer)
        elif undo:
            typer.echo(f"{name} gets new requests again")
        else:
            typer.echo(f"{name} is draining: no new requests, {in_flight} in flight")
    if not durable:
        typer.echo("gorgo: the proxy runs without --state: the change ends with its process", err=True)
