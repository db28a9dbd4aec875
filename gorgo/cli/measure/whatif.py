"""`gorgo whatif`: its arguments, and the table that it prints. Leaves the estimates to `gorgo.lab.whatif`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED
from gorgo.cli.tables import Cell, table

if TYPE_CHECKING:
    from gorgo.core.policy.interface import Policy
    from gorgo.lab.whatif import Judgement, Twin


def whatif(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="File that `gorgo serve --outcome-log` wrote.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="Policy to judge. Default: of --weights, or the log's."),
    ] = None,
    weights: options.Weights = None,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Request log or trace of the same time: simulate it under both policies, for the twin's estimate.",
        ),
    ] = None,
    config: options.Config = options.REGIONS_YAML,
    fleet: options.Fleet = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the picture (SVG) there.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Estimate from a log of decisions what other weights or another policy would have done.

    Counts the decisions that change, and estimates what each would have brought from those that went there by chance
    (`proxy.explore`). Says nothing where too few did, with exit code 1. An estimate is of single decisions: what the
    queues and caches would become if all were made so is the twin's to say, or a campaign's.
    """
    from gorgo.lab.decisions import read_decisions
    from gorgo.lab.request_log import cut_lines_warning
    from gorgo.lab.whatif import JudgedLog, simulate_twin

    decision_log = read_decisions(log)
    last = decision_log.decisions[-1]
    judged, values = _wanted(policy, weights, logged=last.policy)
    judgement = JudgedLog(decision_log.decisions).judge(judged, values)
    twin = None
    if requests is not None:
        logged_weights = (last.policy, last.weights)
        trace = options.trace_path(requests)
        twin = simulate_twin(trace, logged=logged_weights, other=(judged.name, values), config=config, fleet=fleet)
    warning = cut_lines_warning(log, decision_log.cut_lines)
    if warning is not None:
        typer.echo(f"gorgo: {warning}", err=True)
    if out is not None:
        _draw(out, judgement, twin)
    if as_json:
        more = None if twin is None else twin.as_json()
        options.print_json(
            {"left_out": decision_log.left_out, "weights": dict(values), **_json(judgement), "twin": more}
        )
    else:
        for line in _lines(judgement, last.policy, twin):
            typer.echo(line)
    if judgement.support.changed and not judgement.support.is_enough:
        raise typer.Exit(FAILED)


def _wanted(name: str | None, file: Path | None, *, logged: str) -> tuple[Policy, Mapping[str, float]]:
    """Return the policy to judge and its weights."""
    from gorgo.config.weights_file import read_weights_file
    from gorgo.core.policy.weights import Weights
    from gorgo.errors import ConfigError, WeightsError
    from gorgo.policies.registry import make_policy

    if file is None:
        policy = make_policy(name or logged)
        return policy, Weights.of(policy.weight_specs)
    read = read_weights_file(file)
    if name is not None and name != read.policy:
        raise ConfigError(f"{file}: weights are for the policy {read.policy!r}, not for {name!r} of --policy")
    policy = make_policy(read.policy)
    try:
        return policy, Weights.of(policy.weight_specs, read.weights, allow_out_of_range=read.widened)
    except WeightsError as error:
        raise ConfigError(f"{file}: {error}") from error


def _draw(path: Path, judgement: Judgement, twin: Twin | None) -> None:
    """Write the picture, or say what it lacks: the table needs no extra."""
    from gorgo.errors import MissingExtra
    from gorgo.lab.whatif import write_judgement_plot

    try:
        write_judgement_plot(path, judgement, twin)
    except MissingExtra as error:
        typer.echo(f"gorgo: {error}", err=True)
    else:
        typer.echo(f"gorgo: wrote {path}", err=True)


def _lines(judgement: Judgement, logged: str, twin: Twin | None) -> Iterator[str]:
    support = judgement.support
    share = f"{100 * support.changed:.1f} %"
    yield f"{support.decisions:,} decisions of {logged}; {judgement.policy} makes {share} otherwise"
    if not support.changed:
        yield "No decision changes, so nothing of the traffic would."
    elif not support.is_enough:
        yield _too_little(judgement)
    else:
        yield f"{support.effective:.0f} decisions, in effect, went there by chance; 95 % intervals:"
        yield ""
        header = ["outcome", "in the log", "IPS", "SNIPS", "DR"]
        yield table(header, [_row(one.name, one.unit, one.logged, one.changes) for one in judgement.outcomes])
        yield ""
        yield f"Late is later than {judgement.late_s * 1e3:.0f} ms, the p95 of the log. {_verdict(judgement)}"
    if twin is not None:
        yield ""
        yield "The twin, simulated with all decisions made so:"
        yield ""
        rows: list[list[Cell]] = [[name, before, after] for name, (before, after) in twin.times_ms().items()]
        yield table(["ms", logged, "what if"], rows)


def _row(name: str, unit: str, logged: float, changes: Mapping[Any, Any]) -> list[Cell]:
    change_texts = [f"{one.change:+.1f} ({one.low:+.1f} to {one.high:+.1f})" for one in changes.values()]
    return [name, f"{logged:.1f} {unit}", *change_texts]


def _too_little(judgement: Judgement) -> str:
    support = judgement.support
    if not support.effective:
        return "No decision went there by chance: no estimate. Set proxy.explore, for example to 20, and log anew."
    return (
        f"{support.effective:.0f} decisions, in effect, went there by chance; expected 30 at least: no estimate. "
        f"{support.needed:.1f} times as many decisions would do, or as much more of proxy.explore."
    )


def _verdict(judgement: Judgement) -> str:
    change = judgement.outcomes[0].changes["dr"]
    if judgement.refuted is not None:
        return "The log refutes it: more requests would be late."
    if change.high < 0.0:
        return "Fewer requests would be late."
    return "The log shows no difference in late requests."


def _json(judgement: Judgement) -> dict[str, Any]:
    support = judgement.support
    return {
        "policy": judgement.policy,
        "decisions": support.decisions,
        "changed": support.changed,
        "effective_decisions": support.effective,
        "late_s": judgement.late_s,
        "refuted": judgement.refuted,
        "outcomes": [
            {
                "name": one.name,
                "unit": one.unit,
                "logged": one.logged,
                "changes": {
                    name: {"change": change.change, "low": change.low, "high": change.high}
                    for name, change in one.changes.items()
                },
            }
            for one in judgement.outcomes
        ],
    }
