"""Commands of the tuner: what it did. This module alone imports `tuner`, and only inside its commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.tables import Cell, table

if TYPE_CHECKING:
    from tuner.commands import GenerationRow

Database = Annotated[
    str,
    typer.Option(
        envvar="GORGO_DATABASE_URL", metavar="URL", help="The tuner's history: sqlite:///FILE or postgresql://..."
    ),
]
DATABASE = "sqlite:///gorgo-history.sqlite3"


def history(
    database: Database = DATABASE,
    campaign: Annotated[int | None, typer.Option(min=1, show_default=False, help="Default: the newest.")] = None,
    last: Annotated[int, typer.Option(min=1, max=100_000, help="The last so many generations.")] = 1000,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Write history.json there, for `gorgo report`."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show which weights the tuner tried, and what became of each.

    One row per generation: its weights, what was measured beside the incumbent's, and why it was taken or not.
    """
    from tuner.commands import read_history, write_history

    row, generations, events = read_history(database, campaign=campaign, limit=last)
    if out is not None:
        write_history(out / "history.json", row, generations)
    if as_json:
        shown = {
            "campaign": None if row is None else asdict(row) | {"options": dict(row.options)},
            "generations": [one.as_json() for one in generations],
            "events": [asdict(event) for event in events],
        }
        options.print_json(shown)
        return
    if row is None:
        typer.echo(f"{database}: no campaign yet; `gorgo tune` starts one")
        return
    ended = "running, or to be continued" if row.outcome is None else row.outcome
    typer.echo(f"campaign {row.id}: {row.policy} on {row.target} since {_when(row.started_s)}; {ended}\n")
    typer.echo(generations_table(generations))
    for event in events:
        typer.echo(f"{_when(event.at_s)}  {event.kind}: {event.reason}")


def generations_table(generations: Sequence[GenerationRow]) -> str:
    """One row per generation."""
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


def _row(one: GenerationRow) -> list[Cell]:
    return [
        one.number,
        _when(one.finished_s),
        _weights(one.weights),
        None if one.sigma is None else f"{one.sigma:.3f}",
        one.n,
        one.objective_ms,
        one.incumbent_objective_ms,
        one.e2e_s_p95,
        one.errors,
        "yes" if one.accepted else "no",
        one.reason,
    ]


def _weights(weights: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.3g}" for name, value in weights.items())


def _when(at_s: float) -> str:
    """UTC, to the second: logs of other machines are read beside it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
