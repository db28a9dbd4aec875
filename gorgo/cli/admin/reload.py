"""`gorgo reload`: let a running proxy read its regions.yaml now."""

from __future__ import annotations

import json

import typer

from gorgo.cli import options


def reload(url: options.AdminUrl = options.ADMIN_URL, as_json: options.Json = False) -> None:
    """Let a running proxy read regions.yaml and its certificates and keys now, as SIGHUP does.

    Prints what changed. A file that the proxy refuses changes nothing: exit code 1 with the errors.
    """
    from gorgo.cli.admin.call import as_expected, call_admin

    answer = call_admin("POST", url, "/admin/reload", options.admin_token())
    with as_expected(url):
        if as_json:
            options.print_json(answer)
            return
        count, changes = int(answer["replicas"]), answer["changes"]
        unchanged = "" if changes else ", nothing changed"
        typer.echo(f"applied: {'1 replica' if count == 1 else f'{count} replicas'}{unchanged}")
        for kind, found in changes.items():
            typer.echo(f"{kind}: {_text(found)}")


def _text(found: object) -> str:
    return ", ".join(map(str, found)) if isinstance(found, list) else json.dumps(found)
