"""`gorgo set` and `gorgo policy`: weights and policy of a running proxy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

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
