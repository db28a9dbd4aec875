"""`gorgo calibrate --url` against servers on sockets: what they report, and servers that are no engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gorgo.errors import CalibrationError
from gorgo.lab.calibrate import calibrate_log
from gorgo.lab.calibrate.fit import fit_decode, fit_prefill
from gorgo.lab.calibrate.measure import Bounds
from gorgo.lab.calibrate.run import (
    CalibrateOptions,
    EngineReport,
    HttpEngine,
    Identified,
    calibrate_engine,
    identify,
    open_engine_http,
    read_report,
    traffic_points,
)
from gorgo.lab.request_log import LoggedRequest
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import EngineProfile, find_profile
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.live.logs import Finished, RequestLogFile
from tests.lab.calibrate.test_measure import ignore
from tests.lab.engine_server.conftest import QUICK, serving

Answer = Callable[[web.Request], web.Response]
PAGE = "<!doctype html>\n<html>\n<title>Welcome</title>\n</html>\n"


def html(request: web.Request) -> web.Response:
    del request
    return web.Response(text=PAGE, content_type="text/html")


def without_models(request: web.Request) -> web.Response:
    return web.json_response({"data": []}) if request.path == "/v1/models" else web.Response(status=404)


def with_a_model_and_pages(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]}) if request.path == "/v1/models" else html(request)


def refusing(request: web.Request) -> web.Response:
    listed = request.path == "/v1/models"
    return web.json_response({"data": [{"id": "m"}]}) if listed else web.Response(status=502, text="Bad\ngateway\x07")


def forbidden(request: web.Request) -> web.Response:
    del request
    return web.Response(status=401, text="no")


@asynccontextmanager
async def serving_pages(answer: Answer) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def calibrated(url: str, model: str | None = None) -> Any:
    options = CalibrateOptions(url=url, bounds=Bounds(time_s=5.0), model=model)
    return await asyncio.to_thread(calibrate_engine, options, advance=ignore)


async def identified(url: str, model: str | None = None) -> Identified:
    async with open_engine_http(url, api_key=None, max_batch=1) as http:
        return await identify(http, url, model=model)


@pytest.mark.parametrize(
    ("answer", "model", "message"),
    [
        (html, None, "is no engine: GET /v1/models gave 200 text/html; charset=utf-8; expected a list of models"),
        (html, "m", "is no engine: GET /v1/models gave 200 text/html; charset=utf-8; expected a list of models"),
        (forbidden, None, "is no engine: GET /v1/models gave 401 text/plain; charset=utf-8; expected a list of models"),
        (without_models, None, "lists no model; name one"),
        (with_a_model_and_pages, None, "the engine failed a short request: no content: the stream ended without any"),
        (refusing, None, "the engine failed a short request: http 502: Bad gateway?"),
    ],
)
async def test_what_is_no_engine_is_one_clear_line(answer: Answer, model: str | None, message: str) -> None:
    async with serving_pages(answer) as url:
        with pytest.raises(CalibrationError) as caught:
            await calibrated(url, model)
    assert str(caught.value) in (message, f"{url}: {message}")


async def test_server_of_another_protocol_is_one_clear_line() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        with pytest.raises(CalibrationError, match=r"is no engine: GET /v1/models gave \w+: [^\n]*; expected a list"):
            await calibrated(f"http://{host}:{port}")


async def test_engine_that_ends_before_its_round_trips_is_an_error_with_the_route() -> None:
    async with serving_pages(html) as url:
        pass
    async with open_engine_http(url, api_key=None, max_batch=1) as http:
        engine = HttpEngine(http, url, model="m", engine="vllm")
        with pytest.raises(CalibrationError, match=rf"^GET {url}/\w+: \w*Connect\w*"):
            await engine.round_trip_s()
        (answer,) = await engine.generate(["a"], output_tokens=1)
    assert not answer.is_connected
    assert answer.error is not None
    assert "\n" not in answer.error


@pytest.mark.parametrize(
    ("profile", "kind", "report"),
    [
        (
            replace(QUICK, chunk_tokens=2048, context_tokens=9000),
            "sglang",
            EngineReport(chunk_tokens=2048, context_tokens=9000, max_running_requests=64),
        ),
        (
            replace(QUICK, scheduler="vllm", context_tokens=9000),
            "vllm",
            EngineReport(scheduler="vllm", context_tokens=9000),
        ),
    ],
)
async def test_simulated_engine_reports_its_settings(profile: EngineProfile, kind: str, report: EngineReport) -> None:
    async with serving(profile=profile) as session:
        found = await identified(str(session._base_url).rstrip("/"))
    assert (found.kind, found.report) == (kind, report)
    assert found.version


MODELS = {"data": [{"id": "lora", "max_model_len": None}, {"id": "m", "max_model_len": 4096}, 7]}


@pytest.mark.parametrize(
    ("kind", "answers", "report"),
    [
        ("sglang", {"/get_server_info": {"chunked_prefill_size": 512}}, EngineReport(chunk_tokens=512)),
        (
            "sglang",
            {"/server_info": None, "/get_server_info": {"context_length": 7}},
            EngineReport(context_tokens=7),
        ),
        ("sglang", {"/server_info": {"chunked_prefill_size": -1, "context_length": None}}, EngineReport()),
        (
            "sglang",
            {"/v1/models": MODELS, "/server_info": {"chunked_prefill_size": -1, "context_length": 7}},
            EngineReport(chunk_tokens=4096, context_tokens=4096),
        ),
        ("sglang", {"/server_info": {"chunked_prefill_size": True, "max_running_requests": "9"}}, EngineReport()),
        ("vllm", {"/v1/models": MODELS}, EngineReport(scheduler="vllm", context_tokens=4096)),
        ("vllm", {"/v1/models": {"data": "m"}}, EngineReport(scheduler="vllm")),
        (
            "llamacpp",
            {"/props": {"default_generation_settings": {"n_ctx": 2048}}},
            EngineReport(scheduler="vllm", slot_cache=True, context_tokens=2048),
        ),
        ("llamacpp", {"/props": {"default_generation_settings": [1]}}, EngineReport(scheduler="vllm", slot_cache=True)),
        ("openai", {}, EngineReport()),
    ],
)
def test_settings_are_read_where_they_have_the_expected_type(
    kind: str, answers: Mapping[str, object], report: EngineReport
) -> None:
    assert read_report(kind, "m", answers) == report


LLAMA = find_profile("1xH100-Llama-3.1-8B")
NETWORK_S = 0.02


def served(profile: EngineProfile, *, requests: int, interval_s: float, seed: int) -> list[Finished]:
    """Return the log of Poisson arrivals at one engine: new prompts and prompts that continue earlier ones."""
    draw, model = random.Random(seed), EngineModel[EngineRequest](profile)
    arrivals, now = [], 0.0
    for number in range(requests):
        now += draw.expovariate(1 / interval_s)
        tokens = round(2 ** draw.uniform(7, 14))
        start = bytes([number % 7, 0, 0, 0]) if draw.random() < 0.5 else number.to_bytes(4, "big")
        key = start * draw.choice((500, 2000, 6000))
        key = (key + b"".join(draw.randbytes(4) for _ in range(64)))[: 4 * tokens]
        size = len(key) // 4
        arrivals.append((now, EngineRequest(key, prompt_tokens=size, output_tokens=draw.randint(30, 120))))
    first: dict[EngineRequest, float] = {}
    ended: dict[EngineRequest, float] = {}
    now, place = 0.0, 0
    while len(ended) < requests:
        while place < requests and arrivals[place][0] <= now:
            model.submit(arrivals[place][1], now=arrivals[place][0])
            place += 1
        step = model.start_step(now=now)
        if step is None:
            now = arrivals[place][0]
            continue
        now = step.ends_s
        for request in model.finish_step(step):
            first.setdefault(request, now)
            if request.finished:
                ended[request] = now
    return [
        Finished(
            at - NETWORK_S,
            "m",
            request.prompt_tokens,
            request.output_tokens,
            4 * request.prompt_tokens,
            200,
            b"",
            replica="near",
            cached_tokens=request.cached_tokens,
            attempts=1,
            ttft_s=first[request] - at + NETWORK_S,
            e2e_s=ended[request] - at + NETWORK_S,
        )
        for at, request in arrivals
    ]


def written(path: Path, requests: list[Finished]) -> Path:
    log = RequestLogFile(path, boot_id="b", clock=lambda: 0.0, block_bytes=2048)
    log.write(requests)
    log.close()
    return path


def test_traffic_gives_the_costs_of_its_engine(tmp_path: Path) -> None:
    found = calibrate_log(written(tmp_path / "log", served(LLAMA, requests=3000, interval_s=0.5, seed=1)))
    again = found.profile("again")
    for new, cached in ((500, 0), (3000, 0), (8000, 0), (500, 4000)):
        seconds = LLAMA.prefill_s(new, new * (cached + new / 2)) + NETWORK_S
        assert found.prefill.ttft_s(new, cached) == pytest.approx(seconds, rel=0.1)
    assert again.prefill_tokens_per_s == pytest.approx(LLAMA.prefill_tokens_per_s, rel=0.1)
    for batch, context in ((1, 2000), (2, 6000), (4, 12_000)):
        assert again.decode_s(batch, context) == pytest.approx(LLAMA.decode_s(batch, context), rel=0.1)
    assert "3,000 requests of near" in found.source


def test_replicas_of_one_log_have_their_own_constants(tmp_path: Path) -> None:
    slow = replace(LLAMA, prefill_tokens_per_s=20_000.0, decode_base_s=0.02)
    near = served(LLAMA, requests=1500, interval_s=0.5, seed=1)
    far = [replace(row, replica="far") for row in served(slow, requests=1300, interval_s=0.7, seed=2)]
    far.append(replace(far[-1], received_s=9999.0, input_tokens=120_000))
    log = written(tmp_path / "log", sorted(near + far, key=lambda row: row.received_s))
    busiest, other = calibrate_log(log), calibrate_log(log, replica="far")
    assert busiest.prefill.tokens_per_s == pytest.approx(LLAMA.prefill_tokens_per_s, rel=0.1)
    assert other.prefill.tokens_per_s == pytest.approx(slow.prefill_tokens_per_s, rel=0.1)
    assert other.profile("far").decode_s(1, 1000) == pytest.approx(slow.decode_s(1, 1000), rel=0.1)
    assert "1,500 requests of near" in busiest.source
    assert "1,301 requests of far" in other.source
    assert busiest.profile("near").context_tokens < 20_000 < 120_000 < other.profile("far").context_tokens


def test_retried_failed_and_unreported_requests_are_no_points() -> None:
    alone = LoggedRequest(0.0, "m", 1000, 40, 4000, 200, (), 2048, "near", 0, 1, None, 0.1, 0.5)
    rows = [
        *(replaced(alone, received_s=10.0 * number) for number in range(3)),
        *(replaced(alone, received_s=100.0 + 10.0 * number, attempts=2) for number in range(9)),
        *(replaced(alone, received_s=200.0 + 10.0 * number, status=502) for number in range(9)),
        *(replaced(alone, received_s=300.0 + 10.0 * number, replica="far") for number in range(9)),
        *(replaced(alone, received_s=400.0, ttft_s=0.3) for _ in range(2)),  # they overlap
    ]
    prefills, decodes = traffic_points(rows, "near")
    assert [point.new_tokens for point in prefills] == [1000]
    assert prefills[0].ttft_s == pytest.approx(0.1)
    assert [point.step_s for point in decodes] == [pytest.approx(0.4 / 39)]


def replaced(row: LoggedRequest, **changes: object) -> LoggedRequest:
    return replace(row, **changes)  # type: ignore[arg-type]


def test_log_without_times_names_what_is_missing(tmp_path: Path) -> None:
    old = written(tmp_path / "log", [Finished(1.0, "m", 100, 10, 400, 200, b"")])
    with pytest.raises(CalibrationError, match="no line has a replica and a ttft_s"):
        calibrate_log(old)


def test_unknown_replica_and_too_few_requests_are_errors(tmp_path: Path) -> None:
    log = written(tmp_path / "log", served(LLAMA, requests=5, interval_s=1.0, seed=1))
    with pytest.raises(CalibrationError, match="no request of the replica 'far'; there are near"):
        calibrate_log(log, replica="far")
    with pytest.raises(CalibrationError, match="replica near: prefill: 0 measured times; expected at least 5"):
        calibrate_log(log)


def test_fits_need_as_many_points_as_constants() -> None:
    with pytest.raises(CalibrationError, match="prefill: 0 measured times; expected at least 5"):
        fit_prefill([], round_trip_s=0.0)
    with pytest.raises(CalibrationError, match="decode: 0 measured batches; expected at least 5"):
        fit_decode([])
