"""Commands that change how a running proxy routes: `gorgo set`, `gorgo policy`, `gorgo drain` and `gorgo reload`.

Owns their arguments and what they print. Leaves the calls to `gorgo.cli.admin.call`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gorgo.cli import options
from gorgo.core.numeric import parse_number


def set_weights(
    weights: Annotated[list[str], typer.Argument(metavar="NAME=NUMBER...", help="Weights of the policy in force.")],
    allow_out_of_range: Annotated[
        bool, typer.Option("--allow-out-of-range", help="Accept values out of bounds, from 0 up.")
    ] = False,
    reason: options.Reason = None,
    url: options.AdminUrl = options.ADMIN_URL,
    as_json: options.Json = False,
) -> None:
    """Set weights of a running proxy, as in `gorgo set m_rtt=2`.

    The other weights stay. Frozen weights are not changed: `gorgo unfreeze` first.
    """
    body = {"weights": _values(weights), "allow_out_of_range": allow_out_of_range}
    _change("/admin/weights", url, body, reason, as_json=as_json)


def policy(
    name: Annotated[
        str | None, typer.Argument(help="Policy to set. Without one, show the policy in force.", show_default=False)
    ] = None,
    reason: options.Reason = None,
    url: options.AdminUrl = options.ADMIN_URL,
    as_json: options.Json = False,
) -> None:
    """Show the policy of a running proxy, or set another with its default weights.

    `gorgo policies` lists the policies. Under a freeze the policy does not change.
    """
    from gorgo.cli.admin.call import as_expected, call_admin
    from gorgo.cli.admin.freeze import routing_line

    if name is not None:
        _change("/admin/policy", url, {"policy": name}, reason, as_json=as_json)
        return
    shown = call_admin("GET", url, "/admin/policy", options.admin_token())
    with as_expected(url):
        if as_json:
            options.print_json(shown)
            return
        shadow = "" if shown["shadow"] is None else f"\nshadow policy {shown['shadow']}"
        typer.echo(f"{routing_line(shown)}\n{shown['policy']}: {shown['summary']}{shadow}")


def _change(path: str, url: str, body: Mapping[str, Any], reason: str | None, *, as_json: bool) -> None:
    from gorgo.cli.admin.call import as_expected, call_admin
    from gorgo.cli.admin.freeze import routing_line

    request = {**body, "reason": reason, "by": options.operator()}
    shown = call_admin("PUT", url, path, options.admin_token(), request)
    with as_expected(url):
        if as_json:
            options.print_json(shown)
        else:
            typer.echo(routing_line(shown))


def _values(words: Sequence[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        value = parse_number(number)
        if not name or value is None:
            raise typer.BadParameter(f"{word!r}: expected NAME=NUMBER, as in m_rtt=2")
        if name in values:
            raise typer.BadParameter(f"{name!r} is given twice")
        values[name] = value
    return values


def drain(
    name: Annotated[str, typer.Argument(help="Name of the replica, as in regions.yaml.")],
    undo: Annotated[bool, typer.Option("--undo", help="End the drain: the replica gets new requests again.")] = False,
    move: Annotated[
        bool, typer.Option("--move", help="Let the streams that run there go on at other replicas, the oldest first.")
    ] = False,
    url: options.AdminUrl = options.ADMIN_URL,
    as_json: options.Json = False,
) -> None:
    """Drain a replica: no new requests. Open streams end there, or with --move go on at other replicas.

    With a state file the drain holds over restarts, until --undo or an edit of `draining` in regions.yaml.
    """
    from gorgo.cli.admin.call import as_expected, call_admin

    path = f"/admin/replicas/{quote(name, safe='')}/drain"
    answer = call_admin("POST", url, path, options.admin_token(), {"drain": not undo, "move": move and not undo})
    with as_expected(url):
        in_flight, durable = int(answer["in_flight"]), bool(answer["durable"])
        if as_json:
            options.print_json(answer)
        elif undo:
            typer.echo(f"{name} gets new requests again")
        else:
            moving = ", and its streams go on at other replicas" if move else ""
            typer.echo(f"{name} is draining: no new requests, {in_flight} in flight{moving}")
    if not durable:
        why = "the proxy runs without --state, or its state file cannot be written (its log says why)"
        typer.echo(f"gorgo: {why}: the change ends with its process", err=True)


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
