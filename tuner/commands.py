"""What the command line calls of the tuner: the one door through which `gorgo` imports it.

Owns the composition: database, proxy, campaign. The words on the terminal are the command line's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.campaign.options import CampaignOptions
from tuner.history import DEFAULT_DATABASE, CampaignRow, EventRow, GenerationRow, History

__all__ = [
    "DEFAULT_DATABASE",
    "CampaignOptions",
    "CampaignRow",
    "EventRow",
    "GenerationRow",
    "note_freeze",
    "read_history",
    "tune_live",
    "weights_of",
    "write_history",
]


async def tune_live(stop: asyncio.Event, *, campaign: CampaignOptions, **options: Any) -> bool:
    """A sidecar with the options of `SidecarOptions`, until its campaign is over or `stop` is set.

    Whether everything was left in order. Says what happens on the terminal or, without one, line by line; raises as
    `tuner.sidecar.run_sidecar` does.
    """
    from rich.console import Console

    from tuner.sidecar import Reporter, SidecarOptions, run_sidecar

    out, err = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    reporter = Reporter(
        lambda line: out.print(line, markup=False),
        lambda line: err.print(f"gorgo: {line}", markup=False),
        out if out.is_terminal else None,
    )
    try:
        return await run_sidecar(SidecarOptions(campaign=campaign, **options), reporter, stop)
    finally:
        reporter.close()


def read_history(
    database: str, *, campaign: int | None, limit: int
) -> tuple[CampaignRow | None, list[GenerationRow], list[EventRow]]:
    """A campaign (the newest by default), its last generations and its events."""
    history = History(database)
    try:
        known = {row.id: row for row in history.campaigns()}
        chosen = max(known, default=None) if campaign is None else campaign
        rows = history.generations(chosen, limit)
        return (None if chosen is None else known.get(chosen)), rows, history.events(chosen, limit)
    finally:
        history.close()


def weights_of(wanted: str, database: str) -> tuple[str, Mapping[str, float]]:
    """Policy and weights of `best` or of a generation's number. Raises `HistoryError` where there are none."""
    history = History(database)
    try:
        return history.weights_of(wanted)
    finally:
        history.close()


def note_freeze(database: str, weights: Mapping[str, float], reason: str) -> None:
    """An event in the newest campaign's history. Raises `HistoryError`."""
    history = History(database)
    try:
        newest = max((row.id for row in history.campaigns(limit=1)), default=None)
        history.note("freeze", now_s=time.time(), reason=reason, campaign=newest, weights=weights)
    finally:
        history.close()


def write_history(path: Path, campaign: CampaignRow | None, generations: list[GenerationRow]) -> None:
    """`history.json` as `gorgo report` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        row.as_json() | ({"policy": campaign.policy} if campaign else {}) for row in generations
    ]
    path.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", encoding="utf-8")
