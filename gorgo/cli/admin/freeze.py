"""`gorgo freeze` and `gorgo unfreeze`: freeze the weights of a running proxy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED, fail

if TYPE_CHECKING:
    from gorgo.config.weights_file import WeightsFile


def freeze(
    url: options.AdminUrl = options.ADMIN_URL,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|best|N",
            show_default=False,
            help="Weights to freeze: a file, the best of the tuner or its generation N. Default: those in force.",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="GORGO_DATABASE_URL",
            metavar="URL",
            show_default=False,
            help="History of the tuner: source of --weights best or N; the freeze is recorded there.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the frozen weights to a weights file.", show_default=False),
    ] = None,
    reason: options.Reason = None,
    as_json: options.Json = False,
) -> None:
    """Freeze the weights of a running proxy.

    The proxy rejects every other change of weights (409) until `gorgo unfreeze`. With a state file the weights stay
    frozen over restarts.
    """
    from gorgo.cli.admin.call import as_expected, call_admin

    body: dict[str, Any] = {"reason": reason, "by": options.operator()}
    if weights is not None:
        wanted, database = _found(weights, database)
        body |= {"policy": wanted.policy, "weights": dict(wanted.weights), "allow_out_of_range": wanted.widened}
    pinned = call_admin("POST", url, "/admin/freeze", options.admin_token(), body)
    with as_expected(url):
        line, durable = routing_line(pinned), bool(pinned["durable"])
        if export is not None:
            _export(export, pinned)
        if database is not None:
            _note(database, pinned)
        if as_json:
            options.print_json(pinned)
        else:
            typer.echo(line)
    if not durable:
        typer.echo("gorgo: the proxy runs without --state: the freeze ends with its process", err=True)


def unfreeze(
    url: options.AdminUrl = options.ADMIN_URL,
    reason: options.Reason = None,
    as_json: options.Json = False,
) -> None:
    """Unfreeze the weights of a running proxy.

    The weights do not change until the next change of an operator or a tuner.
    """
    from gorgo.cli.admin.call import as_expected, call_admin

    body = {"reason": reason, "by": options.operator()}
    shown = call_admin("POST", url, "/admin/unfreeze", options.admin_token(), body)
    with as_expected(url):
        if as_json:
            options.print_json(shown)
        else:
            typer.echo(routing_line(shown))


def routing_line(shown: Mapping[str, Any]) -> str:
    """Return policy, weights, version and freeze of an admin answer as a line."""
    values = "".join(f" {name}={value:g}" for name, value in shown["weights"].items())
    return f"policy {shown['policy']}{values}, version {shown['version']}, {_frozen(shown['frozen'])}"


def _frozen(frozen: Mapping[str, str | None] | None) -> str:
    if frozen is None:
        return "not frozen"
    by = "" if frozen["by"] is None else f" by {frozen['by']}"
    return f"frozen since {frozen['since']}{by}" + ("" if frozen["reason"] is None else f": {frozen['reason']}")


def _found(spec: str, database: str | None) -> tuple[WeightsFile, str | None]:
    """Return the weights that `--weights` names, and the history that they are from or that `--database` names.

    A file of that name goes before an entry of the history. Whoever writes a history cannot widen the bounds.
    """
    from gorgo.cli.tune.options import DATABASE
    from gorgo.config.weights_file import WeightsFile, read_weights_file
    from gorgo.core.policy.weights import Weights
    from gorgo.errors import WeightsError
    from gorgo.policies.registry import make_policy
    from tuner.commands import weights_of

    if (spec != "best" and not spec.isdecimal()) or Path(spec).exists():
        return read_weights_file(Path(spec)), database
    database = database or DATABASE
    policy, values = weights_of(spec, database)
    specs = make_policy(policy).weight_specs
    try:
        Weights.of(specs, values)
    except WeightsError as error:
        remedy = "a weights file with `widened: true` holds others"
        raise fail(f"{database}: {error}; {remedy}", code=FAILED) from error
    return WeightsFile(policy=policy, weights=values, widened=False), database


def _note(database: str, pinned: Mapping[str, Any]) -> None:
    from gorgo.errors import HistoryError
    from tuner.commands import note_freeze

    reason = pinned["frozen"]["reason"]
    try:
        note_freeze(database, pinned["weights"], f"by {options.operator()}" + (f": {reason}" if reason else ""))
    except HistoryError as error:
        raise fail(f"the weights are frozen, but the event is not in the history: {error}", code=FAILED) from error


def _export(path: Path, pinned: Mapping[str, Any]) -> None:
    from gorgo.config.weights_file import WeightsFile, write_weights_file

    file = WeightsFile(
        policy=pinned["policy"],
        weights=pinned["weights"],
        widened=bool(pinned["out_of_range"]),
        source=f"gorgo freeze, version {pinned['version']}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note=pinned["frozen"]["reason"],
    )
    try:
        write_weights_file(path, file)
    except OSError as error:
        raise fail(f"the weights are frozen, but {path} cannot be written: {error.strerror}", code=FAILED) from error
