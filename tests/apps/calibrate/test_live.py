"""`gorgo calibrate --url` against servers on sockets: what they report, and servers that are no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gorgo.apps.calibrate.live import HttpEngine, Identified, identify, open_engine_http
from gorgo.apps.calibrate.measure import Bounds
from gorgo.apps.calibrate.reports import EngineReport, read_report
from gorgo.apps.calibrate.run import CalibrateOptions, calibrate_engine
from gorgo.errors import CalibrationError
from gorgo.sim.engine.profiles import EngineProfile
from tests.apps.calibrate.test_measured import ignore
from tests.apps.engine_server.conftest import QUICK, serving

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
