"""Gaps between tokens count the steps of a prompt beside a decode, on an engine model in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gorgo.core.messages.request import EngineSample
from gorgo.errors import BadRequest, CalibrationError
from gorgo.lab.calibrate import calibrate_log
from gorgo.lab.calibrate.calibration import Calibration
from gorgo.lab.calibrate.fit import DecodePoint, PrefillPoint, fit_decode, fit_prefill
from gorgo.lab.calibrate.measure import (
    BATCHES,
    PREFILL_TOKENS,
    Answer,
    Bounds,
    SharedPrefix,
    Stalls,
    shared_prefix,
    stalls,
    step_budget,
)
from gorgo.lab.calibrate.run import (
    CalibrateOptions,
    EngineReport,
    HttpEngine,
    Identified,
    calibrate_engine,
    identify,
    measured,
    open_engine_http,
    read_report,
    traffic_points,
)
from gorgo.lab.engine_server.streams import cache_key, token_count
from gorgo.lab.request_log import LoggedRequest
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import PROFILES, EngineProfile, find_profile
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.live.logs import Finished, RequestLogFile
from tests.lab.engine_server.conftest import QUICK, serving

# --- An engine model in virtual time, as `measure` calls an engine.


#: What a request takes outside of the engine's steps.
OVERHEAD_S = 0.004


class VirtualEngine:
    """One idle engine; each call of `generate` plays it until it is idle again.

    The first prompt of a length takes `compile_s` more, as where kernels are made for each shape, and one after a pause
    `wake_s`.
    """

    def __init__(
        self, profile: EngineProfile, *, reports_cached: bool = True, compile_s: float = 0.0, wake_s: float = 0.0
    ) -> None:
        self._model: Engine[EngineRequest] = make_engine(profile)
        self._now_s = 0.0
        self._reports_cached = reports_cached
        self._compile_s = compile_s
        self._compiled: set[int] = set()
        self._wake_s = wake_s
        self._is_idle = False

    async def generate(self, prompts: Sequence[str], *, output_tokens: int) -> list[Answer]:
        started_s, model = self._now_s, self._model
        self._now_s += self._wake_s if self._is_idle else 0.0
        self._is_idle = False
        times: dict[EngineRequest, list[float]] = {}
        answers: list[EngineRequest | str] = []
        for prompt in prompts:
            text = prompt.encode()
            request = EngineRequest(cache_key(text), prompt_tokens=token_count(text), output_tokens=output_tokens)
            try:
                model.submit(request, now=self._now_s)
            except BadRequest as error:
                answers.append(str(error))
                continue
            if request.prompt_tokens not in self._compiled:
                self._compiled.add(request.prompt_tokens)
                self._now_s += self._compile_s
            times[request] = []
            answers.append(request)
        while not model.idle:
            step = model.start_step(now=self._now_s)
            assert step is not None
            self._now_s = step.ends_s
            for request in model.finish_step(step):
                times[request].append(self._now_s - started_s + OVERHEAD_S)
        self._now_s += OVERHEAD_S
        return [
            Answer(None, None, (), answer)
            if isinstance(answer, str)
            else Answer(
                answer.prompt_tokens, answer.cached_tokens if self._reports_cached else None, tuple(times[answer])
            )
            for answer in answers
        ]

    async def round_trip_s(self) -> float:
        return OVERHEAD_S

    def now_s(self) -> float:
        return self._now_s

    async def pause(self, seconds: float) -> None:
        self._now_s += seconds
        self._is_idle = True


# --- Gaps between tokens count the steps of a prompt beside a decode.


DECODE_S, TOKENS_PER_S = 0.005, 7000.0


def pair(prompt_tokens: int, budget: int, *, seed: int, lead: int) -> tuple[Answer, Answer]:
    """Return a decode and a prompt that comes `lead` steps later, with times that vary by a tenth."""
    draw, now_s = random.Random(seed), 0.0
    times_s: list[float] = []
    left, first_s = prompt_tokens, 0.0
    for step in range(64):
        chunk = min(left, budget - 1) if step >= lead else 0
        now_s += (DECODE_S + chunk / TOKENS_PER_S) * draw.uniform(0.9, 1.1)
        left -= chunk
        times_s.append(now_s)
        if not left and not first_s:
            first_s = now_s
    return Answer(30, 0, tuple(times_s)), Answer(prompt_tokens, 0, (first_s, first_s + DECODE_S))


@pytest.mark.parametrize("budget", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("lead", [0, 1, 3])
def test_budget_is_found_whatever_comes_first(budget: int, lead: int) -> None:
    found = [stalls(*pair(tokens, budget, seed=seed, lead=lead)) for tokens in (4750, 3000) for seed in range(3)]
    assert step_budget([one for one in found if one]) == budget


def test_steps_of_a_prompt_are_its_chunks() -> None:
    found = stalls(*pair(4750, 1024, seed=1, lead=1))
    assert found == Stalls(4750, ceil(4750 / 1023))


def test_gaps_that_do_not_stand_out_tell_nothing() -> None:
    decoding = Answer(30, 0, tuple(0.01 * step for step in range(1, 40)))
    assert stalls(decoding, Answer(4000, 0, (0.2,))) is None


def test_a_decode_that_ends_first_or_fails_tells_nothing() -> None:
    decoding, prompt = pair(4750, 512, seed=1, lead=0)
    assert stalls(Answer(30, 0, decoding.tokens_s[:5]), prompt) is None
    assert stalls(Answer(30, 0, decoding.tokens_s, "timeout"), prompt) is None
    assert stalls(decoding, Answer(None, None, (), "http 503")) is None


def test_without_any_there_is_no_budget() -> None:
    assert step_budget([]) is None


# A decode step that takes longer above a batch: found where it is, and nowhere else.
LLAMA = find_profile("1xH100-Llama-3.1-8B")
MIXTURE = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")


def points(profile: EngineProfile, *, noise: float, seed: int) -> list[DecodePoint]:
    """Return measured steps with relative errors of the standard deviation `noise`."""
    draw = random.Random(seed)
    return [
        DecodePoint(batch, batch * context, profile.decode_s(batch, batch * context) * draw.gauss(1.0, noise))
        for context in (300, 6200)
        for batch in BATCHES
    ]


@pytest.mark.parametrize("profile", [LLAMA, MIXTURE], ids=["dense", "mixture"])
async def test_largest_batch_with_a_graph_is_found_between_two_measured_ones(profile: EngineProfile) -> None:
    eager = replace(profile, cuda_graph_max_batch=20, decode_eager_s=0.025)
    again = (await calibration_of(eager, kv_capacity_tokens=eager.kv_tokens)).profile("again")
    assert again.cuda_graph_max_batch == 20
    assert again.decode_eager_s == pytest.approx(0.025, rel=0.05)
    for batch, context in ((1, 100), (20, 100_000), (24, 100_000), (64, 300_000)):
        assert again.decode_s(batch, context) == pytest.approx(eager.decode_s(batch, context), rel=0.03)


#: The profile that is fitted to the paper has a largest graph.
#: A fifth of them in every run of the tests, and all in `make test-system`.
SOME_PROFILES = [
    pytest.param(name, marks=pytest.mark.system) if place % 5 else name
    for place, name in enumerate(name for name in PROFILES if "V100" not in name)
]
WITHOUT_JUMP = [name for name, one in PROFILES.items() if "vLLM" not in name and one.cuda_graph_max_batch is None]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("name", WITHOUT_JUMP[::8])
def test_no_jump_is_found_where_there_is_none(name: str, noise: float) -> None:
    for seed in range(3):
        fit = fit_decode(points(find_profile(name), noise=noise, seed=seed))
        assert fit.graph_max_batch is None
        assert fit.eager_s == 0


@pytest.mark.parametrize(("active", "experts"), [(4, 60), (1, 16), (6, 160)])
def test_curve_of_another_number_of_experts_is_no_jump(active: int, experts: int) -> None:
    profile = replace(MIXTURE, experts_per_token=active, experts=experts)
    assert fit_decode(points(profile, noise=0.01, seed=1)).graph_max_batch is None


def test_jump_is_found_among_errors_of_three_percent() -> None:
    eager = replace(LLAMA, cuda_graph_max_batch=32, decode_eager_s=0.02)
    fit = fit_decode(points(eager, noise=0.03, seed=1))
    assert fit.graph_max_batch == 32
    assert fit.eager_s == pytest.approx(0.02, rel=0.15)


# A calibration in virtual time finds the constants of the engine that it measures.
SMALL_POOL = replace(LLAMA, kv_tokens=150_000)


def ignore(words: str) -> None:
    """Show no progress."""
    del words


async def calibration_of(profile: EngineProfile, bounds: Bounds | None = None, **sizes: float) -> Calibration:
    bounds = bounds or Bounds(time_s=3600.0, fill_s=60.0)
    report = EngineReport(scheduler=profile.scheduler)
    return await measured(
        VirtualEngine(profile), EngineSample(**sizes), bounds, seed=1, source="test", advance=ignore, report=report
    )


@pytest.mark.parametrize("name", SOME_PROFILES)
async def test_costs_of_every_profile_are_found_within_three_percent(name: str) -> None:
    profile = find_profile(name)
    calibration = await calibration_of(profile, kv_capacity_tokens=profile.kv_tokens)
    again = calibration.profile("again")
    for new, cached in ((64, 0), (1000, 0), (9000, 0), (20_000, 0), (500, 8000), (4000, 16_000)):
        expected = profile.prefill_s(new, new * (cached + new / 2))
        assert again.prefill_s(new, new * (cached + new / 2)) == pytest.approx(expected, rel=0.03)
    for batch, context in ((1, 100), (4, 20_000), (16, 20_000), (64, 300_000)):
        assert again.decode_s(batch, context) == pytest.approx(profile.decode_s(batch, context), rel=0.03)
    assert again.prefill_tokens_per_s == pytest.approx(profile.prefill_tokens_per_s, rel=0.03)
    assert calibration.capacity()["kv_tokens"] == profile.kv_tokens
    assert calibration.prefill.overhead_s == pytest.approx(OVERHEAD_S, abs=0.002)
    assert again.scheduler == profile.scheduler
    assert again.block_tokens == profile.block_tokens
    assert (again.prefix_cache, again.checkpoint_tokens) == (True, 1)
    assert again.hit_share == pytest.approx(profile.hit_share, abs=0.02)
    assert again.cuda_graph_max_batch == profile.cuda_graph_max_batch


async def test_pool_that_is_not_reported_is_found_by_what_it_evicts() -> None:
    calibration = await calibration_of(SMALL_POOL)
    assert calibration.pool is not None
    assert not calibration.pool.is_lower_bound
    assert calibration.pool.tokens == pytest.approx(150_000, rel=0.06)


async def test_pool_that_is_not_full_in_time_is_a_lower_bound_and_no_prior() -> None:
    calibration = await calibration_of(LLAMA, Bounds(time_s=3600.0, fill_s=2.0))
    assert calibration.pool is not None
    assert calibration.pool.is_lower_bound
    assert "kv_tokens" not in calibration.capacity()
    assert "at least" in calibration.errors()["kv_tokens"]


@pytest.mark.parametrize(("share", "step"), [(1.0, 1), (0.6, 1), (0.3, 1), (1.0, 512), (1.0, 1024)])
async def test_what_is_found_of_a_shared_beginning_is_learned(share: float, step: int) -> None:
    profile = replace(LLAMA, hit_share=share, checkpoint_tokens=step)
    again = (await calibration_of(profile, kv_capacity_tokens=profile.kv_tokens)).profile("again")
    assert again.hit_share == pytest.approx(share, abs=0.02)
    assert again.checkpoint_tokens == step


def test_small_divisor_that_a_few_lengths_have_by_chance_is_no_page() -> None:
    found = [(tokens, tokens + extra) for tokens, extra in ((1103, 1), (1789, 3), (2333, 5), (3169, 1), (4211, 3))]
    assert shared_prefix(found) == SharedPrefix(found_share=1.0, step_tokens=1)


@pytest.mark.parametrize("chunk_tokens", [1024, 16_384])
def test_chunk_is_found_among_errors_of_two_percent(chunk_tokens: int) -> None:
    profile = replace(LLAMA, prefill_base_s=0.004, prefill_tokens_per_s=6800.0, chunk_tokens=chunk_tokens)
    for seed in range(8):
        draw, points = random.Random(seed), []
        for new, cached in [(tokens, 0) for tokens in PREFILL_TOKENS if tokens <= 5000] + [(256, 4096)]:
            steps_s = (ceil(new / chunk_tokens) - 1) * profile.prefill_base_s
            seconds = steps_s + profile.prefill_s(new, new * (cached + new / 2))
            points.append(PrefillPoint(new, cached, seconds * draw.gauss(1.0, 0.02)))
        found = fit_prefill(points, round_trip_s=0.001)
        if chunk_tokens > 5000:
            assert found.chunk_tokens == chunk_tokens
        assert found.ttft_s(700, 0) == pytest.approx(profile.prefill_s(700, 700 * 350), rel=0.03)


def test_time_outside_of_the_steps_is_not_the_base_of_the_only_step_of_each_prompt() -> None:
    points = [PrefillPoint(tokens, 0, 0.006 + 0.005 + tokens / 7000) for tokens in PREFILL_TOKENS if tokens <= 5000]
    found = fit_prefill(points, round_trip_s=0.001, floor_s=0.005, most_base_s=0.0051)
    assert found.base_s == pytest.approx(0.0051)
    assert found.overhead_s == pytest.approx(0.0059)
    assert found.ttft_s(1000, 0) == pytest.approx(0.011 + 1 / 7)


@pytest.mark.parametrize(
    "engine", [VirtualEngine(LLAMA, compile_s=0.010), VirtualEngine(LLAMA, wake_s=0.010)], ids=["length", "pause"]
)
async def test_what_a_new_length_or_an_idle_engine_costs_is_part_of_a_prefill(engine: VirtualEngine) -> None:
    sizes = EngineSample(kv_capacity_tokens=450_000.0)
    calibration = await measured(engine, sizes, Bounds(time_s=3600.0), seed=1, source="test", advance=ignore)
    expected_s = OVERHEAD_S + 0.010 + LLAMA.prefill_s(1000, 1000 * 500)
    assert calibration.prefill.ttft_s(1000, 0) == pytest.approx(expected_s, rel=0.03)


async def test_no_request_starts_after_the_time_is_done() -> None:
    engine = VirtualEngine(LLAMA)
    bounds = Bounds(time_s=4.0)
    with pytest.raises(CalibrationError, match="decode: 0 measured batches; expected at least 5"):
        await measured(engine, EngineSample(), bounds, seed=1, source="test", advance=ignore)
    assert engine.now_s() < 4.0 + LLAMA.prefill_s(24_000, 24_000 * 12_000) + OVERHEAD_S


async def test_longer_prompts_than_the_engine_takes_are_left_out_and_reported() -> None:
    profile = replace(LLAMA, context_tokens=9000)
    calibration = await calibration_of(profile, kv_capacity_tokens=profile.kv_tokens)
    assert calibration.profile("again").prefill_tokens_per_s == pytest.approx(LLAMA.prefill_tokens_per_s, rel=0.03)
    assert "longer than the model's context length" in calibration.refused[0]


async def test_engine_without_reports_of_cached_tokens_is_calibrated_without_what_needs_them() -> None:
    engine = VirtualEngine(LLAMA, reports_cached=False)
    calibration = await measured(engine, EngineSample(), Bounds(time_s=3600.0), seed=1, source="test", advance=ignore)
    assert calibration.pool is None
    assert calibration.shared is None
    assert "not measured" in calibration.errors()["shared_prefix"]
    assert calibration.profile("again").prefill_tokens_per_s == pytest.approx(LLAMA.prefill_tokens_per_s, rel=0.03)


async def test_whole_blocks_that_vllm_finds_are_its_blocks() -> None:
    profile = replace(find_profile("1xH100-Llama-3.1-8B-vLLM"), block_tokens=128)
    again = (await calibration_of(profile, kv_capacity_tokens=profile.kv_tokens)).profile("again")
    assert (again.scheduler, again.block_tokens, again.checkpoint_tokens) == ("vllm", 128, 1)


async def test_pool_of_vllm_that_is_not_reported_is_found_by_what_it_evicts() -> None:
    profile = replace(find_profile("1xH100-Llama-3.1-8B-vLLM"), kv_tokens=150_000)
    calibration = await calibration_of(profile)
    assert calibration.pool is not None
    assert calibration.pool.tokens == pytest.approx(150_000, rel=0.06)


@pytest.mark.parametrize("name", ["1xH100-Llama-3.1-8B", "1xH100-Llama-3.1-8B-vLLM"])
async def test_engine_without_a_prefix_cache_is_found(name: str) -> None:
    profile = replace(find_profile(name), prefix_cache=False)
    calibration = await calibration_of(profile)
    again = calibration.profile("again")
    assert (again.prefix_cache, again.hit_share, again.checkpoint_tokens) == (False, 1.0, 1)
    assert calibration.pool is None
    assert calibration.errors()["shared_prefix"] == "nothing is found of any: no prefix cache"
    assert calibration.errors()["kv_tokens"] == "not measured: there is no prefix cache"
    assert again.prefill_tokens_per_s == pytest.approx(profile.prefill_tokens_per_s, rel=0.03)


async def test_settings_that_the_engine_reports_are_used() -> None:
    report = EngineReport(chunk_tokens=3000, context_tokens=40_960, max_running_requests=48)
    profile = replace(LLAMA, chunk_tokens=3000)
    calibration = await measured(
        VirtualEngine(profile),
        EngineSample(kv_capacity_tokens=450_000.0),
        Bounds(time_s=3600.0),
        seed=1,
        source="test",
        advance=ignore,
        report=report,
    )
    again = calibration.profile("again")
    assert (again.chunk_tokens, again.context_tokens, again.max_running_requests) == (3000, 40_960, 48)
    assert again.prefill_base_s == pytest.approx(LLAMA.prefill_base_s, rel=0.03)
    assert calibration.capacity()["max_running_requests"] == 48


class DyingEngine(VirtualEngine):
    """An engine whose process ends after so many calls."""

    def __init__(self, profile: EngineProfile, *, calls: int) -> None:
        super().__init__(profile)
        self.calls = calls

    async def generate(self, prompts: Sequence[str], *, output_tokens: int) -> list[Answer]:
        self.calls -= 1
        if self.calls < 0:
            return [Answer(None, None, (), "ConnectError: refused", is_connected=False) for _ in prompts]
        return await super().generate(prompts, output_tokens=output_tokens)


@pytest.mark.parametrize("calls", [2, 30, 75, 100])
async def test_engine_that_dies_ends_the_measurement_with_the_reason(calls: int) -> None:
    engine = DyingEngine(SMALL_POOL, calls=calls)
    with pytest.raises(CalibrationError, match=r"stopped answering after \d+ requests: ConnectError: refused"):
        await measured(engine, EngineSample(), Bounds(time_s=3600.0), seed=1, source="test", advance=ignore)
    assert engine.calls == -3


async def test_one_broken_connection_is_a_failed_request_only() -> None:
    class Interrupted(DyingEngine):
        async def generate(self, prompts: Sequence[str], *, output_tokens: int) -> list[Answer]:
            answers = await super().generate(prompts, output_tokens=output_tokens)
            self.calls = 1_000_000 if self.calls < 0 else self.calls
            return answers

    calibration = await measured(
        Interrupted(LLAMA, calls=20),
        EngineSample(kv_capacity_tokens=450_000.0),
        Bounds(time_s=3600.0),
        seed=1,
        source="test",
        advance=ignore,
    )
    assert calibration.refused == ("ConnectError: refused",)
    assert calibration.profile("again").prefill_tokens_per_s == pytest.approx(LLAMA.prefill_tokens_per_s, rel=0.03)


@pytest.mark.parametrize("budget", [512, 2048, 8192])
async def test_step_budget_of_vllm_is_found_by_gaps_beside_a_prompt(budget: int) -> None:
    profile = replace(find_profile("1xH100-Llama-3.1-8B-vLLM"), chunk_tokens=budget, max_running_requests=128)
    calibration = await calibration_of(profile, kv_capacity_tokens=profile.kv_tokens)
    assert calibration.profile("again").chunk_tokens == budget


# --- `gorgo calibrate --url` against servers on sockets: what they report, and servers that are no engine.


Respond = Callable[[web.Request], web.Response]
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
async def serving_pages(answer: Respond) -> AsyncIterator[str]:
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
async def test_what_is_no_engine_is_one_clear_line(answer: Respond, model: str | None, message: str) -> None:
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
