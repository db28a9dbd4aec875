"""The client leaves: upstream is cancelled at once, the load is released, and nobody is blamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, RegionConfig
from gorgo.live.listener.connection.client_connection import ClientConnection
from gorgo.live.listener.connection.reader import Head
from tests.proxy.conftest import QUIET, Start, until
from tests.proxy.fakes import DONE, ROLE, Script, answer, chat, delta, event, hang, reset_after
from tests.proxy.raw import RawClient, connected

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
