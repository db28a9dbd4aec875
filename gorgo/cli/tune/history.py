"""`gorgo history`: the weights that the tuner tried, as text and as a table.

Owns the command and the words for a campaign and its generations, which `gorgo tune-offline` prints too. Leaves the
database to `tuner.history`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.tables import Cell, table
from gorgo.cli.tune import options as tuning

if TYPE_CHECKING:
    from tuner.commands import CampaignRow, EventRow, Generation


#: Characters of a text in a table: a reason of the tuner has some 100.
MAX_SHOWN = 300


def campaign_in_words(
    database: str, row: CampaignRow | None, generations: Sequence[Generation], events: Sequence[EventRow]
) -> str:
    """Return the text that `gorgo history` prints."""
    if row is None:
        return f"{database}: no campaign yet; `gorgo tune` starts one"
    ended = "running, or to be continued" if row.outcome is None else row.outcome
    head = f"campaign {row.id}: {line(row.policy)} on {line(row.target)} since {moment(row.started_s)}; {line(ended)}"
    noted = [f"{moment(event.at_s)}  {line(event.kind)}: {line(event.reason)}" for event in events]
    return "\n".join([head, "", generations_table(generations), *noted])


def generations_table(generations: Sequence[Generation]) -> str:
    """Return a table with a row per generation."""
    header = [
        "gen",
        "ended",
        "weights",
        "sigma",
        "n",
        "TTFT p95 ms",
        "incumbent",
        "E2E p95 s",
        "errors",
        "taken",
        "why",
    ]
    return table(header, [_row(one) for one in generations])


def _row(one: Generation) -> list[Cell]:
    return [
        one.number,
        moment(one.finished_s),
        weights_in_words(one.weights),
        None if one.sigma is None else f"{one.sigma:.3f}",
        one.n,
        one.objective_ms,
        one.incumbent_objective_ms,
        one.e2e_s_p95,
        one.errors,
        "yes" if one.accepted else "no",
        line(one.reason),
    ]


def weights_in_words(weights: Mapping[str, float]) -> str:
    """Return the weights as `name=value` pairs."""
    return " ".join(f"{name}={value:.3g}" for name, value in weights.items())


def line(text: str) -> str:
    """Return a text of the history as part of one line: a terminal obeys control characters."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."


def moment(at_s: float) -> str:
    """Return a Unix time as UTC, to the second, for comparison with the logs of other hosts."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def history(
    database: tuning.Database = tuning.DATABASE,
    campaign: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Number of the campaign. Default: the newest.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, help="Show at most this many generations.")] = 1000,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Write history.json there, for `gorgo report`."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Plot weights, sigma and objective: .svg, .png or .pdf."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show the weights that the tuner tried and the result of each.

    One row per generation: its weights, its measurements beside the incumbent's, and why it was accepted or rejected.
    """
    from tuner.commands import read_history, write_history

    row, generations, events = read_history(database, campaign=campaign, limit=last)
    if out is not None:
        write_history(out / "history.json", row, generations)
    if plot is not None:
        from gorgo.lab.report import write_tuning_plot

        write_tuning_plot(plot, [one.as_json() for one in generations])
    if as_json:
        shown = {
            "campaign": None if row is None else asdict(row) | {"options": dict(row.options)},
            "generations": [one.as_json() for one in generations],
            "events": [asdict(event) for event in events],
        }
        options.print_json(shown)
        return
    typer.echo(campaign_in_words(database, row, generations, events))
