"""One request from its first byte to its last, in virtual time: what its client gets, when, and what is said of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, OverloadConfig, ProxyConfig, RegionConfig
from gorgo.live.http.errors import Message
from gorgo.live.upstream.client import POOL_EXHAUSTED, UpstreamError
from gorgo.proxy.server import InferenceEndpoint
from tests.proxy.fakes import DONE, ROLE, USAGE, chat, delta
from tests.proxy.virtual import CHAT, JSON, Script, Step, VirtualProxy, in_virtual_time

STREAM = chat(stream=True)
#: Content half a second after its headers, two more tokens, usage, the end.
SPOKEN = Script([ROLE, 0.3, delta("a"), 0.1, delta("b"), 0.2, delta("c"), USAGE, 0.1, DONE], head_s=0.2)
QUICK = Script([delta("quick"), DONE])
DEADLINES: dict[str, float] = {
    "first_token_timeout_s": 20.0,
    "response_timeout_s": 30.0,
    "stream_idle_timeout_s": 40.0,
    "request_timeout_s": 100.0,
}


def config(policy: str = "round-robin", overload: OverloadConfig | None = None, **limits: Any) -> Config:
    """Two replicas in two regions."""
    url = "http://127.0.0.1:1"
    rows = (
        ReplicaConfig(name="r0", region="here", url=url, engine="sglang"),
        ReplicaConfig(name="r1", region="there", url=url, engine="sglang"),
    )
    return Config(
        proxy=ProxyConfig(region="here", policy=policy),
        regions=(RegionConfig(name="here"), RegionConfig(name="there")),
        replicas=rows,
        limits=LimitsConfig(**{**DEADLINES, **limits}),
        overload=overload or OverloadConfig(),
    )


def virtually(
    test: Callable[[VirtualProxy], Awaitable[None]], *scripts: list[Script], found: Config | None = None, **options: Any
) -> None:
    names = {f"r{number}": script for number, script in enumerate(scripts)}
    found = found or config()
    rows = tuple(row for row in found.replicas if row.name in names)
    in_virtual_time(test, replace(found, replicas=rows), names, **options)


def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Fields of the one log line about a request, but for what changes with each."""
    (found,) = [record for record in caplog.records if record.getMessage() == "request"]
    fields: dict[str, Any] = dict(found.fields)  # type: ignore[attr-defined]
    del fields["request_id"]
    return fields


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")


# -- what is said of a request


def test_times_of_a_stream_count_from_the_first_byte_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def test(proxy: VirtualProxy) -> None:
        await asyncio.sleep(1000.0)
        answered = await proxy.ask(STREAM[:10], 0.5, STREAM[10:])
        assert answered.body == ROLE + delta("a") + delta("b") + delta("c") + USAGE + DONE
        # Nothing before the first content: body 0.5 s, headers 0.2 s, content 0.3 s.
        assert [round(at - 1000.0, 6) for at, _ in answered.parts] == [1.0, 1.1, 1.3, 1.3, 1.4, 1.4]
        assert proxy.total("gorgo_body_read_seconds_sum") == pytest.approx(0.5)
        there = {"replica": "r0", "region": "here"}
        assert proxy.total("gorgo_ttft_seconds_sum", **there) == pytest.approx(1.0)
        assert proxy.total("gorgo_e2e_seconds_sum", **there) == pytest.approx(1.4)
        sample = proxy.state.routing.router.samples.after(0, 1)["samples"][0]
        assert (sample["ttft_ms"], sample["e2e_s"]) == (pytest.approx(1000.0), pytest.approx(1.4))
        # Gaps of 100, 200 and 0 ms; the end is none.
        assert sample["itl_ms_p95"] == pytest.approx(200.0)

    virtually(test, [SPOKEN])
    assert line(caplog) == {
        "route": "/v1/chat/completions",
        "client": None,
        "model": "m",
        "replica": "r0",
        "status": 200,
        "code": None,
        "ttft_ms": 1000.0,
        "e2e_s": 1.4,
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 2,
        "retries": 0,
        "error": None,
    }


def test_request_that_is_tried_again_is_that_of_the_second_replica(caplog: pytest.LogCaptureFixture) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert (answered.status, answered.headers["x-gorgo-replica"]) == (200, "r1")
        assert answered.headers["x-gorgo-region"] == "there"
        assert proxy.total("gorgo_retries_total", reason="failed_before_content") == 1.0
        assert proxy.total("gorgo_ttft_seconds_sum", replica="r1", region="there") == pytest.approx(1.5)

    virtually(test, [Script(status=500, head_s=1.0)], [SPOKEN])
    found = line(caplog)
    assert {name: found[name] for name in ("replica", "status", "ttft_ms", "retries", "error")} == {
        "replica": "r1",
        "status": 200,
        "ttft_ms": 1500.0,
        "retries": 1,
        "error": None,
    }


@pytest.mark.parametrize("extends", [False, True])
def test_client_that_leaves_is_a_499_of_its_own_making(extends: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def test(proxy: VirtualProxy) -> None:
        await proxy.ask(STREAM, leaves_s=0.55, extends=extends)
        assert proxy.now_s == pytest.approx(0.55)
        assert proxy.total("gorgo_client_aborts_total") == 1.0
        assert proxy.total("gorgo_requests_total", route="/v1/chat/completions", policy="round-robin", status="499")
        (view, _) = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert (view.failures, view.failures_in_a_row) == (0, 0)

    virtually(test, [SPOKEN], [SPOKEN])
    found = line(caplog)
    assert (found["status"], found["replica"], found["ttft_ms"], found["e2e_s"]) == (499, "r0", 500.0, 0.55)


def test_wait_at_the_proxy_is_in_the_line_of_who_waited(caplog: pytest.LogCaptureFixture) -> None:
    async def test(proxy: VirtualProxy) -> None:
        first = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(0.6)
        caplog.clear()
        await proxy.ask(STREAM)
        await first
        assert proxy.total("gorgo_queue_seconds_sum") == pytest.approx(0.6)
        assert proxy.total("gorgo_queue_seconds_count") == 1.0

    overload = OverloadConfig(max_concurrency_per_replica=1, hedge_budget_ratio=0.0)
    virtually(test, [Script([delta("a"), 1.2, DONE]), QUICK], found=config("gorgo-ms", overload))
    first, second = (record.fields for record in caplog.records if record.getMessage() == "request")  # type: ignore[attr-defined]
    assert "queued_ms" not in first
    assert (second["queued_ms"], second["ttft_ms"], "hedged" in second) == (600.0, 600.0, False)


def test_second_attempt_of_a_late_request_is_no_retry(caplog: pytest.LogCaptureFixture) -> None:
    async def test(proxy: VirtualProxy) -> None:
        for _ in range(4):  # of which one may be hedged
            await proxy.ask(STREAM)
        proxy.replicas["r0"].scripts[:] = proxy.replicas["r1"].scripts[:] = [Script([60.0]), QUICK]
        first, second = (proxy.replicas[name] for name in ("r0", "r1"))
        before = len(first.received), len(second.received)
        caplog.clear()
        scripts = [Script([60.0])], [QUICK]
        first.scripts, second.scripts = (list(found) for found in scripts)
        proxy.state.routing.router.replicas.drain("r1", now=proxy.now_s)
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(0.1)
        proxy.state.routing.router.replicas.drain("r1", False, now=proxy.now_s)
        answered = await asking
        assert b"quick" in answered.body
        assert (len(first.received), len(second.received)) == (before[0] + 1, before[1] + 1)
        assert proxy.total("gorgo_hedges_total", replica="r1", region="there") == 1.0
        assert first.received[-1].closed_s == pytest.approx(answered.parts[0][0])

    overload = OverloadConfig(queue_enabled=False, hedge_budget_ratio=0.5)
    virtually(test, [QUICK], [QUICK], found=config("gorgo-ms", overload))
    found = line(caplog)
    assert (found["hedged"], found["retries"], found["replica"], found["error"]) == (True, 0, "r1", None)


# -- deadlines


@pytest.mark.parametrize(
    ("body", "script", "at_s", "code"),
    [
        (STREAM, Script([ROLE, 1000.0]), 20.0, "upstream_timeout"),
        (STREAM, Script(head_s=1000.0), 20.0, "upstream_timeout"),
        (STREAM, Script([b": still here\n\n", 19.0, b": still here\n\n", 1000.0]), 20.0, "upstream_timeout"),
        (chat(), Script([b"{", 1000.0], headers=JSON), 30.0, "upstream_timeout"),
        (chat(), Script(head_s=1000.0), 30.0, "upstream_timeout"),
    ],
)
def test_attempt_without_an_answer_ends_at_its_deadline(body: bytes, script: Script, at_s: float, code: str) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(body)
        assert (answered.status, answered.code, answered.at_s) == (504, code, at_s)
        (view,) = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert (view.failures, view.failures_in_a_row) == (1, 1)

    virtually(test, [script])


def test_silence_between_two_chunks_ends_the_stream_with_an_error_event() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert b'"code": "upstream_failed"' in answered.body
        assert answered.complete
        # Content after 1 s, another chunk 39 s later; comments do not count as chunks.
        assert answered.at_s == 1.0 + 39.0 + 40.0

    script = Script([1.0, delta("a"), 39.0, delta("b"), 20.0, b": still here\n\n", 1000.0])
    virtually(test, [script])


def test_request_ends_after_so_long_in_all_whatever_it_is_at() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM[:5], 7.0, STREAM[5:])
        assert answered.at_s == 100.0
        assert b'"code": "total_timeout"' in answered.body
        (view,) = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert (view.failures, view.failures_in_a_row) == (0, 0)

    more: list[Step] = [30.0, delta("b")] * 10
    virtually(test, [Script([delta("a"), *more])])


def test_whole_time_counts_over_attempts() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert (answered.status, answered.code, answered.at_s) == (504, "total_timeout", 30.0)
        assert [len(replica.received) for replica in proxy.replicas.values()] == [1, 1]

    limits: dict[str, Any] = {"request_timeout_s": 30.0, "response_timeout_s": 30.0, "stream_idle_timeout_s": 30.0}
    virtually(test, [Script([1000.0])], [Script([1000.0])], found=config(**limits))


def test_who_waits_too_long_at_the_proxy_is_told_so() -> None:
    async def test(proxy: VirtualProxy) -> None:
        proxy.state.routing.router.replicas.drain("r0", now=proxy.now_s)
        answered = await proxy.ask(STREAM[:5], 7.0, STREAM[5:])
        assert (answered.status, answered.code, answered.at_s) == (504, "total_timeout", 100.0)
        assert proxy.replicas["r0"].received == []

    virtually(test, [QUICK], found=config(overload=OverloadConfig(no_replica_wait_s=1000.0)))


def test_client_that_leaves_in_the_step_of_its_dispatch_leaves_no_load_behind() -> None:
    async def test(proxy: VirtualProxy) -> None:
        proxy.state.routing.router.replicas.drain("r0", now=proxy.now_s)
        messages: asyncio.Queue[Message] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": STREAM, "more_body": False})
        parts: list[Message] = []

        async def send(message: Message) -> None:
            parts.append(message)

        serving = asyncio.create_task(
            InferenceEndpoint(proxy.state, CHAT)({"method": "POST", "headers": []}, messages.get, send)
        )
        await asyncio.sleep(1.0)
        assert proxy.state.routing.router.queued == 1
        messages.put_nowait({"type": "http.disconnect"})
        proxy.state.routing.router.replicas.drain("r0", False, now=proxy.now_s)
        proxy.state.routing.gateway.run_timer()
        assert (proxy.state.routing.router.queued, proxy.state.routing.router.in_flight) == (0, 1)
        await serving
        assert (proxy.state.routing.router.in_flight, proxy.state.replicas.targets["r0"].active) == (0, 0)
        assert (parts, proxy.replicas["r0"].received) == ([], [])

    virtually(test, [QUICK], found=config(overload=OverloadConfig(no_replica_wait_s=1000.0)))


# -- a client that does not read


def test_client_that_does_not_read_is_given_up_and_no_replica_is_blamed(caplog: pytest.LogCaptureFixture) -> None:
    async def never(_: bytes) -> None:
        await asyncio.sleep(1000.0)

    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM, reads=never)
        assert not answered.complete
        (view,) = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert view.failures == 0
        assert proxy.replicas["r0"].received[0].closed_s == pytest.approx(20.0)

    virtually(test, [Script([delta("a"), DONE])])
    found = line(caplog)
    assert (found["status"], found["error"]) == (499, "client_stalled")


# -- failures


@pytest.mark.parametrize(
    ("script", "status", "code", "broke"),
    [
        (Script(refuses="connect_failed"), 503, "no_replica", True),
        (Script(refuses="connect_timeout"), 504, "upstream_timeout", False),
        (Script(refuses="disconnected"), 502, "upstream_failed", True),
        (Script(refuses=POOL_EXHAUSTED), 503, "replicas_busy", False),
        (Script(status=503), 503, "replicas_busy", False),
        (Script(status=429), 429, "replicas_busy", False),
        (Script(status=500), 502, "upstream_failed", False),
        (Script(status=302), 502, "upstream_failed", False),
        (Script([ROLE, UpstreamError("disconnected")]), 502, "upstream_failed", True),
        (Script([ROLE]), 502, "upstream_failed", False),
    ],
)
def test_failure_before_any_content_is_told_by_a_status(script: Script, status: int, code: str, broke: bool) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert (answered.status, answered.code) == (status, code)
        assert proxy.state.replicas.targets["r0"].connection_lost.is_set() is broke

    virtually(test, [script])


@pytest.mark.parametrize(
    ("script", "body"),
    [
        (Script(status=400, headers=JSON, steps=[b'{"error": "too long"}']), b'{"error": "too long"}'),
        (Script(status=422, headers=JSON, steps=[b"{}"]), b"{}"),
    ],
)
def test_refusal_of_an_engine_is_the_answer(script: Script, body: bytes) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert (answered.status, answered.body, answered.complete) == (script.status, body, True)
        (view, _) = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert (view.failures, view.failures_in_a_row) == (0, 0)
        assert proxy.replicas["r1"].received == []

    virtually(test, [script], [QUICK])


def test_stream_that_breaks_off_after_content_ends_with_an_error_event_and_is_not_tried_again() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM)
        assert answered.body.startswith(delta("a") + b'\n\ndata: {"error": ')
        assert (answered.status, answered.complete) == (200, True)
        (view, _) = proxy.state.routing.router.view.snapshots(now=proxy.now_s)
        assert (view.failures, view.failures_in_a_row) == (1, 0)
        assert proxy.replicas["r1"].received == []

    broken = Script([delta("a"), 1.0, UpstreamError("disconnected")])
    virtually(test, [broken], [QUICK], found=config(continuations=0))


def test_whole_answer_that_breaks_off_late_is_cut() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(chat())
        assert (answered.status, answered.body, answered.complete) == (200, b"{" + b"x" * 1_100_000, False)

    virtually(test, [Script([b"{" + b"x" * 1_100_000, 1.0, UpstreamError("disconnected")], headers=JSON)], [QUICK])


# -- stopping


@pytest.mark.parametrize(
    ("script", "status", "end"),
    [(Script([1000.0]), 503, b'"code": "stopping"'), (Script([delta("a"), 1000.0]), 200, b'"code": "stopping"')],
)
def test_request_that_is_cut_at_the_end_of_the_grace_is_told_why(
    caplog: pytest.LogCaptureFixture, script: Script, status: int, end: bytes
) -> None:
    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM))
        await asyncio.sleep(1.0)
        proxy.state.stopping = True
        for task in proxy.state.exchanges:
            task.cancel()
        answered = await asking
        assert (answered.status, answered.at_s, answered.complete) == (status, 1.0, True)
        assert (line(caplog)["status"], line(caplog)["code"]) == (503, "stopping")
        assert end in answered.body
        assert answered.headers.get("retry-after") == ("1" if status == 503 else None)
        late = await proxy.ask(STREAM)
        assert (late.status, late.code, late.headers["retry-after"]) == (503, "stopping", "1")

    virtually(test, [script])


def test_last_words_to_a_client_that_does_not_read_are_given_up_after_a_while() -> None:
    async def slow(part: bytes) -> None:
        if b"stopping" in part:
            await asyncio.sleep(1000.0)

    async def test(proxy: VirtualProxy) -> None:
        asking = asyncio.create_task(proxy.ask(STREAM, reads=slow))
        await asyncio.sleep(1.0)
        proxy.state.stopping = True
        for task in proxy.state.exchanges:
            task.cancel()
        answered = await asking
        assert (answered.at_s, answered.complete) == (6.0, False)

    virtually(test, [Script([delta("a"), 1000.0])])


# -- what is refused before a replica is asked


def test_one_request_too_many_is_told_to_come_back() -> None:
    async def test(proxy: VirtualProxy) -> None:
        open_now = [asyncio.create_task(proxy.ask(STREAM)) for _ in range(2)]
        await asyncio.sleep(0.1)
        late = await proxy.ask(STREAM)
        assert (late.status, late.code, late.headers["retry-after"]) == (429, "too_many_in_flight", "1")
        assert [answered.status for answered in await asyncio.gather(*open_now)] == [200, 200]
        assert (await proxy.ask(STREAM)).status == 200

    virtually(test, [SPOKEN], found=config(max_in_flight=2))


@pytest.mark.parametrize(
    ("pieces", "at_s", "status"),
    [
        ((STREAM[:5], 14.9, STREAM[5:10], 14.9, STREAM[10:]), 29.8, 200),
        ((STREAM[:5], 15.1, STREAM[5:]), 15.0, 408),
        ((*[part for byte in STREAM[:6] for part in (bytes((byte,)), 11.0)], STREAM[6:]), 60.0, 408),
        ((15.1, STREAM), 15.0, 408),
    ],
)
def test_body_has_a_time_for_each_piece_and_one_for_all(pieces: tuple[Step, ...], at_s: float, status: int) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(*pieces)
        assert (answered.status, answered.at_s) == (status, at_s)

    virtually(test, [QUICK])


@pytest.mark.parametrize(
    ("swallowed", "at_s"),
    [
        ((b"x" * 10,), 0.0),
        ((b"x" * 9,), 0.5),  # as much again as it may be would be ten
        ((b"x" * 4, 0.4, b"x" * 4), 0.9),
        ((b"x" * 4, 0.6, b"x" * 6), 0.5),
    ],
)
def test_body_that_is_too_large_is_swallowed_for_a_while_before_it_is_refused(
    swallowed: tuple[Step, ...], at_s: float
) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(b"x" * 11, *swallowed, 1000.0, b"x")
        assert (answered.status, answered.code, answered.at_s) == (413, "request_too_large", at_s)

    virtually(test, [QUICK], found=config(max_body_bytes=10))


@pytest.mark.parametrize("extends", [False, True])
def test_a_body_counts_twice_until_the_response_begins(extends: bool) -> None:
    async def test(proxy: VirtualProxy) -> None:
        used: list[int] = []

        async def reads(_part: bytes) -> None:
            used.append(proxy.state.buffers.used_bytes)

        asking = asyncio.create_task(proxy.ask(STREAM, extends=extends, reads=reads))
        await asyncio.sleep(0.15)
        assert proxy.state.buffers.used_bytes == 2 * len(STREAM)
        answered = await asking
        assert (answered.status, [request.body for request in proxy.replicas["r0"].received]) == (200, [STREAM])
        assert used[-1] < 2 * len(STREAM), "only the start of the answer"
        assert proxy.state.buffers.used_bytes == 0

    virtually(test, [SPOKEN], found=config(continuations=0))


def test_a_whole_body_that_is_too_large_is_refused_at_once() -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(b"x" * 11, extends=True)
        assert (answered.status, answered.code, answered.at_s) == (413, "request_too_large", 0.0)
        assert proxy.replicas["r0"].received == []

    virtually(test, [QUICK], found=config(max_body_bytes=10))


def test_client_that_leaves_in_its_body_is_sent_nothing_and_no_replica_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(proxy: VirtualProxy) -> None:
        answered = await proxy.ask(STREAM[:5], 5.0, STREAM[5:], leaves_s=1.0)
        assert (answered.status, answered.parts) == (0, [])
        assert proxy.replicas["r0"].received == []

    virtually(test, [QUICK])
    assert (line(caplog)["status"], line(caplog)["replica"]) == (499, None)
