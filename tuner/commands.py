"""What the command line calls of the tuner: the one door through which `gorgo` imports it.

Owns the composition: database, proxy, campaign. The words on the terminal are the command line's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.history import DEFAULT_DATABASE, CampaignRow, EventRow, GenerationRow, History

__all__ = [
    "DEFAULT_DATABASE",
    "CampaignRow",
    "EventRow",
    "GenerationRow",
    "read_history",
    "weights_of",
    "write_history",
]


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


def write_history(path: Path, campaign: CampaignRow | None, generations: list[GenerationRow]) -> None:
    """`history.json` as `gorgo report` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        row.as_json() | ({"policy": campaign.policy} if campaign else {}) for row in generations
    ]
    path.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", encoding="utf-8")
