"""`gorgo tune-offline`: the search of a recorded window or the simulated campaign, with history and weights file.

Owns the composition: the window from a trace or a request log, the fleet from regions.yaml and learned values.

Theory of operation of engines as the proxy has learned them, from an answer of `GET /admin/fleet` (`calibrated`). The
proxy learns by which factor a replica's prefills take longer than its prior (`prefill_slowdown`), and its round trip.
So a simulated engine prefills by the same prior times that factor, at that round trip. Its decoding is the profile's,
because the proxy cannot separate decoding from waiting. The simulated Router starts with the priors of `gorgo serve`,
and learns the rest again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

from gorgo.config.weights_file import WeightsFile, write_weights_file
from gorgo.core.latency.prefill import PrefillPrior
from gorgo.core.limits import RouterLimits
from gorgo.errors import TunerError
from gorgo.lab.datasets import load_requests, own_block_tokens
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.simulate import SimJob
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters
from tuner.campaign.generation import Generation
from tuner.campaign.options import CampaignOptions
from tuner.history import History
from tuner.offline.search import SearchOptions, SearchVerdict, check_start, decide, search_weights, weights_file
from tuner.offline.simulated_campaign import CampaignRun, simulate_campaign

#: A thousand replicas are 1 MB.
MAX_BYTES = 16 << 20


def read_fleet(path: Path) -> Mapping[str, Any]:
    """Return a saved answer of `GET /admin/fleet`; raises `TunerError`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        answer = json.loads(text) if len(text) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise TunerError(f"{path}: cannot be read ({error}); expected what GET /admin/fleet answers") from error
    if not isinstance(answer, dict):
        raise TunerError(f"{path}: expected what GET /admin/fleet answers, a JSON object of at most {MAX_BYTES} bytes")
    return answer


def calibrated(fleet: SimFleet, reported: Mapping[str, Any], *, source: str) -> SimFleet:
    """Return `fleet` with engines and round trips as `reported`, an answer of `GET /admin/fleet`.

    Unknown values, and replicas that the answer does not name, stay as they are. Raises `TunerError`, which names
    `source`, for another answer, and for one that shares no replica with `fleet`.
    """
    rows = reported.get("replicas")
    if not isinstance(rows, list) or not all(
        isinstance(replica_row, dict) and "name" in replica_row for replica_row in rows
    ):
        raise TunerError(f"{source}: replicas: expected a list of objects with a name, as GET /admin/fleet answers")
    by_name = {str(replica_row["name"]): replica_row for replica_row in rows}
    if not any(replica.name in by_name for replica in fleet.replicas):
        names = ", ".join(replica.name for replica in fleet.replicas)
        raise TunerError(f"{source}: names none of the replicas of the configuration: {names}")
    return SimFleet(tuple(_learned(replica, by_name.get(replica.name), source) for replica in fleet.replicas))


def _learned(replica: SimReplica, reported: Mapping[str, Any] | None, source: str) -> SimReplica:
    if reported is None:
        return replica
    spec, where = replica.spec, f"{source}: replica {replica.name!r}"
    prior = PrefillPrior.of(spec.prefill_base_s, spec.prefill_tokens_per_s, spec.prefill_kappa_s)
    slowdown = _number(reported, "prefill_slowdown", where)
    profile, link = replica.profile, replica.link
    if slowdown is not None:
        profile = replace(
            profile,
            prefill_base_s=prior.base_s * slowdown,
            prefill_tokens_per_s=prior.tokens_per_s / slowdown,
            prefill_kappa_s=prior.kappa_s * slowdown,
        )
    if (kv_tokens := _number(reported, "kv_capacity_tokens", where)) is not None:
        profile = replace(profile, kv_tokens=round(kv_tokens))
    if (running := _number(reported, "max_running_requests", where)) is not None:
        profile = replace(profile, max_running_requests=round(running))
    if (rtt_ms := _number(reported, "rtt_ms", where)) is not None:
        link = replace(link, rtt_s=rtt_ms / 1e3)
    return replace(replica, profile=profile, link=link)


def _number(reported: Mapping[str, Any], key: str, where: str) -> float | None:
    """Return the number of a key; None if unknown."""
    value = reported.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value > 0):
        raise TunerError(f"{where}: {key} is {value!r}; expected a number above 0, or null")
    return float(value)


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

    def record(generation: Generation) -> None:
        rows.append(_stamped(generation, now()))
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
        rows = [_later(generation, begun_s) for generation in run.generations]
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
    block_tokens = own_block_tokens(options.source)
    requests = load_requests(options.source, options.filters, seed=seed, block_tokens=block_tokens)
    return SimJob(
        trace=Path(options.source).name,
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


def _stamped(generation: Generation, now_s: float) -> Generation:
    """Return the row with the time at which it was made."""
    return replace(generation, started_s=now_s, finished_s=now_s)


def _later(generation: Generation, begun_s: float) -> Generation:
    """Return the row at its virtual time after the start."""
    return replace(generation, started_s=begun_s + generation.started_s, finished_s=begun_s + generation.finished_s)


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
