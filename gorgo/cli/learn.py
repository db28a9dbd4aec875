"""`gorgo learn`: train a policy from an outcome log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.errors import BAD_INPUT, fail
from gorgo.cli.tables import Cell, table
from gorgo.formatting import counted

if TYPE_CHECKING:
    from gorgo.lab.learn import LearnedModel


def learn(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="Outcome log of `gorgo serve --outcome-log`.")],
    policy: Annotated[str, typer.Option(metavar="NAME", help="Policy that learns; see `gorgo policies`.")],
    out: Annotated[Path, typer.Option(metavar="MODEL", help="Write the model there, for `proxy.learning.model_file`.")],
    ablation: Annotated[
        bool, typer.Option("--ablation/--no-ablation", help="Train once more without each feature.")
    ] = True,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Train a policy from an outcome log.

    The log may be of another policy. The model is of all rows; errors are those of a model without the newest fifth, on
    that fifth, as shares of the measured time.
    """
    from gorgo.core.training.learning import Learner
    from gorgo.lab.learn import learn as train
    from gorgo.lab.learn import read_outcomes, trainings
    from gorgo.lab.progress import shown_progress
    from gorgo.lab.request_log import cut_lines_warning
    from gorgo.learning.model_file import save
    from gorgo.policies.registry import POLICIES, make_policy

    learner = make_policy(policy)
    if not isinstance(learner, Learner):
        others = ", ".join(name for name in POLICIES if isinstance(make_policy(name), Learner))
        raise fail(f"--policy {policy}: does not learn; expected one of {others}", code=BAD_INPUT)
    found = read_outcomes(log, learner.feature_names)
    rounds = trainings(learner.training, len(found.rows), ablation=ablation)
    with shown_progress("learn", rounds) as advance:
        learned = train(found.rows, learner.training, seed=seed, ablation=ablation, trained=advance)
    save(learned.model, out)
    warning = cut_lines_warning(log, found.cut_lines)
    if warning is not None:
        typer.echo(f"gorgo: {warning}", err=True)
    if as_json:
        more = {"policy": policy, "left_out": found.left_out, "cut_lines": found.cut_lines, "file": str(out)}
        options.print_json(more | learned.as_dict())
        return
    typer.echo(_words(learned, found.left_out, out))
    if learned.features:
        typer.echo(_table(learned))


def _words(learned: LearnedModel, left_out: int, out: Path) -> str:
    both = {"TTFT": learned.ttft_error, "TPOT": learned.tpot_error}
    errors = [f"{name} {100 * value:.1f} %" for name, value in both.items() if value is not None]
    error = ", ".join(errors) or "none, as no row of the newest fifth has a measured time"
    return (
        f"{out}: {learned.model.kind}, {counted(learned.model.samples, 'outcome')} ({left_out:,} attempts left out)\n"
        f"held-out error, {learned.trained:,} outcomes against the {learned.tested:,} after them: {error}"
    )


def _table(learned: LearnedModel) -> str:
    from gorgo.lab.results import percent

    rows: list[list[Cell]] = [["(none)", percent(learned.ablation_ttft_error), percent(learned.ablation_tpot_error)]]
    rows += [[one.name, percent(one.ttft_error), percent(one.tpot_error)] for one in learned.features]
    return table(["without", "TTFT error %", "TPOT error %"], rows)
