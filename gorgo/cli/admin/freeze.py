"""`gorgo freeze` and `gorgo unfreeze`: freeze the weights of a running proxy, or of several."""

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

_ALONE = "--campaign: expected --weights best or a generation's number beside it"


def freeze(
    url: options.AdminUrls = options.ADMIN_URLS,
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
    campaign: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Campaign of --weights best or N. Default: the newest that has such weights.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the frozen weights to a weights file.", show_default=False),
    ] = None,
    reason: options.Reason = None,
    as_json: options.Json = False,
) -> None:
    """Freeze the weights of a running proxy, or of several.

    The proxy rejects every other change of weights (409) until `gorgo unfreeze`. A freeze of weights that are frozen
    changes nothing. With a state file the weights stay frozen over restarts. Several --url get the same weights: those
    of --weights, or those in force at the first.
    """
    from gorgo.cli.admin.call import as_expected, call_each, end_with, print_json, print_lines

    body: dict[str, Any] = {"reason": reason, "by": options.operator()}
    if campaign is not None and weights is None:
        raise typer.BadParameter(_ALONE)
    if weights is not None:
        wanted, database = _found(weights, database, campaign)
        body |= {"policy": wanted.policy, "weights": dict(wanted.weights), "allow_out_of_range": wanted.widened}
    token = options.admin_token()
    answers, failures = call_each("POST", url, "/admin/freeze", token, lambda before: _as_first(before) | body)
    volatile, unchanged = [], []
    for address, pinned in answers.items():
        with as_expected(address):
            routing_line(pinned)
            volatile += [] if pinned["durable"] else [address]
            unchanged += [address] if reason is not None and pinned["frozen"]["reason"] != reason else []
    if answers:
        address, pinned = next(iter(answers.items()))
        with as_expected(address):
            if export is not None:
                _export(export, pinned)
            if database is not None and address not in unchanged:
                _note(database, pinned)
    print_json(answers, of=len(url)) if as_json else print_lines(answers, routing_line, of=len(url))
    for address in unchanged:
        proxy = "the proxy" if len(url) == 1 else address
        message = (
            f"gorgo: {proxy} was frozen before with these weights: its freeze stays, and this reason was not taken"
        )
        typer.echo(message, err=True)
    for address in volatile:
        proxy = "the proxy" if len(url) == 1 else address
        typer.echo(f"gorgo: {proxy} runs without --state: the freeze ends with its process", err=True)
    end_with(failures, of=len(url))


def unfreeze(
    url: options.AdminUrls = options.ADMIN_URLS, reason: options.Reason = None, as_json: options.Json = False
) -> None:
    """Unfreeze the weights of a running proxy, or of several.

    The weights do not change until the next change of an operator or a tuner.
    """
    from gorgo.cli.admin.call import call_each, end_with, print_json, print_lines

    body = {"reason": reason, "by": options.operator()}
    answers, failures = call_each("POST", url, "/admin/unfreeze", options.admin_token(), lambda _before: body)
    print_json(answers, of=len(url)) if as_json else print_lines(answers, routing_line, of=len(url))
    end_with(failures, of=len(url))


def _as_first(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return policy and weights of the first proxy of several: a tuner may have put others in between."""
    from gorgo.cli.admin.call import as_expected

    for address, pinned in answers.items():
        with as_expected(address):
            outside = bool(pinned["out_of_range"])
            return {"policy": pinned["policy"], "weights": dict(pinned["weights"]), "allow_out_of_range": outside}
    return {}


def routing_line(shown: Mapping[str, Any]) -> str:
    """Return policy, weights, version and freeze of an admin answer as a line."""
    values = "".join(f" {name}={value:g}" for name, value in shown["weights"].items())
    return f"policy {shown['policy']}{values}, version {shown['version']}, {_frozen(shown['frozen'])}"


def _frozen(frozen: Mapping[str, str | None] | None) -> str:
    if frozen is None:
        return "not frozen"
    by = "" if frozen["by"] is None else f" by {frozen['by']}"
    return f"frozen since {frozen['since']}{by}" + ("" if frozen["reason"] is None else f": {frozen['reason']}")


def _found(spec: str, database: str | None, campaign: int | None) -> tuple[WeightsFile, str | None]:
    """Return the weights that `--weights` names, and the history that they are from or that `--database` names.

    A file of that name goes before an entry of the history. Whoever writes a history cannot widen the bounds.
    """
    from gorgo.cli.tune.options import DATABASE
    from gorgo.config.weights_file import WeightsFile, read_weights_file
    from gorgo.core.policy.weights import Weights
    from gorgo.errors import WeightsError
    from gorgo.policies.registry import make_policy
    from tuner.commands import weights_of

    if (spec != "best" and not spec.isdecimal()) or (campaign is None and Path(spec).exists()):
        if campaign is not None:
            raise typer.BadParameter(_ALONE)
        return read_weights_file(Path(spec)), database
    database = database or DATABASE
    policy, values = weights_of(spec, database, campaign=campaign)
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
