"""The client leaves, or a replica hangs: upstream is let go at once, the load is released, and nobody else is
blamed.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, OverloadConfig, RegionConfig, RegionLimitsConfig
from gorgo.live.listener.connection.client_connection import ClientConnection
from gorgo.live.listener.connection.reader import Head
from tests.proxy.conftest import QUIET, Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, ROLE, Script, answer, chat, delta, event, hang, reset_after, stream
from tests.proxy.followed import follow, regions
from tests.proxy.raw import RawClient, connected, silent_port

# --- The client leaves: upstream is cancelled at once, the load is released, and nobody is blamed.


BODY = chat(stream=True)
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("polite", [True, False])
@pytest.mark.parametrize(
    "script", [pytest.param(hang(), id="before headers"), pytest.param(hang(ROLE), id="before content")]
)
async def test_client_that_leaves_before_the_first_token_cancels_upstream(
    start: Start, script: Script, polite: bool
) -> None:
    fleet = await start.fleet([script])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        await fleet.replicas[0].arrived.wait()
        leave(client, polite)
        await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    sample = next(iter(fleet.state.routing.router.samples))
    assert (sample.status, sample.ttft_ms) == (499, None)
    view = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0]
    assert (view.failures, view.index_blocks) == (0, 0)


@pytest.mark.parametrize("polite", [True, False])
async def test_client_that_leaves_in_the_middle_cancels_upstream(start: Start, polite: bool) -> None:
    fleet = await start.fleet([hang(delta("a"))])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        await client.head()
        leave(client, polite)
        await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).status == 499


@pytest.mark.parametrize("polite", [True, False])
async def test_client_that_leaves_behind_the_end_of_its_answer_has_had_it(start: Start, polite: bool) -> None:
    """As the OpenAI client does at `[DONE]`, which may be before the replica ends the body."""
    fleet = await start.fleet([hang(delta("a"), DONE)])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        await client.reader.readuntil(b"[DONE]")
        leave(client, polite)
        await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).status == 200


@pytest.mark.parametrize("polite", [True, False])
@pytest.mark.parametrize(
    "script", [pytest.param(hang(), id="before content"), pytest.param(hang(delta("a")), id="after")]
)
@pytest.mark.parametrize(
    "early", [b"\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n{}"]
)
async def test_client_that_leaves_is_noticed_behind_whatever_it_sent_early(
    start: Start, early: bytes, script: Script, polite: bool
) -> None:
    fleet = await start.fleet([script])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        client.writer.write(early)
        await fleet.replicas[0].arrived.wait()
        leave(client, polite)
        await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    assert len(fleet.replicas[0].seen) == 1


async def test_client_that_leaves_as_its_next_request_begins_is_noticed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = 0
    honest = ClientConnection._run

    def leaving(self: ClientConnection, head: Head) -> None:
        nonlocal begun
        honest(self, head)
        begun += 1
        if begun == 2:
            self.eof_received()

    fleet = await start.fleet([hang()])
    monkeypatch.setattr(ClientConnection, "_run", leaving)
    async with connected(fleet.addresses.data) as client:
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
        await client.post(CHAT, BODY)
        await until(lambda: begun == 2)
        await fleet.idle()


async def test_client_that_leaves_during_a_retry_cancels_the_second_replica(start: Start) -> None:
    fleet = await start.fleet([answer(500)], [hang()])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        await fleet.replicas[1].arrived.wait()
        client.reset()
        await until(fleet.replicas[1].dropped.is_set)
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).retries == 1


async def test_client_that_leaves_in_the_middle_of_its_body_reserves_nothing(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, b'{"model":', length=1000)
        await until(lambda: fleet.state.exchanges)
        client.reset()
        await until(lambda: not fleet.state.exchanges)
    await fleet.idle()
    assert fleet.replicas[0].seen == []
    assert len(fleet.state.routing.router.samples) == 0


async def test_client_that_does_not_read_is_cut(start: Start) -> None:
    flood = tuple(delta("x" * 60_000) for _ in range(400))
    fleet = await start.fleet([hang(*flood)], stream_idle_timeout_s=0.3)
    async with connected(fleet.addresses.data) as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.post(CHAT, BODY)
        await until(fleet.replicas[0].dropped.is_set)
        await until(lambda: fleet.state.routing.router.in_flight == 0)
        client.reset()
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).status == 499


async def test_many_clients_that_leave_at_random_moments_leave_nothing_reserved(start: Start) -> None:
    fleet = await start.fleet([hang(ROLE)], [reset_after(ROLE)], [hang(delta("a"))], [answer(503)])

    async def come_and_go(turns: int) -> None:
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, BODY)
            for _ in range(turns):
                await asyncio.sleep(0)
            client.reset()

    await asyncio.gather(*(come_and_go(7 * n) for n in range(60)))
    await until(lambda: fleet.state.routing.router.in_flight == 0)
    await fleet.idle()


async def test_abort_is_counted_and_logged_without_text(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    fleet = await start.fleet([hang()])
    caplog.set_level("INFO", logger="gorgo")
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, chat(stream=True, messages=[{"role": "user", "content": "my secret"}]))
        await fleet.replicas[0].arrived.wait()
        client.reset()
    await fleet.idle()
    text = (await fleet.client.get("/metrics")).text
    assert "gorgo_client_aborts_total 1.0" in text
    assert 'gorgo_attempts_total{region="here",replica="r0",result="client_disconnected"} 1.0' in text
    records = [record for record in caplog.records if record.getMessage() == "request"]
    assert [record.fields["status"] for record in records] == [499]  # type: ignore[attr-defined]
    assert "my secret" not in json.dumps([vars(record) for record in caplog.records], default=str)


async def test_late_error_event_reaches_a_client_that_still_reads(start: Start) -> None:
    fleet = await start.fleet([reset_after(event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}))])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY, "connection: close")
        text = await client.rest()
    assert b"upstream_failed" in text
    assert text.endswith(b"0\r\n\r\n")
    assert DONE not in text


@pytest.mark.parametrize("script", [hang(), hang(ROLE)], ids=["before headers", "before content"])
@pytest.mark.parametrize("limits", [{"first_token_timeout_s": 0.1}, {"request_timeout_s": 0.1}])
async def test_attempt_that_runs_out_of_time_closes_its_connection(
    start: Start, limits: dict[str, Any], script: Script
) -> None:
    fleet = await start.fleet([script], **limits)
    await fleet.client.post(CHAT, content=BODY)
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()


async def test_engine_sees_the_end_of_its_connection_at_once_when_the_client_leaves(start: Start) -> None:
    """Nothing else tells it: the connection must not go back to a pool or wait for a timer."""
    ended = asyncio.Event()

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n" % (len(delta("a")), delta("a")))
            await reader.readexactly(len(BODY))
            assert await reader.read() == b""
            ended.set()
        writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        row = ReplicaConfig(name="raw", region="here", url=url, engine="sglang")
        fleet = await start.proxy(Config(proxy=QUIET, regions=(RegionConfig(name="here"),), replicas=(row,)), [])
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, BODY)
            await client.reader.readuntil(b"data")
            client.reset()
            await asyncio.wait_for(ended.wait(), 3)
        await fleet.idle()


def leave(client: RawClient, polite: bool) -> None:
    if polite:
        client.writer.close()
    else:
        client.reset()


# --- A replica that hangs at each phase of a request: what its client gets, what is learned, and that it is let go.


GOOD = stream(ROLE, delta("good"), DONE)
SHORT_S = 0.15
#: Far beyond what a test takes: a deadline of this length is not the one that ended anything.
LONG_S = 1000.0
LONG: dict[str, Any] = {f"{phase}_timeout_s": LONG_S for phase in ("connect", "first_token", "response", "stream_idle")}


def drip(*chunks: bytes, again: bytes, every_s: float = 0.01) -> Script:
    """Sends `chunks`, then `again` without an end."""

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        while True:
            await response.write(again)
            await asyncio.sleep(every_s)

    return script


def after(wait_s: float, script: Script) -> Script:
    async def late(request: web.Request, body: bytes) -> web.StreamResponse:
        await asyncio.sleep(wait_s)
        return await script(request, body)

    return late


def health(fleet: Running, replica: str = "r0") -> tuple[int, int]:
    """Failures in all, and those in a row that eject."""
    views = {view.name: view for view in fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())}
    return views[replica].failures, views[replica].failures_in_a_row


async def ask(fleet: Running, **fields: Any) -> tuple[int, str | None, bytes]:
    response = await fleet.client.post(CHAT, content=chat(**{"stream": True, **fields}))
    body = response.json() if "json" in response.headers["content-type"] else {}
    return response.status_code, body.get("error", {}).get("code"), response.content


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_replica_that_takes_no_connection_is_passed_over_and_blamed(start: Start, scheme: str) -> None:
    good = await start.replica(GOOD)
    with silent_port(accepts=scheme == "https") as port:
        config = config_for([good, good], **LONG | {"connect_timeout_s": SHORT_S})
        fleet = await start.proxy(with_replica(config, 0, url=f"{scheme}://127.0.0.1:{port}"), [good])
        assert (await ask(fleet))[0] == 200
        fleet.state.routing.router.replicas.drain("r1", now=fleet.state.routing.clock())
        assert (await ask(fleet))[:2] == (504, "upstream_timeout")
        # The first request went past it, because it had not answered a probe.
        assert health(fleet) == (1, 1)
        await fleet.idle()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(hang(), id="before its headers"),
        pytest.param(hang(ROLE), id="after a role"),
        pytest.param(drip(again=b": still here\n\n"), id="with comments"),
    ],
)
async def test_stream_without_content_is_tried_elsewhere_and_its_replica_blamed(start: Start, script: Script) -> None:
    fleet = await start.fleet([script], [GOOD], **LONG | {"first_token_timeout_s": SHORT_S})
    assert (await ask(fleet))[2] == ROLE + delta("good") + DONE
    assert health(fleet) == (1, 1)
    fleet.state.routing.router.replicas.drain("r1", now=fleet.state.routing.clock())
    assert (await ask(fleet))[:2] == (504, "upstream_timeout")
    assert health(fleet) == (2, 2)
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()


async def test_answer_in_one_piece_has_a_deadline_of_its_own(start: Start) -> None:
    whole = after(2 * SHORT_S, answer(200, b'{"choices": []}'))
    fleet = await start.fleet([whole, hang()], **LONG | {"first_token_timeout_s": SHORT_S})
    assert (await ask(fleet, stream=False))[::2] == (200, b'{"choices": []}')
    target = fleet.state.replicas.targets["r0"]
    target.deadlines = replace(target.deadlines, response_s=SHORT_S)
    assert (await ask(fleet, stream=False))[:2] == (504, "upstream_timeout")
    assert health(fleet) == (1, 1)
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()


async def test_silence_after_content_ends_the_stream_and_is_noted_of_its_replica(start: Start) -> None:
    fleet = await start.fleet(
        [hang(delta("a"))], [GOOD], **LONG | {"stream_idle_timeout_s": SHORT_S, "continuations": 0}
    )
    status, _, body = await ask(fleet)
    assert (status, body.startswith(delta("a")), b'"code": "upstream_failed"' in body) == (200, True, True)
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    # It has answered, so it is not on the way to being ejected; what it does before content decides that.
    assert health(fleet) == (1, 0)
    assert fleet.replicas[1].seen == []


async def test_comments_do_not_keep_a_stream_alive_that_has_stopped(start: Start) -> None:
    """As servers and middleboxes send them while the engine behind them hangs."""
    comments = drip(delta("a"), again=b": keep-alive\n\n")
    fleet = await start.fleet([comments], **LONG | {"stream_idle_timeout_s": SHORT_S, "request_timeout_s": 5.0})
    status, _, body = await ask(fleet)
    assert (status, b": keep-alive" in body, b'"code": "upstream_failed"' in body) == (200, True, True)
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()


async def test_stream_that_goes_on_for_too_long_is_ended_and_nobody_is_blamed(start: Start) -> None:
    fleet = await start.fleet([drip(again=delta("a"))], **LONG, request_timeout_s=SHORT_S)
    status, _, body = await ask(fleet)
    assert (status, body.startswith(delta("a")), b'"code": "total_timeout"' in body) == (200, True, True)
    assert DONE not in body
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    assert health(fleet) == (0, 0)
    (sample,) = fleet.state.routing.router.samples
    assert (sample.status, sample.ttft_ms is None) == (504, False)


async def test_body_that_goes_on_for_too_long_is_cut(start: Start) -> None:
    async def endless(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "audio/wav"})
        await response.prepare(request)
        while True:
            await response.write(b" " * 50_000)
            await asyncio.sleep(0.01)

    fleet = await start.fleet([endless], **LONG, request_timeout_s=SHORT_S)
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, chat())
        assert (await client.head()).startswith(b"HTTP/1.1 200")
        assert b"\r\n0\r\n\r\n" not in await client.rest()
    await fleet.idle()
    assert health(fleet) == (0, 0)


async def test_request_whose_time_is_over_is_not_tried_elsewhere(start: Start) -> None:
    fleet = await start.fleet([hang()], [GOOD], **LONG, request_timeout_s=SHORT_S)
    assert (await ask(fleet))[:2] == (504, "total_timeout")
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()
    assert fleet.replicas[1].seen == []
    assert health(fleet) == (0, 0)


async def test_retry_has_what_is_left_of_the_whole_time(start: Start) -> None:
    fleet = await start.fleet([hang()], [hang()], **LONG | {"first_token_timeout_s": SHORT_S}, request_timeout_s=0.2)
    assert (await ask(fleet))[:2] == (504, "total_timeout")
    await fleet.idle()
    assert [len(replica.seen) for replica in fleet.replicas] == [1, 1]
    assert [health(fleet, name) for name in ("r0", "r1")] == [(1, 1), (0, 0)]
    text = (await fleet.client.get("/metrics")).text
    assert 'gorgo_attempts_total{region="here",replica="r1",result="deadline_exceeded"} 1.0' in text


async def test_wait_at_the_proxy_counts(start: Start) -> None:
    replica = await start.replica(hang(ROLE, delta("a"), rest=(DONE,)), GOOD)
    config = config_for([replica], replace(QUIET, policy="gorgo-ms"), **LONG)
    fleet = await start.proxy(replace(config, overload=OverloadConfig(max_concurrency_per_replica=1)), [replica])
    async with fleet.client.stream("POST", CHAT, content=chat(stream=True)) as first:
        fleet.state.limits = replace(config.limits, request_timeout_s=SHORT_S)
        assert (await ask(fleet))[:2] == (504, "total_timeout")
        replica.release.set()
        await first.aread()
    await fleet.idle()
    assert (len(replica.seen), fleet.state.routing.router.queued) == (1, 0)


async def test_each_region_has_the_deadlines_that_it_sets(start: Start) -> None:
    replicas = [await start.replica(hang()), await start.replica(hang())]
    config = replace(
        config_for(replicas),
        regions=(
            RegionConfig(name="here"),
            RegionConfig(name="far", limits=RegionLimitsConfig(first_token_timeout_s=SHORT_S)),
        ),
        limits=LimitsConfig(first_token_timeout_s=LONG_S, shutdown_grace_s=0.0),
    )
    fleet = await start.proxy(with_replica(config, 0, region="far"), replicas)
    asked = asyncio.create_task(ask(fleet))
    # Given up in the region with the short one, and waited for in the other.
    await until(replicas[1].arrived.is_set)
    assert health(fleet) == (1, 0), "whose fault it is depends on the other one"
    assert not asked.done()
    replicas[1].release.set()
    await asked


async def test_reload_changes_the_deadlines_of_attempts_from_then_on(start: Start, tmp_path: Path) -> None:
    replica = await start.replica(hang())
    followed = await follow(start, tmp_path, regions({"a": replica}), [replica])
    running = asyncio.create_task(ask(followed.fleet))
    await until(replica.arrived.is_set)
    await followed.rewrite(regions({"a": replica}, limits={"first_token_timeout_s": SHORT_S}))
    assert (await ask(followed.fleet))[:2] == (504, "upstream_timeout")
    assert not running.done()
    text = regions({"a": replica}).replace(
        b'{"name": "here"}', b'{"name": "here", "limits": {"first_token_timeout_s": 0.05}}'
    )
    await followed.rewrite(text)
    assert followed.state.replicas.targets["a"].deadlines.first_token_s == 0.05
    assert (await ask(followed.fleet))[:2] == (504, "upstream_timeout")
    replica.release.set()
    await running
