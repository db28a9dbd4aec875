"""The client leaves: upstream is cancelled at once, the load is released, and nobody is blamed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypercorn.events import Closed, Event, Updated

from gorgo.proxy.listener import Connection
from tests.proxy.conftest import Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, ROLE, FakeReplica, Script, answer, chat, delta, event, hang, reset_after
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
    sample = next(iter(fleet.state.router.samples))
    assert (sample.status, sample.ttft_ms) == (499, None)
    view = fleet.state.router.fleet_view(now=fleet.state.clock())[0]
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
    assert next(iter(fleet.state.router.samples)).status == 499


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
    honest = Connection.protocol_send

    async def leaving(self: Connection, event: Event) -> None:
        nonlocal begun
        await honest(self, event)
        if isinstance(event, Updated) and not event.idle:
            begun += 1
            if begun == 2:
                await self.protocol.handle(Closed())

    fleet = await start.fleet([hang()])
    monkeypatch.setattr(Connection, "protocol_send", leaving)
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
    assert next(iter(fleet.state.router.samples)).retries == 1


async def test_client_that_leaves_in_the_middle_of_its_body_reserves_nothing(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, b'{"model":', length=1000)
        await until(lambda: fleet.state.exchanges)
        client.reset()
        await until(lambda: not fleet.state.exchanges)
    await fleet.idle()
    assert fleet.replicas[0].seen == []
    assert len(fleet.state.router.samples) == 0


async def test_client_that_does_not_read_is_cut(start: Start) -> None:
    flood = tuple(delta("x" * 60_000) for _ in range(400))
    fleet = await start.fleet([hang(*flood)], between_chunks_timeout_s=0.3)
    async with connected(fleet.addresses.data) as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await client.post(CHAT, BODY)
        await until(fleet.replicas[0].dropped.is_set)
        await until(lambda: fleet.state.router.in_flight == 0)
        client.reset()
    await fleet.idle()
    assert next(iter(fleet.state.router.samples)).status == 499


async def test_many_clients_that_leave_at_random_moments_leave_nothing_reserved(start: Start) -> None:
    fleet = await start.fleet([hang(ROLE)], [reset_after(ROLE)], [hang(delta("a"))], [answer(503)])

    async def come_and_go(turns: int) -> None:
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, BODY)
            for _ in range(turns):
                await asyncio.sleep(0)
            client.reset()

    await asyncio.gather(*(come_and_go(7 * n) for n in range(60)))
    await until(lambda: fleet.state.router.in_flight == 0)
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
    assert 'gorgo_attempts_total{ending="client_gone",region="here",replica="r0"} 1.0' in text
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


def id_of(replica: FakeReplica, index: int = -1) -> str:
    (given,) = replica.seen[index].header("x-override-rid")
    return given


async def test_engine_is_told_the_id_of_a_request_that_nobody_waits_for(start: Start) -> None:
    fleet = await start.fleet([hang(delta("a"))])
    (replica,) = fleet.replicas
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY, "x-override-rid: mine")
        await client.head()
        client.reset()
        await until(lambda: replica.aborted)
    assert replica.aborted == [id_of(replica)]
    assert re.fullmatch("[0-9a-f]{32}", id_of(replica))
    await fleet.idle()


@pytest.mark.parametrize("limits", [{"first_content_timeout_s": 0.1}, {"total_timeout_s": 0.1}])
async def test_engine_is_told_when_a_deadline_has_passed(start: Start, limits: dict[str, Any]) -> None:
    fleet = await start.fleet([hang()], **limits)
    assert (await fleet.client.post(CHAT, content=BODY)).status_code == 504
    (replica,) = fleet.replicas
    await until(lambda: replica.aborted)
    assert replica.aborted == [id_of(replica)]
    await fleet.idle()


@pytest.mark.parametrize("script", [answer(200), answer(500), reset_after(delta("a"))])
async def test_engine_that_ended_a_request_itself_is_told_nothing(start: Start, script: Script) -> None:
    fleet = await start.fleet([script])
    for _ in range(2):
        await fleet.client.post(CHAT, content=BODY)
    await fleet.idle()
    assert fleet.replicas[0].aborted == []
    assert not fleet.state.aborts


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"rid": "a"}),
        (CHAT, {"n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/generate", {"text": ["a", "b"]}),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}),
        ("/generate", {"text": "a", "sampling_params": [{}]}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_request_that_needs_other_ids_is_given_none(start: Start, route: str, fields: dict[str, Any]) -> None:
    fleet = await start.fleet([hang()])
    (replica,) = fleet.replicas
    async with connected(fleet.addresses.data) as client:
        await client.post(route, chat(**fields), "x-override-rid: mine")
        await replica.arrived.wait()
        client.reset()
        await until(replica.dropped.is_set)
    await fleet.idle()
    assert replica.seen[0].header("x-override-rid") == []
    assert replica.aborted == []


async def test_other_engines_are_told_by_the_closed_connection_alone(start: Start) -> None:
    replica = await start.replica(hang())
    fleet = await start.proxy(with_replica(config_for([replica]), 0, engine="vllm"), [replica])
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, BODY)
        await replica.arrived.wait()
        client.reset()
        await until(replica.dropped.is_set)
    await fleet.idle()
    assert replica.seen[0].header("x-override-rid") == []
    assert replica.aborted == []


async def test_calls_to_engines_are_bounded_and_end_with_the_proxy(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.proxy.aborts.MAX_OPEN", 2)
    fleet = await start.fleet([answer(200)])
    target = fleet.state.targets["r0"]
    for number in range(5):
        fleet.state.aborts.tell(target, str(number))
    assert len(fleet.state.aborts) == 2
    await until(lambda: not fleet.state.aborts)
    fleet.state.aborts.tell(target, "last")
    await fleet.state.aborts.aclose()
    assert fleet.replicas[0].aborted == ["0", "1"]
    await fleet.idle()
    assert target.users == 0


def leave(client: RawClient, polite: bool) -> None:
    if polite:
        client.writer.close()
    else:
        client.reset()
