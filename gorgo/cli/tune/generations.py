"""The generations of a campaign as text and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from gorgo.cli.tables import Cell, table

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
