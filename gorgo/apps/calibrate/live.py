"""An engine over HTTP, as `measure` calls it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from gorgo.apps.calibrate.measured_engine import Answer
from gorgo.apps.calibrate.reports import EngineReport, read_report
from gorgo.apps.replay.client import CONNECT_TIMEOUT_S, open_http
from gorgo.apps.replay.options import ReplayOptions
from gorgo.apps.replay.stream import StreamReader
from gorgo.core.messages.request import EngineSample
from gorgo.engines.base import merged
from gorgo.engines.discovery import MODELS_PATH
from gorgo.engines.probe import probe_paths
from gorgo.engines.registry import dialect
from gorgo.errors import CalibrationError
from gorgo.live.monitor.discovery import discover

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

    found = await discover(answer, identify=True)
    if found.models is None and (model is None or found.engine is None):
        raise CalibrationError(
            f"{url}: is no engine: GET {MODELS_PATH} gave {_line(reasons[MODELS_PATH])}; expected a list of models"
        )
    name = model or (found.models[0].name if found.models else None)
    if name is None:
        raise CalibrationError(f"{url}: lists no model; name one")
    kind = found.engine.name if found.engine else "openai"
    version = found.engine.version if found.engine else None
    return Identified(kind, version, name, read_report(kind, name, answers))


def _reason(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {_line(str(failure))}".rstrip(": ")


def _line(text: str) -> str:
    """Return the beginning of a text on one line."""
    words = " ".join(text.split())[:ERROR_CHARACTERS]
    return "".join(letter if letter.isprintable() else "?" for letter in words)
