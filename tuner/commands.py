"""The interface of the tuner for the command line: the one module that `gorgo` imports of it.

Owns the composition: database, proxy, campaign.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.config.weights_file import WeightsFile, write_weights_file
from gorgo.core.limits import RouterLimits
from gorgo.errors import HistoryError, TunerError
from gorgo.lab.datasets import load_requests, own_block_tokens
from gorgo.lab.request_log import is_request_log, load_request_log
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.simulate import SimJob
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import BLOCK_TOKENS, TraceFilters
from tuner.campaign.generation import Generation
from tuner.campaign.options import CampaignOptions
from tuner.history import DEFAULT_DATABASE, CampaignRow, EventRow, History
from tuner.offline.calibration import calibrated
from tuner.offline.search import SearchOptions, check_start, search_weights
from tuner.offline.simulated_campaign import CampaignRun, simulate_campaign
from tuner.offline.verdict import SearchVerdict, decide, weights_file

# `gorgo tune-offline`: the search of a recorded window or the simulated campaign, with history and weights file.
#
# Owns the composition: the window from a trace or a request log, the fleet from regions.yaml and learned values.


#: Outcome of an interrupted search in the history; it is repeated, not resumed.
BROKEN_OFF = "broken off"

OnProgress = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """What is tuned on which window.

    `job_of` makes a `SimJob` of them: it reads a request log as a feed, and puts what the proxy has learned into the
    fleet.

    Parameters
    ----------
    source:
        A trace's file, name or shape, or the proxy's request log.
    filters, time_scale:
        As in a replay.
    policy, weights:
        The tuned policy, and its start weights.
    fleet, limits, probe_interval_s, scrape_interval_s:
        As in `SimJob`.
    learned:
        An answer of `GET /admin/fleet`, and its source.
    database:
        URL of the history.
    out:
        Weights file to write; None: none.
    """

    source: str
    policy: str
    weights: Mapping[str, float]
    fleet: SimFleet
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0
    limits: RouterLimits | None = None
    probe_interval_s: float = 30.0
    scrape_interval_s: float | None = None
    learned: tuple[Mapping[str, Any], str] | None = None
    database: str
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The result of a search: rows of the history, the decision, and its weights file."""

    rows: Sequence[Generation]
    result: SearchVerdict
    file: WeightsFile


def tune_offline(
    options: OfflineOptions, twin: SearchOptions, *, now: Callable[[], float], on_progress: OnProgress = lambda: None
) -> TuneResult:
    """Search, decide on the held-out part, and write history and weights file. `now` is Unix time.

    Raises `TraceError`, `TunerError`, `WeightsError`, `HistoryError`, and `OSError` for a file that cannot be written.
    """
    job = job_of(options, seed=twin.seed)
    check_start(job, twin)
    history = History(options.database)
    rows: list[Generation] = []
    outcome = BROKEN_OFF
    campaign = _begun(history, options, asdict(twin), now())

    def record(row: Generation) -> None:
        rows.append(_stamped(row, now()))
        history.record(campaign, rows[-1])

    try:
        search = search_weights(job, twin, on_progress=on_progress, on_row=record)
        result = decide(job, search, twin, on_progress=on_progress)
        outcome = f"{search.stopped}; {result.reason}"
    finally:
        history.end_campaign(campaign, now_s=now(), outcome=outcome)
        history.close()
    created = datetime.fromtimestamp(now(), UTC).isoformat(timespec="seconds")
    file = weights_file(job, result, source="gorgo tune, twin", created=created, window=_window(options, job))
    _write(options.out, file)
    return TuneResult(rows, result, file)


def simulated_campaign(
    options: OfflineOptions,
    campaign_options: CampaignOptions,
    *,
    algorithm: str | None,
    seed: int,
    tune_lambda: bool,
    box: Mapping[str, tuple[float, float]],
    now: Callable[[], float],
) -> CampaignRun:
    """Run the live campaign along the window; raises as `tune_offline` does."""
    begun_s = now()
    run = simulate_campaign(
        job_of(options, seed=seed), campaign_options, optimizer=algorithm, seed=seed, tune_lambda=tune_lambda, box=box
    )
    history = History(options.database)
    try:
        settings = asdict(campaign_options) | {"algorithm": algorithm or campaign_options.algorithm, "seed": seed}
        campaign = _begun(history, options, settings, begun_s)
        rows = [_later(row, begun_s) for row in run.generations]
        history.write(campaign, generations=rows, outcome=run.stopped or "the end of the window", now_s=now())
    finally:
        history.close()
    return run


def job_of(options: OfflineOptions, *, seed: int) -> SimJob:
    """Return the window as a job."""
    fleet = options.fleet
    if options.learned is not None:
        reported, where = options.learned
        fleet = calibrated(fleet, reported, source=where)
    path = Path(options.source)
    log = path.is_file() and is_request_log(path)
    block_tokens = BLOCK_TOKENS if log else own_block_tokens(options.source)
    if log:
        requests = load_request_log(path, options.filters)
    else:
        requests = load_requests(options.source, options.filters, seed=seed, block_tokens=block_tokens)
    return SimJob(
        trace=path.name,
        feed=feed_of(requests, block_tokens=block_tokens),
        block_tokens=block_tokens,
        policy=options.policy,
        weights=dict(options.weights),
        fleet=fleet,
        time_scale=options.time_scale,
        limits=options.limits,
        probe_interval_s=options.probe_interval_s,
        scrape_interval_s=options.scrape_interval_s,
        seed=seed,
    )


def _begun(history: History, options: OfflineOptions, settings: Mapping[str, Any], now_s: float) -> int:
    target = f"twin of {Path(options.source).name}"
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    return history.begin_campaign(now_s=now_s, target=target, policy=options.policy, options=plain)


def _stamped(row: Generation, now_s: float) -> Generation:
    """Return the row with the time at which it was made."""
    return replace(row, started_s=now_s, finished_s=now_s)


def _later(row: Generation, begun_s: float) -> Generation:
    """Return the row at its virtual time after the start."""
    return replace(row, started_s=begun_s + row.started_s, finished_s=begun_s + row.finished_s)


def _window(options: OfflineOptions, job: SimJob) -> dict[str, Any]:
    feed = job.feed or ()
    return {
        "trace": job.trace,
        "requests": len(feed),
        "seconds": round(feed[-1].arrival_s, 3) if feed else 0.0,
        "time_scale": options.time_scale,
        "calibrated": options.learned is not None,
    }


def _write(out: Path | None, file: WeightsFile) -> None:
    if out is None:
        return
    try:
        write_weights_file(out, file)
    except OSError as error:
        raise TunerError(f"{out}: cannot be written: {error.strerror or error}") from error


if TYPE_CHECKING:  # the simulator is not loaded for a sidecar
    from gorgo.config.model import SharedConfig
    from tuner.leader import StoreLease

    pass  # MERGED-IMPORT

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
            "generations": [row.as_json() for row in self.rows],
        }


def offline_options(*, fleet_file: Path | None, **options: Any) -> OfflineOptions:
    """Return the options of a recorded window; `fleet_file` is a saved answer of `GET /admin/fleet`."""
    from tuner.offline.calibration import read_fleet

    pass  # MERGED-IMPORT

    learned = None if fleet_file is None else (read_fleet(fleet_file), str(fleet_file))
    return OfflineOptions(learned=learned, **options)


def search_offline(
    options: OfflineOptions, *, algorithm: str | None, tune_lambda: bool, n_jobs: int, **more: Any
) -> OfflineFound:
    """Search offline, with progress on stderr; raises as `tuner.commands.tune_offline` does."""
    from gorgo.lab.progress import shown_progress

    pass  # MERGED-IMPORT
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
    """Run the live campaign along the window; raises as `tuner.commands.simulated_campaign` does."""
    pass  # MERGED-IMPORT

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
        newest = max((row.id for row in history.campaigns(limit=1)), default=None)
        chosen = newest if campaign is None else campaign
        row = None if chosen is None else history.campaign(chosen)
        if row is None and campaign is not None:
            there = "the history is empty" if newest is None else f"the newest is {newest}"
            raise HistoryError(f"{history.url}: no campaign {campaign}: {there}")
        return row, history.generations(chosen, limit), history.events(chosen, limit)
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
        newest = max((row.id for row in history.campaigns(limit=1)), default=None)
        history.record_event("freeze", now_s=time.time(), reason=reason, campaign=newest, weights=weights)
    finally:
        history.close()


def write_history(path: Path, campaign: CampaignRow | None, generations: list[Generation]) -> None:
    """Write `history.json` as `gorgo report` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [
        row.as_json() | ({"policy": campaign.policy} if campaign else {}) for row in generations
    ]
    write_atomically(path, json.dumps(rows, indent=2, allow_nan=False).encode() + b"\n", mode=PUBLIC)
