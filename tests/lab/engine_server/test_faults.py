from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gorgo.errors import BadRequest
from gorgo.lab.engine_server.faults import EngineFault, EngineFaults, FaultKind, read_fault
from tests.lab.engine_server.client import CHAT, chat, post, stream, until_idle


async def inject(session: aiohttp.ClientSession, **fault: Any) -> None:
    async with session.post("/sim/faults", json=fault) as response:
        assert response.status == 200, await response.text()


async def test_a_refused_request_has_no_answer_at_all(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="refuse", count=1)
    with pytest.raises(aiohttp.ClientError):
        await post(engine, CHAT, chat("hello"))
    assert await post(engine, CHAT, chat("hello"))


async def test_without_a_count_probes_are_refused_too_until_it_is_over(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="refuse")
    with pytest.raises(aiohttp.ClientError):
        await engine.get("/ping")
    await inject(engine, kind="none")
    async with engine.get("/ping") as response:
        assert response.status == 200


async def test_an_injected_error_is_a_500_for_so_many_requests(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="500", count=2)
    statuses = []
    for _ in range(3):
        async with engine.post(CHAT, json=chat("hello")) as response:
            statuses.append(response.status)
    assert statuses == [500, 500, 200]


async def test_a_hanging_response_never_starts_and_ends_with_its_client(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="hang_before_first_token", count=1)
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.1):
            await stream(engine, CHAT, chat("hello"))
    await until_idle(engine)


async def test_a_stream_hangs_after_half_of_its_tokens(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="hang_mid_stream", count=1)
    async with engine.post(CHAT, json=chat("hello", max_tokens=8, stream=True)) as response:
        received = [await response.content.readline() for _ in range(2 * (1 + 4))]
        assert b"".join(received).count(b'"content"') == 1 + 4
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(response.content.readline(), 0.1)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_connection_is_reset_after_half_of_the_tokens(engine: aiohttp.ClientSession, streaming: bool) -> None:
    await inject(engine, kind="reset_mid_stream", count=1)
    with pytest.raises(aiohttp.ClientError):
        async with engine.post(CHAT, json=chat("hello", max_tokens=8, stream=streaming)) as response:
            await response.read()
    await until_idle(engine)
    assert await post(engine, CHAT, chat("hello"))


async def test_a_client_that_leaves_at_the_last_token_is_no_failure(
    engine: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_eof = web.StreamResponse.write_eof

    async def end(self: web.StreamResponse, data: bytes = b"") -> None:
        if self.content_type == "text/event-stream":
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        await write_eof(self, data)

    monkeypatch.setattr(web.StreamResponse, "write_eof", end)
    with pytest.raises(aiohttp.ClientPayloadError):
        async with engine.post(CHAT, json=chat("hello", max_tokens=2, stream=True)) as response:
            await response.read()
    await until_idle(engine)
    assert not [record for record in caplog.records if record.exc_info]


async def test_slow_makes_every_step_longer(engine: aiohttp.ClientSession) -> None:
    await inject(engine, kind="slow", factor=20)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await post(engine, CHAT, chat("hello", max_tokens=5))
    assert loop.time() - began > 0.09
    await inject(engine, kind="none")


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "gremlin"},
        {"kind": "500", "count": 0},
        {"kind": "500", "count": 1.5},
        {"kind": "slow", "factor": -1},
        {"kind": "slow", "count": 3},
        {"kind": "500", "seconds": "long"},
        {"kind": "500", "often": 1},
        [],
    ],
)
async def test_a_wrong_fault_is_refused_with_what_was_expected(engine: aiohttp.ClientSession, fault: object) -> None:
    async with engine.post("/sim/faults", json=fault) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"kind": "slow"}, EngineFault(kind=FaultKind.SLOW, factor=3.0)),
        ({"kind": "slow", "factor": 20, "seconds": 0.5}, EngineFault(kind=FaultKind.SLOW, factor=20.0, seconds=0.5)),
        ({"kind": "500", "count": 999_999_999}, EngineFault(kind=FaultKind.ERROR, count=999_999_999)),
        ({"kind": "none", "count": None}, EngineFault(kind=FaultKind.NONE)),
    ],
)
def test_a_fault_is_read_with_what_it_leaves_out(body: dict[str, Any], fault: EngineFault) -> None:
    assert read_fault(body) == fault
    assert EngineFault(kind=FaultKind.SLOW).factor == 3.0


@pytest.mark.parametrize("value", [0, -1, True, 10**9, "1"])
def test_an_amount_is_positive_and_below_a_billion(value: object) -> None:
    for name in ("count", "seconds", "factor"):
        with pytest.raises(BadRequest, match=f"{name} must be a positive"):
            read_fault({"kind": "refuse", name: value})


def test_a_count_is_of_requests_that_meet_the_fault() -> None:
    faults = EngineFaults()
    faults.inject(EngineFault(kind=FaultKind.REFUSE, count=2), now=0.0)
    assert not faults.refuses_all(now=0.0)
    assert [faults.next_kind(now=0.0) for _ in range(3)] == [FaultKind.REFUSE, FaultKind.REFUSE, FaultKind.NONE]
    faults.inject(EngineFault(kind=FaultKind.REFUSE, seconds=2.0), now=5.0)
    assert [faults.refuses_all(now=now) for now in (5.0, 6.9, 7.0)] == [True, True, False]
    assert faults.slowdown(now=5.0) == 1.0


def test_slowness_lasts_as_long_as_it_was_said_to() -> None:
    faults = EngineFaults()
    faults.inject(EngineFault(kind=FaultKind.SLOW, seconds=2.0, factor=4.0), now=5.0)
    assert [faults.slowdown(now=now) for now in (5.0, 6.9, 7.0)] == [4.0, 4.0, 1.0]


def test_a_fault_ends_by_its_time() -> None:
    faults = EngineFaults()
    faults.inject(EngineFault(kind=FaultKind.ERROR, seconds=2.0), now=10.0)
    assert [faults.next_kind(now=now) for now in (10.0, 11.9, 12.0)] == [
        FaultKind.ERROR,
        FaultKind.ERROR,
        FaultKind.NONE,
    ]
