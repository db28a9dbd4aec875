"""Replays of traces at a router, and the summary of what was seen."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gorgo.errors import ReplayError, TraceError
from gorgo.lab import replay_client as transport_module
from gorgo.lab.prompt_text import prompt_text
from gorgo.lab.replay import LEAD_S, LOOK_AHEAD, BodiesAhead, ReplayProgress, replay, replay_command
from gorgo.lab.replay_client import (
    LogHistogram,
    PoolTransport,
    ReplayOptions,
    ReplayRecord,
    ReplayReport,
    StreamReader,
    Tally,
)
from gorgo.lab.report.report import find_results, report
from gorgo.lab.traces import TraceFilters, TraceRequest
from tests.lab.replay.fake_router import DONE, HEADERS, ROLE, FakeRouter, event, never, token, usage
from tests.live.upstream.engine import OK, Engine, Speak, listening
from tests.proxy.authority import Authority, needs_openssl
from tests.proxy.authority import engine as tls_engine
from tests.proxy.conftest import until


def trace(count: int, *, every_s: float = 0.0, tokens: int = 1000, output: int = 3) -> list[TraceRequest]:
    return [TraceRequest(n, n * every_s, tokens, output, (7, 100 + n)) for n in range(count)]


def options(router: FakeRouter, **changes: Any) -> ReplayOptions:
    return ReplayOptions(**{"trace": Path("t.jsonl"), "url": router.url, "show_progress": False, **changes})


async def replayed(router: FakeRouter, requests: list[TraceRequest], **changes: Any) -> ReplayReport:
    async with router.running():
        return await replay(requests, options(router, **changes))


async def test_each_request_asks_for_its_tokens_its_text_and_its_usage() -> None:
    router = FakeRouter()
    await replayed(router, trace(2, every_s=0.05), api_key="k")
    first, second = router.bodies
    assert first["model"] == "fake-model"
    assert first["messages"] == [{"role": "user", "content": prompt_text([7, 100], 1000).decode()}]
    assert first["messages"][0]["content"][:2048] == second["messages"][0]["content"][:2048]
    assert (first["max_tokens"], first["ignore_eos"], first["stream"]) == (3, True, True)
    assert first["stream_options"] == {"include_usage": True}
    assert router.request_headers[0]["authorization"] == "Bearer k"
    assert router.request_headers[0]["x-request-id"] != router.request_headers[1]["x-request-id"]


async def test_a_body_of_the_trace_is_sent_with_the_length_of_the_trace() -> None:
    body = {"messages": [{"role": "user", "content": "hello you"}], "temperature": 0.3, "max_completion_tokens": 9000}
    router = FakeRouter()
    await replayed(router, [TraceRequest(0, 0.0, 2, 4, (), body)], model="m")
    sent = router.bodies[0]
    assert (sent["messages"], sent["temperature"], sent["max_tokens"]) == (body["messages"], 0.3, 4)
    assert sent["model"] == "m"
    assert "max_completion_tokens" not in sent


async def test_the_row_sums_up_what_engines_and_router_said(tmp_path: Path) -> None:
    report = await replayed(FakeRouter(), trace(4), out=tmp_path, time_scale=0.5, weights={"w": 1.0})
    row = report.row.as_json()
    assert (row["trace"], row["time_scale"], row["policy"], row["weights"]) == ("t.jsonl", 0.5, "gorgo", {"w": 1.0})
    assert (row["n"], row["errors"], row["source"], row["share"]) == (4, 0, "live", {"seoul-0": 1.0})
    assert row["cache_hit"] == 0.5
    assert row["cache_hit_estimated"] == 0.512
    assert row["ttft_ms"]["p50"] > 0
    assert set(row["prediction_error_ms"]) == {"mean", "p50", "p95"}
    assert report.exit_code == 0
    assert json.loads((tmp_path / "results.json").read_text()) == [row]


async def test_requests_jsonl_has_exactly_the_keys_of_the_contract(tmp_path: Path) -> None:
    await replayed(FakeRouter(), trace(3), out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    keys = (
        "id scheduled_s sent_s replica region input_tokens cached_tokens output_tokens ttft_ms e2e_s status error "
        "weights_version predicted_ttft_ms"
    )
    assert all(list(row) == keys.split() for row in rows)
    row = rows[0]
    assert (row["replica"], row["region"], row["weights_version"]) == ("seoul-0", "ap-seoul", 3)
    assert (row["input_tokens"], row["cached_tokens"], row["output_tokens"]) == (1000, 500, 3)
    assert (row["status"], row["error"], row["predicted_ttft_ms"]) == (200, None, 12.5)


async def test_what_another_router_does_not_say_is_null(tmp_path: Path) -> None:
    async def plain(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await router.stream(request, token(), DONE, headers={})

    router = FakeRouter(plain)
    report = await replayed(router, trace(1), out=tmp_path)
    row = json.loads((tmp_path / "requests.jsonl").read_text())
    assert [row[key] for key in ("replica", "region", "cached_tokens", "output_tokens", "predicted_ttft_ms")] == [
        None
    ] * 5
    assert row["input_tokens"] == 1000
    assert report.row.errors == 0
    assert (report.row.policy, report.row.cache_hit, report.row.cache_hit_estimated) == (None, None, None)
    assert report.row.share == {}


async def test_a_slow_answer_holds_no_later_request_back() -> None:
    arrived = asyncio.Event()

    async def waits_for_all(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(router.bodies) == 120:  # more than a pool of connections has by default
            arrived.set()
        await arrived.wait()
        return await router.whole(request, body)

    router = FakeRouter(waits_for_all)
    report = await replayed(router, trace(120, every_s=0.0001, tokens=10), request_timeout_s=20.0)
    assert report.row.errors == 0


class Clock:
    """Stands still unless a test moves it. The replay starts as soon as the clock has been read once."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self._read = False

    def __call__(self) -> float:
        if not self._read:
            self._read = True
            return self.now_s - LEAD_S
        return self.now_s


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


async def test_latency_counts_from_the_scheduled_time_when_the_client_falls_behind(tmp_path: Path) -> None:
    """One at a time, two seconds each: request n is sent 2 n seconds late, and TTFT, E2E and slip all show it."""
    clock = Clock()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        clock.now_s += 2.0
        return await router.whole(request, body)

    router = FakeRouter(slow)
    async with router.running():
        report = await replay(trace(3), options(router, max_in_flight=1, out=tmp_path), clock=clock)
    rows = rows_of(tmp_path)
    assert [(row["scheduled_s"], row["sent_s"]) for row in rows] == [(0.0, 0.0), (0.0, 2.0), (0.0, 4.0)]
    assert [(row["ttft_ms"], row["e2e_s"]) for row in rows] == [(2000.0, 2.0), (4000.0, 4.0), (6000.0, 6.0)]
    assert report.row.ttft_ms.p50 == pytest.approx(4000.0)
    assert report.row.e2e_s.p50 == pytest.approx(4.0)
    # Of 0, 2000 and 4000 ms: 95 % of the way from the first to the last.
    assert report.row.slip_ms_p95 == pytest.approx(3800.0)
    assert report.wall_s == pytest.approx(6.0)


async def test_no_more_requests_than_the_bound_are_in_flight(tmp_path: Path) -> None:
    """All are due at once and answers come in pairs, a second each: every other pair is sent a second later."""
    clock, arrived = Clock(), asyncio.Condition()

    async def in_pairs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        mine = len(router.bodies)
        async with arrived:
            if mine % 2 == 0:
                clock.now_s += 1.0
            arrived.notify_all()
            await arrived.wait_for(lambda: len(router.bodies) >= mine + mine % 2)
        return await router.whole(request, body)

    router = FakeRouter(in_pairs)
    async with router.running():
        wanted = options(router, max_in_flight=2, out=tmp_path, request_timeout_s=5.0)
        report = await replay(trace(6), wanted, clock=clock)
    assert report.row.errors == 0
    assert sorted(row["sent_s"] for row in rows_of(tmp_path)) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


async def test_the_time_scale_stretches_the_time_between_requests(tmp_path: Path) -> None:
    await replayed(FakeRouter(), trace(3, every_s=0.02), out=tmp_path, time_scale=2.0)
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert sorted(row["scheduled_s"] for row in rows) == [0.0, 0.04, 0.08]
    assert all(row["sent_s"] >= row["scheduled_s"] - 0.002 for row in rows)


async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "full", "type": "busy", "code": 503}}, status=503)


async def no_content(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await FakeRouter().stream(request, ROLE, DONE)


async def truncated(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await FakeRouter().stream(request, token(), token())


async def error_after_content(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await FakeRouter().stream(request, token(), event({"error": {"message": "gone", "code": 502}}))


async def error_before_content(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await FakeRouter().stream(request, event({"error": {"message": "gone", "code": 502}}))


async def drops(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(token())
    assert request.transport is not None
    request.transport.abort()
    return response


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refuses, "HTTP 503"),
        (no_content, "no content"),
        (truncated, "truncated"),
        (error_after_content, "stream error"),
        (error_before_content, "stream error 502"),
        (never, "no answer in time"),
    ],
)
async def test_a_failure_is_recorded_by_kind_and_never_raised(answer: Any, kind: str) -> None:
    report = await replayed(FakeRouter(answer), trace(2), request_timeout_s=0.3)
    assert report.row.failures == {kind: 2}
    assert report.row.errors == report.row.n == 2
    assert report.row.ttft_ms.p50 is None
    assert report.exit_code == 1


async def test_a_trace_that_begins_alike_is_warned_of_under_a_policy_keyed_by_session() -> None:
    async def keyed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await router.stream(request, token(), DONE, headers={**HEADERS, "x-gorgo-policy": names[-1]})

    router, names = FakeRouter(keyed), [""]
    for policy, expected in (("simple-session-affinity", "100% begin with the same tokens"), ("gorgo", ""), ("?", "")):
        names.append(policy)
        report = await replayed(router, trace(3))
        assert (report.warning is None) == (expected == "")
        assert expected in (report.warning or "")


async def test_of_what_a_refusal_says_200_characters_are_kept(tmp_path: Path) -> None:
    async def refused(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=429, text="é" * 201, headers=HEADERS)

    router = FakeRouter(refused)
    async with router.running():
        await replay(trace(1), options(router, url=f"{router.url}/", out=tmp_path))
    (row,) = rows_of(tmp_path)
    assert row["error"] == f"http 429: {'é' * 200}"
    assert (row["status"], row["replica"], row["region"]) == (429, "seoul-0", "ap-seoul")
    assert (row["ttft_ms"], row["e2e_s"], row["output_tokens"]) == (None, None, None)


@pytest.mark.parametrize("value", ["soon", "nan", "inf", ""])
async def test_a_header_that_is_no_number_is_unknown(value: str, tmp_path: Path) -> None:
    async def odd(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        numbers = dict.fromkeys(("x-gorgo-weights-version", "x-gorgo-predicted-ttft-ms"), value)
        return await router.stream(request, token(), DONE, headers={**HEADERS, **numbers})

    router = FakeRouter(odd)
    await replayed(router, trace(1), out=tmp_path)
    (row,) = rows_of(tmp_path)
    assert (row["weights_version"], row["predicted_ttft_ms"], row["replica"]) == (None, None, "seoul-0")


async def test_progress_tells_how_many_of_all_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    await replayed(FakeRouter(), trace(3), show_progress=True, label="mine")
    assert capsys.readouterr().err.startswith("mine: 3/3 done, 0 in flight, 0 errors, TTFT p95 ")


async def test_a_connection_that_breaks_in_the_middle_is_an_error_with_what_came_before(tmp_path: Path) -> None:
    report = await replayed(FakeRouter(drops), trace(1), out=tmp_path)
    row = json.loads((tmp_path / "requests.jsonl").read_text())
    assert row["ttft_ms"] is not None
    assert row["e2e_s"] is None
    assert report.row.errors == 1


@pytest.mark.parametrize("model", [None, "m"])
async def test_a_router_that_does_not_listen_is_an_error_after_the_wait(model: str | None) -> None:
    router = FakeRouter()
    async with router.running():
        pass
    with pytest.raises(ReplayError, match=r"127\.0\.0\.1:\d+: no connection within 0\.2 s .*is the router up"):
        await replay(trace(2), options(router, model=model, port_wait_s=0.2))


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://a:1", "http://", "http://a:b", ""])
async def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ReplayError, match="expected http://HOST:PORT"):
        await replay(trace(1), ReplayOptions(trace=Path("t"), url=url))


async def test_a_router_that_listens_later_is_waited_for() -> None:
    router = FakeRouter()
    async with router.running():
        pass
    task = asyncio.create_task(replay(trace(2), options(router, port_wait_s=20.0)))
    async with router.running(port=router.port):
        report = await task
    assert (report.row.n, report.row.errors) == (2, 0)


async def test_a_router_that_names_no_model_is_told_so() -> None:
    router = FakeRouter()
    router.models = {"data": []}
    with pytest.raises(ReplayError, match="names no model"):
        await replayed(router, trace(1))


async def test_an_interrupted_replay_leaves_the_records_it_has(tmp_path: Path) -> None:
    second_came = asyncio.Event()

    async def then_hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(router.bodies) == 1:
            return await router.whole(request, body)
        second_came.set()
        return await never(request, body)

    router = FakeRouter(then_hangs)
    async with router.running():
        task = asyncio.create_task(replay(trace(2), options(router, out=tmp_path, max_in_flight=1)))
        await second_came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 1


def test_usage_of_the_filters_seed_is_in_the_row() -> None:
    report = asyncio.run(replayed(FakeRouter(), trace(1), filters=TraceFilters(seed=5)))
    assert report.row.seed == 5


# Building bodies before they are due: in order, and so many at most.
def short_trace(count: int) -> list[TraceRequest]:
    return [TraceRequest(number, 0.0, 8, 2, (number,)) for number in range(count)]


def drained(bodies: BodiesAhead) -> list[int]:
    found = []
    while (item := bodies.next()) is not None:
        request, body = item
        assert json.loads(body)["model"] == "m"
        found.append(request.index)
    return found


def test_so_many_bodies_are_built_ahead() -> None:
    bodies = BodiesAhead(short_trace(5), "m", look_ahead=2)
    assert [bodies.build_one() for _ in range(3)] == [True, True, False]
    assert bodies.next() is not None
    assert [bodies.build_one() for _ in range(2)] == [True, False]
    assert drained(bodies) == [1, 2, 3, 4]
    assert (bodies.next(), bodies.build_one()) == (None, False)


def test_the_largest_burst_of_a_trace_is_built_ahead() -> None:
    bodies = BodiesAhead(short_trace(40), "m")
    assert sum(bodies.build_one() for _ in range(40)) == LOOK_AHEAD == 32
    assert drained(bodies) == list(range(40))


def test_nothing_built_ahead_is_built_when_it_is_asked_for() -> None:
    assert drained(BodiesAhead(short_trace(3), "m")) == [0, 1, 2]


# Sessions: their names, and turns that follow the answers before them.


def session(name: str, *indices: int, think_s: float | None = None) -> list[TraceRequest]:
    return [TraceRequest(n, 0.01 * n, 64, 2, (n,), session=name, think_s=think_s) for n in indices]


async def test_a_session_s_name_is_sent_and_a_request_without_one_has_none() -> None:
    router = FakeRouter()
    await replayed(router, [*session("user:1/é", 0), *trace(1)])
    named, other = router.request_headers
    assert named["x-session-id"] == "user:1/%C3%A9"
    assert "x-session-id" not in other


@pytest.mark.parametrize("closed_loop", [True, False])
async def test_in_a_closed_loop_a_turn_is_sent_a_think_time_after_the_answer_before_it(closed_loop: bool) -> None:
    """Answers wait for the other session's: in an open loop all requests are there before any is answered."""
    most, there = 0, 0

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal most, there
        there += 1
        most = max(most, there)
        await asyncio.sleep(0.2)
        there -= 1
        return await router.stream(request, ROLE, token(), token(), DONE)

    router = FakeRouter(slow)
    requests = [*session("a", 0, 2, 4, think_s=0.05), *session("b", 1, 3, think_s=0.05)]
    requests.sort(key=lambda request: request.timestamp_s)
    report = await replayed(router, requests, closed_loop=closed_loop)
    assert (report.row.n, report.row.errors) == (5, 0)
    assert most == (2 if closed_loop else 5)
    if closed_loop:
        assert report.wall_s >= 3 * 0.2 + 2 * 0.05


def test_a_closed_loop_needs_sessions(tmp_path: Path) -> None:
    wanted = ReplayOptions(trace=write_trace(tmp_path / "t.jsonl", 2), closed_loop=True)
    with pytest.raises(TraceError, match="no request has a session; expected session_id in rows, or --user-sessions"):
        replay_command(wanted)


# `gorgo replay` as a process that is interrupted: its exit code, its summary, its files, and the report of them.
ENDS_S = 60.0


def write_trace(path: Path, count: int) -> Path:
    lines = [{"timestamp": 0, "input_length": 64, "output_length": 2, "hash_ids": [n]} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


async def started(*words: str | Path) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "gorgo", "replay", *map(str, words)]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def ended(process: asyncio.subprocess.Process) -> tuple[str, str]:
    try:
        async with asyncio.timeout(ENDS_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode(), err.decode()


@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupted_replay_sums_up_what_has_ended(by: signal.Signals, code: int, tmp_path: Path) -> None:
    second_came = asyncio.Event()

    async def then_hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(router.bodies) == 1:
            return await router.whole(request, body)
        if len(router.bodies) == 3:
            second_came.set()
        return await never(request, body)

    router = FakeRouter(then_hangs)
    trace, out = write_trace(tmp_path / "t.jsonl", 3), tmp_path / "out"
    async with router.running():
        process = await started(trace, "--url", router.url, "--out", out)
        async with asyncio.timeout(ENDS_S):
            await second_came.wait()
        process.send_signal(by)
        stdout, stderr = await ended(process)
    assert process.returncode == code, stderr
    assert "gorgo " in stdout
    assert f"gorgo: {by.name}: partial, the summary is of 1 of 3 requests" in stderr
    assert "Traceback" not in stderr
    (row,) = json.loads((out / "results.json").read_text())
    assert (row["n"], row["planned"], row["errors"]) == (1, 3, 0)
    assert len((out / "requests.jsonl").read_text().splitlines()) == 1
    text = report(find_results(out), ()).html
    assert "1 of 3, partial" in text
    assert "Partial: a run was interrupted; its figures are of the requests that had ended (gorgo)." in text


async def test_a_replay_interrupted_while_it_waits_for_the_port_writes_nothing(tmp_path: Path) -> None:
    closed = FakeRouter()
    async with closed.running():
        pass
    trace, out = write_trace(tmp_path / "t.jsonl", 3), tmp_path / "out"
    process = await started(trace, "--url", closed.url, "--out", out)
    assert process.stderr is not None
    line = (await process.stderr.readline()).decode()
    assert line == f"gorgo: waiting for {closed.url}, at most 10 s\n"
    process.send_signal(signal.SIGINT)
    _, stderr = await ended(process)
    assert process.returncode == 130, stderr
    assert "the summary is of 0 of 3 requests" in stderr
    assert not out.exists()


async def test_a_replay_started_before_its_router_waits_for_it(tmp_path: Path) -> None:
    router = FakeRouter()
    async with router.running():
        pass
    process = await started(write_trace(tmp_path / "t.jsonl", 2), "--url", router.url, "--json")
    assert process.stderr is not None
    assert b"waiting for" in await process.stderr.readline()
    async with router.running(port=router.port):
        stdout, stderr = await ended(process)
    assert process.returncode == 0, stderr
    (row,) = json.loads(stdout)
    assert (row["n"], row["planned"], row["errors"]) == (2, 2, 0)


async def test_a_replay_that_ends_by_itself_is_not_partial(tmp_path: Path) -> None:
    router = FakeRouter()
    async with router.running():
        process = await started(write_trace(tmp_path / "t.jsonl", 2), "--url", router.url, "--out", tmp_path / "out")
        _, stderr = await ended(process)
    assert process.returncode == 0, stderr
    assert "partial" not in stderr + report(find_results(tmp_path / "out"), ()).html


def record(**changes: object) -> ReplayRecord:
    values = {"id": "r", "scheduled_s": 1.0, "sent_s": 1.25, "input_tokens": 100, "ttft_ms": 10.0, "e2e_s": 1.0}
    return ReplayRecord(**{**values, **changes})  # type: ignore[arg-type]


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_of_the_histogram_is_right_within_one_percent(values: list[float], share: float) -> None:
    histogram = LogHistogram()
    histogram.add(tuple(values))
    expected = np.quantile(values, share, method="inverted_cdf")
    assert histogram.quantile(share) == pytest.approx(expected, rel=0.0101)


def test_no_value_has_no_quantile() -> None:
    assert LogHistogram().quantile(0.5) is None
    assert LogHistogram().spread().mean is None


def test_a_gap_of_nothing_or_of_hours_is_still_counted() -> None:
    histogram = LogHistogram()
    histogram.add((0.0, 1e9))
    assert histogram.count == 2


def test_a_row_sums_up_good_requests_and_the_slip_of_all() -> None:
    tally = Tally()
    for one in (
        record(
            replica="x", cached_tokens=50, estimated_cached_tokens=40.0, predicted_ttft_ms=14.0, gaps_s=(0.01, 0.03)
        ),
        record(replica="x", input_tokens=300, cached_tokens=250, ttft_ms=30.0, e2e_s=3.0, gaps_s=(0.02,)),
        record(replica="y", estimated_cached_tokens=60.0, ttft_ms=20.0, e2e_s=2.0, predicted_ttft_ms=18.0, policy="p"),
        # A stream that broke late: it has all that a good one has, and counts in `n`, `errors` and the slip alone.
        record(
            error="disconnected: late",
            replica="y",
            sent_s=3.25,
            cached_tokens=100,
            estimated_cached_tokens=100.0,
            ttft_ms=9000.0,
            e2e_s=90.0,
            predicted_ttft_ms=1.0,
            gaps_s=(5.0,),
            policy="q",
        ),
    ):
        tally.add(one)
    row = tally.row(ReplayOptions(trace=Path("folder/t.jsonl"), time_scale=2.0))
    assert (row.trace, row.time_scale, row.policy, row.source) == ("t.jsonl", 2.0, "p", "live")
    assert (row.n, row.errors, dict(row.failures)) == (4, 1, {"connection broken": 1})
    # Of 10, 20 and 30 ms and of 1, 2 and 3 s; quantiles lie between neighbours, p95 at nine tenths of the last step.
    assert astuple(row.ttft_ms) == pytest.approx((20.0, 20.0, 29.0, 29.8))
    assert astuple(row.e2e_s) == pytest.approx((2.0, 2.0, 2.9, 2.98))
    assert row.itl_ms.mean == pytest.approx(20.0)
    assert astuple(row.itl_ms)[1:] == pytest.approx((20.0, 30.0, 30.0), rel=0.01)
    assert (row.cache_hit, row.cache_hit_estimated) == (300 / 400, 100 / 200)
    assert row.share == {"x": 2 / 3, "y": 1 / 3}
    # Predictions are off by 4 and 2 ms.
    assert astuple(row.prediction_error_ms)[:3] == pytest.approx((3.0, 3.0, 3.9))
    # Three were sent a quarter of a second late and the failed one 2.25 s: p95 is 0.85 of the way between.
    assert row.slip_ms_p95 == pytest.approx(1950.0)
    assert tally.ttft_s_p95() == pytest.approx(0.030, rel=0.01)


def test_the_policy_of_a_row_is_the_given_one_else_the_most_common() -> None:
    tally = Tally()
    for policy in ("a", "b", "b"):
        tally.add(record(policy=policy))
    assert tally.row(ReplayOptions(trace=Path("t"))).policy == "b"
    assert tally.row(ReplayOptions(trace=Path("t"), policy="c")).policy == "c"


def test_slip_is_never_negative() -> None:
    assert record(sent_s=0.5).slip_s == 0.0
    assert record().slip_s == 0.25


# run
@pytest.mark.parametrize("terminal", [True, False])
async def test_progress_ends_with_what_was_done(terminal: bool) -> None:
    out, tally = io.StringIO(), Tally()
    progress = ReplayProgress(tally, 2, "gorgo", Console(file=out, force_terminal=terminal, width=160))
    async with progress.displayed():
        await asyncio.sleep(0)
        tally.add(ReplayRecord(id="r", scheduled_s=0, sent_s=0, input_tokens=1, ttft_ms=100.0, e2e_s=1.0))
        tally.add(ReplayRecord(id="r", scheduled_s=0, sent_s=0, input_tokens=1, error="timeout: x"))
    said = out.getvalue()
    assert "gorgo" in said
    assert "2/2" in said
    assert "0 in flight, 1 errors, TTFT p95 100 ms" in said


async def test_without_a_first_token_there_is_no_p95() -> None:
    assert ReplayProgress(Tally(), 2, "x").status() == "0 in flight, 0 errors, TTFT p95 -"


def read(*chunks: tuple[float, bytes]) -> StreamReader:
    reader = StreamReader()
    for now, chunk in chunks:
        reader.feed(chunk, now=now)
    return reader


def test_the_first_token_is_content_not_a_role_and_gaps_follow_it() -> None:
    end = usage(10, 4, 3) + DONE
    reader = read((1.0, ROLE), (2.0, token()), (2.5, token()), (2.75, token()), (9.0, end))
    assert reader.first_content_s == 2.0
    assert reader.gaps_s == [0.5, 0.25]
    assert reader.error() is None
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.cached_tokens, reader.usage.output_tokens) == (10, 4, 3)


@pytest.mark.parametrize("spaced", [False, True], ids=["compact", "spaced"])
def test_usage_and_the_end_are_no_token_gaps(spaced: bool) -> None:
    """Tokens at 2, 2.5 and 4 s make two gaps; usage at 7 s and the end at 9 s carry no token."""
    last = usage(10, 4, 3)
    if spaced:
        last = last.replace(b'":', b'": ')
    no_usage_yet = event({"choices": [{"index": 0, "delta": {"content": "abcd"}}], "usage": None})
    reader = read((2.0, token()), (2.5, no_usage_yet), (4.0, token()), (7.0, last), (9.0, DONE))
    assert reader.gaps_s == [0.5, 1.5]
    assert reader.usage is not None
    assert reader.usage.output_tokens == 3


def test_an_event_split_over_two_chunks_counts_when_it_is_whole() -> None:
    whole = token()
    assert read((1.0, whole[:9]), (2.0, whole[9:])).first_content_s == 2.0


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (ROLE + DONE, "no content"),
        (token(), "truncated"),
        (token() + event({"error": {"message": "x", "code": 502}}) + DONE, "stream error"),
        (token() + b'event: error\ndata: {"message":"x"}\n\n', "stream error"),
        (event({"error": {"message": "x", "code": 503}}), "stream error 503"),
        (b"", "no content"),
    ],
)
def test_a_stream_that_is_no_whole_answer_says_why(stream: bytes, said: str) -> None:
    error = read((1.0, stream)).error()
    assert error is not None
    assert error.startswith(said)


STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


@pytest.mark.parametrize("end", [STOP, usage(10, 4, 3), STOP + usage(10, 4, 3), DONE, b"data:[DONE]\n\n"])
def test_a_stream_is_whole_by_any_end_that_the_proxy_takes(end: bytes) -> None:
    for stream in (token() + token() + end, (token() + token() + end).replace(b"\n", b"\r\n")):
        assert read((1.0, stream)).error() is None
    assert read((1.0, token() + end), (2.0, b": ping\n\n" * 600)).error() is None


def test_a_token_with_a_running_usage_is_a_token() -> None:
    counted = {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": {"prompt_tokens": 9}}
    reader = read((1.0, event(counted)), (1.5, event(counted)), (1.75, event(counted)), (3.0, STOP), (4.0, DONE))
    assert reader.gaps_s == [0.5, 0.25]


def test_text_that_looks_like_an_end_or_a_usage_is_a_token() -> None:
    reader = read((1.0, token()), (1.5, token("[DONE]")), (1.75, token('"usage": {')), (2.0, DONE))
    assert reader.gaps_s == [0.5, 0.25]


@pytest.mark.parametrize(
    "error",
    [
        {"object": "error", "message": "x", "code": 500},
        {"message": "x", "error": {"code": 500}},
        {"error": {"message": "x", "code": 400}},
        {"type": "error", "error": {"type": "overloaded_error"}},
    ],
)
def test_an_error_event_of_any_form_is_an_error(error: object) -> None:
    assert str(read((1.0, token() + event(error) + DONE)).error()).startswith("stream error")


def test_text_that_looks_like_an_error_event_is_text() -> None:
    assert read((1.0, token('\ndata: {"error": 1}\nevent: error') + DONE)).error() is None


ON_BOTH_LOOPS = True


@asynccontextmanager
async def client(
    speak: Speak, *, timeout: httpx.Timeout | None = None, keep_alive_s: float = 4.0
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    async with listening(speak) as (url, found):
        transport = PoolTransport(keep_alive_s=keep_alive_s)
        async with httpx.AsyncClient(transport=transport, base_url=url, timeout=timeout) as http:
            yield http, found


def answering(response: bytes, received: list[bytes] | None = None) -> Speak:
    """An engine with the same response to each request, whose heads it appends to `received`."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if received is not None:
                received.append(head)
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length: "):
                    await reader.readexactly(int(line[16:]))
            writer.write(response)

    return speak


async def test_requests_of_httpx_share_a_connection() -> None:
    received: list[bytes] = []
    async with client(answering(OK, received)) as (http, found):
        for _ in range(2):
            response = await http.post("/v1?a=b", json={"a": 1}, headers={"x-y": "z"})
            assert (response.status_code, response.text, response.http_version) == (200, "ok", "HTTP/1.1")
        assert found.connections == 1
    assert received[0].startswith(b"POST /v1?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nx-y: z\r\n" in received[0]


async def test_a_body_that_is_generated_is_sent_with_its_length() -> None:
    received: list[bytes] = []

    async def parts() -> AsyncIterator[bytes]:
        yield b"a" * 1000
        yield b"b" * 1000

    async with client(answering(OK, received)) as (http, _):
        assert (await http.post("/", content=parts())).text == "ok"
    assert b"content-length: 2000\r\n" in received[0].lower()
    assert b"transfer-encoding" not in received[0].lower()


async def test_a_generated_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "MAX_BODY_BYTES", 1500)

    async def parts() -> AsyncIterator[bytes]:
        yield b"a" * 1000
        yield b"b" * 1000

    async with client(answering(OK)) as (http, found):
        with pytest.raises(httpx.LocalProtocolError, match="more than 1500 bytes"):
            await http.post("/", content=parts())
        assert found.connections == 0


async def test_a_response_to_head_has_no_body_and_the_next_request_a_new_connection() -> None:
    async with client(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")) as (http, found):
        response = await http.head("/")
        assert (response.status_code, response.content, response.headers["content-length"]) == (200, b"", "2")
        await until(lambda: found.open == 0)
        assert (await http.head("/")).status_code == 200
        assert found.connections == 2


@pytest.mark.parametrize("status", [b"204 None", b"304 Same"])
async def test_responses_without_a_body_leave_their_connection_usable(status: bytes) -> None:
    async with client(answering(b"HTTP/1.1 " + status + b"\r\n\r\n")) as (http, found):
        for _ in range(2):
            assert (await http.get("/")).content == b""
        assert found.connections == 1


async def test_a_body_may_end_with_the_connection() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        await writer.drain()
        writer.write_eof()
        await reader.read()

    async with client(speak) as (http, _):
        assert (await http.get("/")).text == "until the end"


async def test_a_header_that_would_be_two_is_refused() -> None:
    async with client(answering(OK)) as (http, found):
        with pytest.raises(httpx.LocalProtocolError, match="control character"):
            await http.get("/", headers=[(b"a", b"b\r\nc: d")])
        assert found.connections == 0


async def test_no_head_within_the_read_timeout() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with client(speak, timeout=httpx.Timeout(0.5)) as (http, found):
        with pytest.raises(httpx.ReadTimeout):
            await http.get("/")
        await until(lambda: found.open == 0)


async def test_no_bytes_of_a_body_within_the_read_timeout() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        await reader.read()

    async with client(speak, timeout=httpx.Timeout(0.5)) as (http, found):
        with pytest.raises(httpx.ReadTimeout, match="no bytes within"):
            await http.get("/")
        await until(lambda: found.open == 0)


async def test_a_port_without_a_listener_is_a_connect_error() -> None:
    async with client(answering(OK)) as (_, found):
        pass
    async with httpx.AsyncClient(transport=PoolTransport()) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("http://127.0.0.1:1/")
        with pytest.raises(httpx.UnsupportedProtocol):
            await http.get("ftp://127.0.0.1/")
    assert found.connections == 0


async def test_an_idle_connection_expires_and_is_closed() -> None:
    async with client(answering(OK), keep_alive_s=0.05) as (http, found):
        assert (await http.get("/")).text == "ok"
        await until(lambda: found.open == 0)
        assert (await http.get("/")).text == "ok"
        assert found.connections == 2


async def test_streams_left_early_close_their_connections() -> None:
    response = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    async with client(answering(response)) as (http, found):
        async with http.stream("GET", "/") as got:
            assert [chunk async for chunk in _first(got)] == [b"a"]
        await until(lambda: found.open == 0)


async def _first(response: httpx.Response) -> AsyncIterator[bytes]:
    async for chunk in response.aiter_raw():
        yield chunk
        return


@needs_openssl
async def test_tls_needs_an_authority_and_may_need_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with tls_engine(authority.pair("engine"), authority.ca) as url:
        context = authority.trusting()
        context.load_cert_chain(*authority.pair("client"))
        async with httpx.AsyncClient(transport=PoolTransport(tls=context)) as http:
            assert (await http.get(url)).json() == {"safe": True}
            assert (await http.post(url, content=bytes(1 << 20))).json() == {"safe": True}
        async with httpx.AsyncClient(transport=PoolTransport(tls=authority.trusting())) as http:
            with pytest.raises((httpx.ConnectError, httpx.ReadError)):
                await http.get(url)
        async with httpx.AsyncClient(transport=PoolTransport()) as http:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await http.get(url)


@needs_openssl
async def test_a_large_response_over_tls_waits_for_a_slow_reader(tmp_path: Path) -> None:
    size = 4 << 20
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.pair("engine"))

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for start in range(0, size, 1 << 16):
            writer.write(bytes([start >> 16]) * (1 << 16))
            await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0, ssl=context)
    async with server, httpx.AsyncClient(transport=PoolTransport(tls=authority.trusting())) as http:
        port = server.sockets[0].getsockname()[1]
        body = bytearray()
        async with http.stream("GET", f"https://127.0.0.1:{port}/") as response:
            async for chunk in response.aiter_raw():
                body += chunk
                await asyncio.sleep(0)
    assert len(body) == size
    assert all(body[start] == start >> 16 for start in range(0, size, 1 << 16))
