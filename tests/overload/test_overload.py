"""The cut, the sums and the targets of an overload, clients that obey, and one short run on real processes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from gorgo.config.load import load_config
from gorgo.lab.datasets import load_requests
from gorgo.lab.replay_client import ReplayClient, ReplayOptions, ReplayRecord, open_http
from gorgo.lab.traces import TraceFilters, TraceRequest
from tests.overload.fleet import configuration, running, write_configuration
from tests.overload.live import LiveRun, live
from tests.overload.obeying import MAX_TRIES, ObeyingClient, Patient, TurnedAway, obedience, obedient, room_after
from tests.overload.show import Pair, missed
from tests.overload.simulated import simulated
from tests.overload.window import Served, covers, cut, served

# --- The cut, the sums and the targets of an overload; one short run on real processes beside its simulation.


TRACE = [TraceRequest(number, number * 0.5, 100, 10) for number in range(100)]


def record(ttft_ms: float | None, e2e_s: float | None, error: str | None = None) -> ReplayRecord:
    return ReplayRecord(id="r", scheduled_s=0.0, sent_s=0.0, input_tokens=1, ttft_ms=ttft_ms, e2e_s=e2e_s, error=error)


def test_every_load_is_offered_for_the_same_time() -> None:
    once, thrice = (cut(TRACE, load=load, capacity=1.0, lasts_s=10.0) for load in (1.0, 3.0))
    assert (len(once.requests), len(thrice.requests)) == (20, 60)
    assert thrice.time_scale == pytest.approx(1 / 3)
    assert covers(TRACE, thrice)
    assert not covers(TRACE, cut(TRACE, load=9.0, capacity=1.0, lasts_s=10.0))


def test_who_is_turned_away_late_or_missing_was_not_served_well() -> None:
    records = [
        record(1999.0, 9.9),
        record(2001.0, 9.9),
        record(100.0, 10.1),
        record(None, None, "http 429: no"),
    ]
    found = served(records, offered=8, lasts_s=2.0)
    assert (found.offered, found.good, found.per_s, found.rejected) == (8, 1 / 8, 0.5, 1 / 8)
    assert found.ttft_ms_p95 == 2001.0
    assert served([], offered=8, lasts_s=2.0).ttft_ms_p95 is None


GOOD = Served(offered=200, good=0.97, per_s=5.0, rejected=0.0, ttft_ms_p95=900.0)


def pair(load: float, *, held: bool, most_held: int = 3, **change: float) -> Pair:
    seen = replace(GOOD, **change)  # type: ignore[arg-type]  # by name
    run = LiveRun(served=seen, records=[], looks=[(0.0, 0), (1.0, most_held)], slip_ms_p95=1.0)
    return Pair(load=load, held=held, live=run, simulated=GOOD)


ALL_WELL = [pair(0.7, held=False), pair(0.7, held=True), pair(1.3, held=True), pair(3.0, held=True)]


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        (ALL_WELL, None),
        ([*ALL_WELL, pair(1.3, held=True, good=0.84)], "at 1.3 held 84.0% were served well"),
        ([*ALL_WELL, pair(3.0, held=True, per_s=4.4)], "at 3 4.40 a second"),
        ([*ALL_WELL, pair(0.7, held=True, good=0.95)], "at 0.7 holding loses 2.0%"),
        ([*ALL_WELL, pair(1.0, held=True, most_held=1001)], "at 1 1001 waited, 1000 at most"),
    ],
)
def test_each_target_that_is_missed_is_told(pairs: list[Pair], told: str | None) -> None:
    found = missed(pairs, None, queue_max_requests=1000)
    assert [wrong[: len(told or "")] for wrong in found] == ([] if told is None else [told])


def test_clients_that_do_not_get_through_or_are_not_told_when_are_a_miss() -> None:
    away = [TurnedAway(at_s=0.0, told_s=None, attempt=1)]
    lost = obedience([Patient(tries=1, through=False, away=away), Patient(tries=1, through=True)], [])
    assert missed(ALL_WELL, lost, queue_max_requests=1000) == [
        "1 refusals without a Retry-After",
        "50.0% of obeying clients got through, 95% at least",
    ]


@pytest.mark.system
@pytest.mark.timeout(300)
def test_beyond_capacity_a_proxy_that_holds_serves_more_in_time_live_as_simulated(tmp_path: Path) -> None:
    requests = load_requests("art-chat-apr5", TraceFilters(limit=2000), seed=0)
    config = load_config(
        write_configuration(tmp_path / "all.yaml", configuration(held=True, slo_ttft_ms=2000.0, urls={}))
    )
    offer = cut(requests, load=1.0, capacity=0.2, lasts_s=12.0)
    virtual = simulated(offer, config, held=True, slo_ttft_ms=2000.0)
    with running(tmp_path / "held", held=True, slo_ttft_ms=2000.0) as fleet:
        found = live(offer, fleet)
    assert 0 < found.most_held <= config.overload.queue_max_requests
    assert found.served.good == pytest.approx(virtual.good, abs=0.15)
    with running(tmp_path / "obeyed", held=True, slo_ttft_ms=2000.0) as fleet:
        obeyed = obedient(offer, fleet)
    assert obeyed.untold == 0
    assert obeyed.through > obeyed.first_try


# --- What is said of obeying clients: who got through, at which try, and whether they were told the truth.


def refused(at_s: float, told_s: float | None, attempt: int = 1) -> TurnedAway:
    return TurnedAway(at_s=at_s, told_s=told_s, attempt=attempt)


def test_sums_are_over_requests_and_honesty_over_refusals() -> None:
    patients = [
        Patient(tries=1, through=True),
        Patient(tries=2, through=True, away=[refused(1.0, 2.0)]),
        Patient(tries=3, through=False, away=[refused(1.0, 2.0), refused(3.0, 1.0, 2), refused(4.0, None, 3)]),
    ]
    found = obedience(patients, [(0.0, 0), (2.0, 7), (5.0, 0)])
    assert (found.offered, found.turned_away, found.untold, found.most_held) == (3, 2, 1, 7)
    assert (found.through, found.first_try) == (2 / 3, 1 / 3)
    assert (found.tries_mean, found.tries_most) == (2.5, 3)
    # Three came back, one of them twice more: two of those three were turned away again.
    assert found.taken_when_told == 1.0 - 2 / 3
    assert (found.told_s_p50, found.room_s_p50) == (2.0, 4.0)


def test_room_that_was_not_seen_is_unknown() -> None:
    assert room_after(3.0, [(1.0, 0), (4.0, 2)]) is None


def test_where_nobody_was_turned_away_there_is_nothing_to_obey() -> None:
    found = obedience([Patient(tries=1, through=True)], [])
    assert (found.through, found.tries_mean, found.taken_when_told, found.room_s_p50) == (1.0, None, None, None)


async def test_an_obeying_client_stays_away_as_long_as_it_is_told_and_gives_up_at_last() -> None:
    seen: list[float] = []

    async def refuse(request: web.Request) -> web.Response:
        seen.append(time.monotonic())
        headers = {"retry-after": "0"} if len(seen) < MAX_TRIES + 3 else {}
        return web.Response(status=429, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        options = ReplayOptions(trace=Path("none"), url=f"http://127.0.0.1:{runner.addresses[0][1]}", model="m")
        async with open_http(options) as http:
            client = ReplayClient(http, options, clock=time.monotonic, start_s=time.monotonic(), run="test")
            clients = ObeyingClient(client, http, time.monotonic())
            request = TraceRequest(0, 0.0, 1, 1)
            await asyncio.wait_for(clients.send(request, b"{}", 0.0), 20)
            await asyncio.wait_for(clients.send(request, b"{}", 0.0), 20)
    finally:
        await runner.cleanup()
    first, second = clients.patients
    assert (first.tries, len(first.away), first.through) == (MAX_TRIES, MAX_TRIES, False)
    # The ninth refusal says nothing: nobody comes back without being told to.
    assert (second.tries, second.away[-1].told_s) == (3, None)
