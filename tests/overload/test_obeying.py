"""What is said of obeying clients: who got through, at which try, and whether they were told the truth."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from aiohttp import web

from gorgo.lab.replay.client import ReplayClient, open_http
from gorgo.lab.replay.options import ReplayOptions
from gorgo.lab.traces import TraceRequest
from tests.overload.obeying import MAX_TRIES, ObeyingClient, Patient, TurnedAway, obedience, room_after


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
