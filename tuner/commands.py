"""The interface of the tuner for the command line: the one module that `gorgo` imports of it.

Owns the composition: database, proxy, campaign.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import HistoryError
from tuner.campaign.generation import Generation
from tuner.campaign.options import CampaignOptions
from tuner.history import DEFAULT_DATABASE, CampaignRow, EventRow, History

if TYPE_CHECKING:  # the simulator is not loaded for a sidecar
    from gorgo.config.model import SharedConfig
    from tuner.leader import StoreLease
    from tuner.offline.composition import OfflineOptions

__all__ = [
    "DEFAULT_DATABASE",
    "CampaignOptions",
    "CampaignRow",
    "EventRow",
    "Generation",
    "OfflineFound",
    "note_freeze",
    "offline_options",
    "read_history",
    "rehearse_offline",
    "search_offline",
    "tune_live",
    "weights_of",
    "write_history",
]


async def tune_live(
    stop: asyncio.Event,
    *,
    campaign: CampaignOptions,
    log_format: str = "text",
    log_level: str = "info",
    shared: SharedConfig | None = None,
    **options: Any,
) -> bool:
    """Run a sidecar with the options of `SidecarOptions`; return whether everything was left in order.

    Prints events to the terminal or, without one, line by line. `shared` names a store with a lease for the leader.
    Raises as `tuner.sidecar.run_sidecar` and `gorgo.live.peer_store.connection.store_client` do.
    """
    from tuner.sidecar import Reporter, SidecarOptions, run_sidecar
    from tuner.sidecar.progress import LinePrinter

    printer = LinePrinter(log_format, log_level)
    reporter = Reporter(printer.say, printer.complain, printer.terminal)
    try:
        async with _lease(shared) as lease:
            return await run_sidecar(SidecarOptions(campaign=campaign, lease=lease, **options), reporter, stop)
    finally:
        reporter.close()


@asynccontextmanager
async def _lease(shared: SharedConfig | None) -> AsyncIterator[StoreLease | None]:
    """Yield the lease of the group in the store; None without a store."""
    if shared is None:
        yield None
        return
    from gorgo.live.peer_store.connection import store_client
    from tuner.leader import StoreLease

    client = store_client(shared, os.environ)
    try:
        yield StoreLease(client, shared.group)
    finally:
        await client.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFound:
    """The result of tuning in virtual time: rows of the history, weights and the reason; `details` are for JSON."""

    rows: Sequence[Generation]
    weights: Mapping[str, float]
    reason: str
    details: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            "weights": dict(self.weights),
            "reason": self.reason,
            **self.details,
            "generations": [generation.as_json() for generation in self.rows],
        }


def offline_options(*, fleet_file: Path | None, **options: Any) -> OfflineOptions:
    """Return the options of a recorded window; `fleet_file` is a saved answer of `GET /admin/fleet`."""
    from tuner.offline.composition import OfflineOptions, read_fleet

    learned = None if fleet_file is None else (read_fleet(fleet_file), str(fleet_file))
    return OfflineOptions(learned=learned, **options)


def search_offline(
    options: OfflineOptions, *, algorithm: str | None, tune_lambda: bool, n_jobs: int, **more: Any
) -> OfflineFound:
    """Search offline, with progress on stderr; raises as `tuner.offline.composition.tune_offline` does."""
    from gorgo.lab.progress import shown_progress
    from tuner.offline.composition import tune_offline
    from tuner.offline.search import SearchOptions

    optimizer = algorithm or CampaignOptions().algorithm
    twin = SearchOptions(optimizer=optimizer, tune_lambda=tune_lambda, n_jobs=n_jobs, **more)
    with shown_progress("twin") as advance:
        tuned = tune_offline(options, twin, now=time.time, on_progress=advance)
    return OfflineFound(
        rows=tuned.rows,
        weights=tuned.result.weights,
        reason=tuned.result.reason,
        details={"moved": tuned.result.moved, "evidence": dict(tuned.file.evidence or {})},
    )


def rehearse_offline(options: OfflineOptions, campaign: CampaignOptions, **search: Any) -> OfflineFound:
    """Run the live campaign along the window; raises as `tuner.offline.composition.simulated_campaign` does."""
    from tuner.offline.composition import simulated_campaign

    run = simulated_campaign(options, campaign, now=time.time, **search)
    row = run.row
    whole = f"the run as a whole: p95 TTFT {row.ttft_ms.p95 or 0:.0f} ms, p95 E2E {row.e2e_s.p95 or 0:.2f} s"
    return OfflineFound(
        rows=run.generations,
        weights=run.weights,
        reason=f"{run.stopped or 'the window ends'}; {whole}, {row.errors} errors",
        details={"row": row.as_json(), "rollbacks": run.rollbacks},
    )


def read_history(
    database: str, *, campaign: int | None, limit: int
) -> tuple[CampaignRow | None, list[Generation], list[EventRow]]:
    """Return a campaign (the newest by default), its last generations and its events; nothing where there is none.

    Makes no database. Raises `HistoryError` for a number that no campaign has.
    """
    history = History.existing(database)
    if history is None:
        if campaign is not None:
            raise HistoryError(f"{database}: no campaign {campaign}: the history is empty")
        return None, [], []
    try:
        newest = max((latest.id for latest in history.campaigns(limit=1)), default=None)
        chosen = newest if campaign is None else campaign
        campaign_row = None if chosen is None else history.campaign(chosen)
        if campaign_row is None and campaign is not None:
            there = "the history is empty" if newest is None else f"the newest is {newest}"
            raise HistoryError(f"{history.url}: no campaign {campaign}: {there}")
        return campaign_row, history.generations(chosen, limit), history.events(chosen, limit)
    finally:
        history.close()


def weights_of(wanted: str, database: str, *, campaign: int | None = None) -> tuple[str, Mapping[str, float]]:
    """Return policy and weights of `best` or of a generation's number, of a campaign or the newest that has it.

    Makes no database. Raises `HistoryError` where there are none.
    """
    history = History.existing(database)
    if history is None:
        raise HistoryError(f"{database}: no generation {wanted!r}: the history is empty")
    try:
        return history.weights_of(wanted, campaign)
    finally:
        history.close()


def note_freeze(database: str, weights: Mapping[str, float], reason: str) -> None:
    """Add an event to the newest campaign's history; raises `HistoryError`."""
    history = History(database)
    try:
        newest = max((latest.id for latest in history.campaigns(limit=1)), default=None)
        history.record_event("freeze", now_s=time.time(), reason=reason, campaign=newest, weights=weights)
    finally:
        history.close()


def write_history(path: Path, campaign: CampaignRow | None, generations: list[Generation]) -> None:
    """Write `history.json` as `gorgo report` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        generation.as_json() | ({"policy": campaign.policy} if campaign else {}) for generation in generations
    ]
    write_atomically(path, json.dumps(rows, indent=2, allow_nan=False).encode() + b"\n", mode=PUBLIC)
