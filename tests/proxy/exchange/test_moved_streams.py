"""Over sockets: the replica of a stream and the one that is asked for the rest of its answer, both open at once."""

from __future__ import annotations

import asyncio
import json

import pytest

from gorgo.proxy.exchange import response
from tests.proxy.conftest import Running, Start
from tests.proxy.fakes import DONE, ROLE, chat, delta, event, hang

STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
BEGUN = (ROLE, delta("a"))
REST = (delta("b"), STOP, DONE)


async def read(fleet: Running, begun: asyncio.Event) -> bytes:
    got = b""
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        async for chunk in response.aiter_bytes():
            got += chunk
            if delta("a") in got:
                begun.set()
    return got


async def both_open(start: Start, why: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Running, asyncio.Task[bytes]]:
    """Return a fleet whose first replica is silent behind `a`, and whose second one has been asked for the rest."""
    if why == "stalled":
        monkeypatch.setattr(response, "STALL_S", 0.05)
    other = (ROLE, delta("B"), STOP, DONE)
    fleet = await start.fleet([hang(*BEGUN, rest=REST)], [hang(rest=other)])
    begun = asyncio.Event()
    reading = asyncio.create_task(read(fleet, begun))
    await asyncio.wait_for(begun.wait(), 20)
    if why == "moved":
        (await fleet.admin.post("/admin/replicas/r0/drain", json={"move": True})).raise_for_status()
    await asyncio.wait_for(fleet.replicas[1].arrived.wait(), 20)
    assert json.loads(fleet.replicas[1].seen[0].body)["messages"][-1] == {"role": "assistant", "content": "a"}
    assert not fleet.replicas[0].dropped.is_set()
    return fleet, reading


@pytest.mark.parametrize("why", ["moved", "stalled"])
async def test_the_old_stream_is_closed_once_the_rest_has_begun(
    start: Start, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, reading = await both_open(start, why, monkeypatch)
    fleet.replicas[1].release.set()
    got = await asyncio.wait_for(reading, 20)
    await asyncio.wait_for(fleet.replicas[0].dropped.wait(), 20)
    assert got.startswith(b"".join(BEGUN))
    assert got.count(b'"B"') == got.count(b"[DONE]") == got.count(b'"stop"') == 1
    assert b'"b"' not in got
    await fleet.idle()
    (sample,) = fleet.state.routing.router.samples
    assert (sample.replica, sample.continued, sample.retries) == ("r1", 1, 0)


@pytest.mark.parametrize("why", ["moved", "stalled"])
async def test_a_stream_that_goes_on_first_keeps_its_answer_and_the_other_connection_is_closed(
    start: Start, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, reading = await both_open(start, why, monkeypatch)
    fleet.replicas[0].release.set()
    got = await asyncio.wait_for(reading, 20)
    await asyncio.wait_for(fleet.replicas[1].dropped.wait(), 20)
    assert got == b"".join((*BEGUN, *REST))
    await fleet.idle()
    (sample,) = fleet.state.routing.router.samples
    assert (sample.replica, sample.continued, sample.retries, sample.status) == ("r0", 0, 0, 200)
    views = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert [(view.failures, view.in_flight_requests) for view in views] == [(0, 0), (0, 0)]
