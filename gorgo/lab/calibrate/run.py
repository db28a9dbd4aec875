"""`gorgo calibrate`: an engine over HTTP, or a request log, to a `Calibration`.

Owns where measurements are from. Leaves the plan to `gorgo.lab.calibrate.measure` and the fit to
`gorgo.lab.calibrate.fit`. Its parts, in the order of the file:

- `read_report`: what an engine reports about itself;
- `HttpEngine` and `identify`: an engine over HTTP;
- `traffic_points`: the points of a request log;
- `calibrate_engine` and `calibrate_log`: the two ways to a result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf, log2
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import httpx

from gorgo.core.messages.request import EngineSample
from gorgo.engines.base import merged, probe_paths
from gorgo.engines.discovery import MODELS_PATH
from gorgo.engines.registry import dialect
from gorgo.errors import CalibrationError
from gorgo.lab.calibrate.calibration import Calibration
from gorgo.lab.calibrate.fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill
from gorgo.lab.calibrate.measure import Answer, Bounds, MeasuredEngine, Measurement, PoolSize, Prompts
from gorgo.lab.replay_client import (
    CONNECT_TIMEOUT_S,
    PORT_WAIT_S,
    ReplayOptions,
    StreamReader,
    open_http,
    wait_for_port,
)
from gorgo.lab.request_log import LoggedRequest, read_logged_requests
from gorgo.live.monitor.discovery import discover

# What an engine reports about itself: whose scheduler it has, its chunk, its longest context.
#
# A value of another type than expected is no report.


#: SGLang's settings; the second route is that of older versions.
SETTINGS_PATHS = ("/server_info", "/get_server_info")
#: llama.cpp's settings; `n_ctx` is the context of one slot.
PROPERTIES_PATH = "/props"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Settings of an engine; None without a report.

    Parameters
    ----------
    scheduler:
        The scheduler of a simulated engine that forms steps alike.
    slot_cache:
        Whether prompts are cached by slots.
    chunk_tokens:
        Most prompt tokens in one prefill step.
    context_tokens:
        Longest prompt and output together.
    max_running_requests:
        Most requests in a batch.
    """

    scheduler: Literal["sglang", "vllm"] = "sglang"
    slot_cache: bool = False
    chunk_tokens: int | None = None
    context_tokens: int | None = None
    max_running_requests: int | None = None


def read_report(kind: str, model: str, answers: Mapping[str, object]) -> EngineReport:
    """Return what the answers of an engine of that kind say, by route.

    Example
    -------
    >>> read_report("vllm", "m", {"/v1/models": {"data": [{"id": "m", "max_model_len": 8192}]}})
    EngineReport(scheduler='vllm', slot_cache=False, chunk_tokens=None, context_tokens=8192, max_running_requests=None)
    """
    context = _count(_row(answers.get(MODELS_PATH), model).get("max_model_len"))
    if kind == "sglang":
        settings = next((answer for path in SETTINGS_PATHS if (answer := _object(answers.get(path)))), {})
        context = context or _count(settings.get("context_length"))
        chunk = settings.get("chunked_prefill_size")
        # -1 is SGLang's value for prompts in one step each.
        chunk_tokens = context if chunk == -1 else _count(chunk)
        return EngineReport(
            chunk_tokens=chunk_tokens,
            context_tokens=context,
            max_running_requests=_count(settings.get("max_running_requests")),
        )
    if kind == "llamacpp":
        settings = _object(_object(answers.get(PROPERTIES_PATH)).get("default_generation_settings"))
        context = context or _count(settings.get("n_ctx"))
        # A step has the decodes first and then prompts up to its batch size, as one of vLLM.
        return EngineReport(scheduler="vllm", slot_cache=True, context_tokens=context)
    return EngineReport(scheduler="vllm" if kind == "vllm" else "sglang", context_tokens=context)


def _row(listed: object, model: str) -> Mapping[str, object]:
    rows = _object(listed).get("data")
    return (
        next((entry for entry in map(_object, rows) if entry.get("id") == model), {}) if isinstance(rows, list) else {}
    )


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 40 else None


#: An empty request is repeated so often; the median is its round trip.
ROUND_TRIPS = 9
#: A prompt of 24,000 tokens on a slow engine behind 64 others.
REQUEST_TIMEOUT_S = 120.0
#: Bytes of a report that are read: vLLM's metrics are 60 kB.
REPORT_BYTES_MAX = 4 << 20
ERROR_CHARACTERS = 200
#: Of a request.
FAILURES = (httpx.HTTPError, httpx.StreamError, TimeoutError, OSError)


class HttpEngine:
    """One engine at a base URL.

    Parameters
    ----------
    engine:
        Its kind: a name of `gorgo.engines.registry`.
    """

    def __init__(self, http: httpx.AsyncClient, url: str, *, model: str, engine: str) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._model = model
        self._dialect = dialect(engine)

    async def generate(self, prompts: Sequence[str], *, output_tokens: int) -> list[Answer]:
        bodies = [self._body(prompt, output_tokens) for prompt in prompts]
        started_s = time.perf_counter()
        answers = list(await asyncio.gather(*(self._one(body, started_s) for body in bodies)))
        first = answers[0]
        if len(bodies) == 1 and not (first.is_connected or first.tokens_s or "timeout" in (first.error or "")):
            # The engine closed the kept connection; llama.cpp does so after 100 requests.
            answers = [await self._one(bodies[0], time.perf_counter())]
        return answers

    async def round_trip_s(self) -> float:
        times = []
        path = probe_paths(self._dialect)[0]
        for _ in range(ROUND_TRIPS):
            started_s = time.perf_counter()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._http.get(self._url + path)
            except FAILURES as failure:
                raise CalibrationError(f"GET {self._url}{path}: {_reason(failure)}") from None
            times.append(time.perf_counter() - started_s)
        return median(times)

    def now_s(self) -> float:
        return time.perf_counter()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def sizes(self) -> EngineSample:
        """Return the sizes that the engine reports; empty without reports."""
        sample = EngineSample()
        if self._dialect.metrics_path is not None and (text := await self._report(self._dialect.metrics_path)):
            sample = self._dialect.read_metrics(text)
        if self._dialect.loads_path is not None and (text := await self._report(self._dialect.loads_path)):
            try:
                sample = merged(sample, self._dialect.read_capacity(json.loads(text)))
            except (ValueError, RecursionError):
                return sample
        return sample

    async def _report(self, path: str) -> str | None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                response = await self._http.get(self._url + path)
        except FAILURES:
            return None
        is_report = response.status_code == 200 and len(response.content) <= REPORT_BYTES_MAX
        return response.text if is_report else None

    def _body(self, prompt: str, output_tokens: int) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    async def _one(self, body: bytes, started_s: float) -> Answer:
        reader, error, is_connected = StreamReader(), None, True
        try:
            async with (
                asyncio.timeout(REQUEST_TIMEOUT_S),
                self._http.stream("POST", f"{self._url}/v1/chat/completions", content=body) as response,
            ):
                if response.status_code != 200:
                    text = (await response.aread())[: 4 * ERROR_CHARACTERS].decode(errors="replace")
                    return Answer(None, None, (), f"http {response.status_code}: {_line(text)}")
                async for chunk in response.aiter_raw():
                    reader.feed(chunk, now=time.perf_counter())
                error = reader.error()
        except TimeoutError:
            error, is_connected = f"timeout: not complete after {REQUEST_TIMEOUT_S:g} s", False
        except FAILURES as failure:
            error, is_connected = _reason(failure), False
        times = []
        if reader.first_content_s is not None:
            at = reader.first_content_s - started_s
            times = [at]
            for gap in reader.gaps_s:
                times.append(at := at + gap)
        usage = reader.usage
        return Answer(
            usage.prompt_tokens if usage else None,
            usage.cached_tokens if usage else None,
            tuple(times),
            error,
            is_connected=is_connected,
        )


def open_engine_http(url: str, *, api_key: str | None, max_batch: int) -> httpx.AsyncClient:
    """Return a client for so many requests at once."""
    return open_http(ReplayOptions(trace=Path(), url=url, api_key=api_key, max_in_flight=max_batch))


@dataclass(frozen=True, slots=True)
class Identified:
    """An engine as it describes itself: its kind (`openai` if unknown), version, requested model and settings."""

    kind: str
    version: str | None
    model: str
    report: EngineReport


async def identify(http: httpx.AsyncClient, url: str, *, model: str | None) -> Identified:
    """Return the engine at a URL, with its first model if none is named. Raises `CalibrationError` for any other."""
    answers: dict[str, object] = {}
    reasons: dict[str, str] = {}

    async def answer(path: str) -> object:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                response = await http.get(url.rstrip("/") + path)
            reasons[path] = f"{response.status_code} {response.headers.get('content-type', 'without a type')}"
            answers[path] = response.json() if response.status_code == 200 else None
        except (*FAILURES, ValueError, RecursionError) as failure:
            reasons.setdefault(path, _reason(failure))
        return answers.get(path)

    discovered = await discover(answer, identify=True)
    if discovered.models is None and (model is None or discovered.engine is None):
        raise CalibrationError(
            f"{url}: is no engine: GET {MODELS_PATH} gave {_line(reasons[MODELS_PATH])}; expected a list of models"
        )
    name = model or (discovered.models[0].name if discovered.models else None)
    if name is None:
        raise CalibrationError(f"{url}: lists no model; name one")
    kind = discovered.engine.name if discovered.engine else "openai"
    version = discovered.engine.version if discovered.engine else None
    return Identified(kind, version, name, read_report(kind, name, answers))


def _reason(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {_line(str(failure))}".rstrip(": ")


def _line(text: str) -> str:
    """Return the beginning of a text on one line."""
    words = " ".join(text.split())[:ERROR_CHARACTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


# Points of prefill and decode from the traffic of one replica, as the request log has it.
#
# Requests in a log influence each other, and a point must be of the engine alone:
#
# - prefill: a request that no other prefill overlapped, in one attempt, with a report of cached tokens;
# - decode: the time from the first to the last token by the number of output tokens, without the time in which other
#   prompts were computed (an SGLang engine stalls all that decode meanwhile), by the mean batch and its mean context.
#
# Points of similar size are merged into their median: a log has thousands, with the noise of the network in each.


#: Bins per doubling of a number of tokens.
BINS = 4
#: A median of fewer is the noise of one request.
LEAST_PER_BIN = 3
#: Shorter answers have too few gaps.
LEAST_OUTPUT = 16
#: Of the time between first and last token that may be other requests' prefill.
MOST_STALLED = 0.5

PointT = TypeVar("PointT", PrefillPoint, DecodePoint)


@dataclass(frozen=True, slots=True)
class _Served:
    """One completed request on the time axis of its replica, s."""

    dispatched_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int


def traffic_points(requests: Iterable[LoggedRequest], replica: str) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """Return the points of one replica; none if the log has no times."""
    served = sorted(
        filter(None, (_served(request) for request in requests if request.replica == replica)), key=_dispatched
    )
    prefills, decodes = [], []
    for index, one in enumerate(served):
        others = _overlapping(served, index)
        if one.cached_tokens is not None and not any(_overlap_s(one, other, _prefill, _prefill) for other in others):
            new = max(1, one.prompt_tokens - one.cached_tokens)
            prefills.append(PrefillPoint(new, one.cached_tokens, one.first_s - one.dispatched_s))
        point = _decode_point(one, others)
        if point is not None:
            decodes.append(point)
    return _merged(prefills, _prefill_bin, _merge_prefill), _merged(decodes, _decode_bin, _merge_decode)


def _served(request: LoggedRequest) -> _Served | None:
    if (
        request.status != 200
        or request.attempts != 1
        or request.ttft_s is None
        or request.e2e_s is None
        or not request.output_tokens
    ):
        return None
    dispatched_s = request.received_s + (request.queued_s or 0.0)
    first_s, ended_s = request.received_s + request.ttft_s, request.received_s + request.e2e_s
    if not dispatched_s < first_s <= ended_s:
        return None
    return _Served(dispatched_s, first_s, ended_s, request.input_tokens, request.cached_tokens, request.output_tokens)


def _dispatched(one: _Served) -> float:
    return one.dispatched_s


def _prefill(one: _Served) -> tuple[float, float]:
    return one.dispatched_s, one.first_s


def _decode(one: _Served) -> tuple[float, float]:
    return one.first_s, one.ended_s


def _overlapping(served: Sequence[_Served], index: int) -> list[_Served]:
    """Return the others whose time overlaps; `served` is in order of dispatch."""
    one = served[index]
    after = index + 1
    while after < len(served) and served[after].dispatched_s < one.ended_s:
        after += 1
    # At most as many before as a batch: who was dispatched earlier and still runs.
    before = [other for other in served[max(0, index - 512) : index] if other.ended_s > one.dispatched_s]
    return [*before, *served[index + 1 : after]]


def _overlap_s(
    one: _Served,
    other: _Served,
    span: Callable[[_Served], tuple[float, float]],
    other_span: Callable[[_Served], tuple[float, float]],
) -> float:
    (start, end), (other_start, other_end) = span(one), other_span(other)
    return max(0.0, min(end, other_end) - max(start, other_start))


def _decode_point(one: _Served, others: Sequence[_Served]) -> DecodePoint | None:
    span_s = one.ended_s - one.first_s
    if one.output_tokens < LEAST_OUTPUT or span_s <= 0:
        return None
    stalled_s = sum(_overlap_s(one, other, _decode, _prefill) for other in others)
    if stalled_s > MOST_STALLED * span_s:
        return None
    batch, context = 1.0, one.prompt_tokens + one.output_tokens / 2
    for other in others:
        share = _overlap_s(one, other, _decode, _decode) / span_s
        batch += share
        context += share * (other.prompt_tokens + other.output_tokens / 2)
    return DecodePoint(round(batch), round(context), (span_s - stalled_s) / (one.output_tokens - 1))


def _prefill_bin(point: PrefillPoint) -> Hashable:
    return round(BINS * log2(point.new_tokens)), round(BINS / 2 * log2(point.cached_tokens + 1024))


def _decode_bin(point: DecodePoint) -> Hashable:
    return point.batch, round(BINS / 2 * log2(max(1, point.context_tokens)))


def _merge_prefill(points: Sequence[PrefillPoint]) -> PrefillPoint:
    return PrefillPoint(
        round(median(point.new_tokens for point in points)),
        round(median(point.cached_tokens for point in points)),
        median(point.ttft_s for point in points),
    )


def _merge_decode(points: Sequence[DecodePoint]) -> DecodePoint:
    return DecodePoint(
        points[0].batch,
        round(median(point.context_tokens for point in points)),
        median(point.step_s for point in points),
    )


def _merged(
    points: Iterable[PointT], bin_of: Callable[[PointT], Hashable], merge: Callable[[Sequence[PointT]], PointT]
) -> list[PointT]:
    bins: dict[Hashable, list[PointT]] = defaultdict(list)
    for point in points:
        bins[bin_of(point)].append(point)
    return [merge(group) for group in bins.values() if len(group) >= LEAST_PER_BIN]


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
        identified = await identify(http, options.url, model=options.model)
        engine = HttpEngine(http, options.url, model=identified.model, engine=identified.kind)
        named = " ".join(filter(None, (identified.kind, identified.version)))
        today = datetime.now(UTC).date()
        return await measured(
            engine,
            await engine.sizes(),
            options.bounds,
            seed=options.seed,
            source=f"Measured by gorgo calibrate on {today}: {named}, model {identified.model}",
            advance=advance,
            report=identified.report,
        )


def calibrate_log(path: Path, *, replica: str | None = None) -> Calibration:
    """Return the constants of one replica from a request log; by default of the one with the most requests.

    Raises `TraceError` for a file that is no request log, and `CalibrationError` for one without the times.
    """
    requests = read_logged_requests(path)
    by_replica = Counter(
        request.replica for request in requests if request.replica is not None and request.ttft_s is not None
    )
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
    return max(
        request.input_tokens + (request.output_tokens or 0) for request in requests if request.replica == replica
    )
