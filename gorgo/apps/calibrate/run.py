"""`gorgo calibrate`: an engine over HTTP, or a request log, to a `Calibration`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from gorgo.apps.calibrate.calibration import Calibration
from gorgo.apps.calibrate.fit import fit_decode, fit_prefill
from gorgo.apps.calibrate.kv_pool import PoolSize
from gorgo.apps.calibrate.live import HttpEngine, identify, open_engine_http
from gorgo.apps.calibrate.measure import Bounds, Measurement
from gorgo.apps.calibrate.measured_engine import MeasuredEngine, Prompts
from gorgo.apps.calibrate.reports import EngineReport
from gorgo.apps.calibrate.traffic import traffic_points
from gorgo.apps.replay.client import wait_for_port
from gorgo.apps.replay.options import PORT_WAIT_S
from gorgo.apps.request_log import read_logged_requests
from gorgo.apps.request_log_lines import LoggedRequest
from gorgo.core.messages.request import EngineSample
from gorgo.errors import CalibrationError

#: Reasons of failed requests in the result.
REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """One calibration over HTTP.

    Parameters
    ----------
    url:
        Base URL of the engine.
    model:
        Model to request; None: the first that it lists.
    seed:
        Of the words in the prompts.
    """

    url: str
    bounds: Bounds = field(default_factory=Bounds)
    model: str | None = None
    api_key: str | None = None
    seed: int = 0


async def measured(
    engine: MeasuredEngine,
    sizes: EngineSample,
    bounds: Bounds,
    *,
    seed: int,
    source: str,
    advance: Callable[[str], None],
    report: EngineReport | None = None,
) -> Calibration:
    """Return what the engine's answers say. Raises `CalibrationError`."""
    report = report or EngineReport()
    work = Measurement(engine, Prompts(seed=seed), bounds, advance=advance)
    await work.learn_words()
    round_trip_s = await engine.round_trip_s()
    prefills, decode = await work.prefill(), fit_decode(await work.decode())
    # vLLM computes prompts and decodes in one step, and so each reads all weights.
    is_mixed = report.scheduler == "vllm"
    floor_s = decode.base_s + decode.moe_s if is_mixed else 0.0
    chunk_tokens = report.chunk_tokens
    if chunk_tokens is None and is_mixed:
        chunk_tokens = await work.step_budget()
    prefill = fit_prefill(
        prefills,
        round_trip_s=round_trip_s,
        chunk_tokens=chunk_tokens,
        floor_s=floor_s,
        most_base_s=floor_s + decode.per_request_s if is_mixed else inf,
    )
    shared = await work.shared_prefix()
    reported = sizes.kv_capacity_tokens
    pool = None if reported is None else PoolSize(round(reported), is_lower_bound=False)
    if pool is None and (shared is None or shared.is_cached):
        pool = await work.pool()
    running = sizes.max_running_requests or report.max_running_requests
    return Calibration(
        prefill=prefill,
        decode=decode,
        pool=pool,
        shared=shared,
        max_running_requests=None if running is None else round(running),
        context_tokens=report.context_tokens,
        scheduler=report.scheduler,
        slot_cache=report.slot_cache,
        source=f"{source}, {work.requests} requests in {work.elapsed_s:.0f} s",
        refused=tuple(work.refused[:REASONS]),
    )


def calibrate_engine(options: CalibrateOptions, *, advance: Callable[[str], None]) -> Calibration:
    """Return the constants of the engine at a URL. Raises `CalibrationError` and `ReplayError`."""
    return asyncio.run(_calibrate_engine(options, advance))


async def _calibrate_engine(options: CalibrateOptions, advance: Callable[[str], None]) -> Calibration:
    await wait_for_port(options.url, wait_s=PORT_WAIT_S, on_wait=lambda: None)
    async with open_engine_http(options.url, api_key=options.api_key, max_batch=options.bounds.max_batch) as http:
        found = await identify(http, options.url, model=options.model)
        engine = HttpEngine(http, options.url, model=found.model, engine=found.kind)
        named = " ".join(filter(None, (found.kind, found.version)))
        today = datetime.now(UTC).date()
        return await measured(
            engine,
            await engine.sizes(),
            options.bounds,
            seed=options.seed,
            source=f"Measured by gorgo calibrate on {today}: {named}, model {found.model}",
            advance=advance,
            report=found.report,
        )


def calibrate_log(path: Path, *, replica: str | None = None) -> Calibration:
    """Return the constants of one replica from a request log; by default of the one with the most requests.

    Raises `TraceError` for a file that is no request log, and `CalibrationError` for one without the times.
    """
    requests = read_logged_requests(path)
    by_replica = Counter(row.replica for row in requests if row.replica is not None and row.ttft_s is not None)
    if not by_replica:
        raise CalibrationError(f"{path}: no line has a replica and a ttft_s; expected a log of this version of GORGO")
    if replica is not None and replica not in by_replica:
        raise CalibrationError(
            f"{path}: no request of the replica {replica!r}; there are {', '.join(sorted(by_replica))}"
        )
    name = replica or by_replica.most_common(1)[0][0]
    prefills, decodes = traffic_points(requests, name)
    try:
        prefill, decode = fit_prefill(prefills, round_trip_s=0.0), fit_decode(decodes)
    except CalibrationError as error:
        advice = "a point is the median of three similar requests that no other prefill overlapped"
        raise CalibrationError(f"{path}: replica {name}: {error}; {advice}") from None
    return Calibration(
        prefill=prefill,
        decode=decode,
        pool=None,
        shared=None,
        max_running_requests=None,
        context_tokens=_longest(requests, name) + 1,
        source=f"Fitted to {by_replica[name]:,} requests of {name} in a request log; the network is in the overhead",
    )


def _longest(requests: Iterable[LoggedRequest], replica: str) -> int:
    return max(row.input_tokens + (row.output_tokens or 0) for row in requests if row.replica == replica)
