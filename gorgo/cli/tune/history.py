"""`gorgo history`: the weights that the tuner tried."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gorgo.cli import options
from gorgo.cli.tune import options as tuning
from gorgo.cli.tune.generations import campaign_in_words


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
        from gorgo.apps.report import write_tuning_plot

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
