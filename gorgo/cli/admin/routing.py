"""Commands that change how running proxies route: `gorgo set`, `policy`, `drain`, `reload`, `freeze` and `unfreeze`.

Owns their arguments and what they print. Leaves the calls to `gorgo.cli.admin.call`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED, fail
from gorgo.core.numeric import parse_number

if TYPE_CHECKING:
    from gorgo.config.weights_file import WeightsFile


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
        for kind, change in changes.items():
            typer.echo(f"{kind}: {_text(change)}")


def _text(change: object) -> str:
    return ", ".join(map(str, change)) if isinstance(change, list) else json.dumps(change)


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
    from gorgo.cli.tune import DATABASE
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
