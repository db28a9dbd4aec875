"""The constants of an engine, fitted to the request log of its traffic."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.apps.calibrate import calibrate_log
from gorgo.apps.calibrate.fit import fit_decode, fit_prefill
from gorgo.apps.calibrate.traffic import traffic_points
from gorgo.apps.request_log_lines import LoggedRequest
from gorgo.errors import CalibrationError
from gorgo.live.telemetry.request_log_file import Finished, RequestLogFile
from gorgo.sim.engine.model import EngineModel
from gorgo.sim.engine.profiles import EngineProfile, find_profile
from gorgo.sim.engine.request import EngineRequest

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
