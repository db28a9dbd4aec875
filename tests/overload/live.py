"""One offer over HTTP: an open loop of clients, and how many wait at the proxy meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gorgo.lab.replay import BodiesAhead
from gorgo.lab.replay_client import ReplayClient, ReplayOptions, ReplayRecord, open_http
from gorgo.lab.results import E2E_S
from gorgo.lab.traces import TraceRequest, scheduled_s
from tests.overload.fleet import Fleet
from tests.overload.window import Offer, Served, served

MODEL = "gorgo-sim"
#: Between starting and the first request, s.
LEAD_S = 0.2
#: Between two looks at how many wait, s.
LOOK_S = 0.25
#: What has not ended so long after the last request was sent was not served well, whatever becomes of it, s.
PATIENCE_S = E2E_S + 1.0
#: Clients at a time; three times capacity for a minute, all of it open.
MAX_OPEN = 4096

#: Sends one request that was to be sent at this time of the run.
Send = Callable[[TraceRequest, bytes, float], Awaitable[ReplayRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """What was seen.

    Parameters
    ----------
    looks:
        How many waited at the proxy: (time of the run in s, requests).
    slip_ms_p95:
        How late clients sent, which says whether this machine kept up.
    """

    served: Served
    records: Sequence[ReplayRecord] = field(repr=False)
    looks: Sequence[tuple[float, int]] = field(repr=False)
    slip_ms_p95: float

    @property
    def most_held(self) -> int:
        return max((held for _, held in self.looks), default=0)


def live(offer: Offer, fleet: Fleet) -> LiveRun:
    """Send it, and look at it."""
    return asyncio.run(_live(offer, fleet))


async def _live(offer: Offer, fleet: Fleet) -> LiveRun:
    options = ReplayOptions(trace=Path("offer"), url=fleet.url, model=MODEL, max_in_flight=MAX_OPEN)
    async with open_http(options) as http:
        start_s = time.monotonic() + LEAD_S
        client = ReplayClient(http, options, clock=time.monotonic, start_s=start_s, run="live")
        records, looks = await drive(offer, client.send, fleet, http, start_s=start_s)
    slips = sorted(record.slip_s for record in records)
    return LiveRun(
        served=served(records, offered=len(offer.requests), lasts_s=offer.lasts_s),
        records=records,
        looks=looks,
        slip_ms_p95=slips[int(0.95 * len(slips))] * 1e3 if slips else 0.0,
    )


async def drive(
    offer: Offer,
    send: Send,
    fleet: Fleet,
    http: httpx.AsyncClient,
    *,
    start_s: float,
    patience_s: float = PATIENCE_S,
) -> tuple[list[ReplayRecord], list[tuple[float, int]]]:
    """Each request at its time, whatever became of those before; those that end within `patience_s` of the last."""
    records: list[ReplayRecord] = []
    looks: list[tuple[float, int]] = []

    async def one(request: TraceRequest, body: bytes, due_s: float) -> None:
        records.append(await send(request, body, due_s))

    async def watch() -> None:
        while True:
            looks.append((time.monotonic() - start_s, await fleet.held(http)))
            await asyncio.sleep(LOOK_S)

    watcher = asyncio.create_task(watch())
    open_ones: set[asyncio.Task[None]] = set()
    try:
        bodies = BodiesAhead(offer.requests, MODEL)
        while (item := bodies.next()) is not None:
            request, body = item
            due_s = scheduled_s(request, offer.time_scale)
            while start_s + due_s - time.monotonic() > 0.003 and bodies.build_one():
                await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
            open_ones.add(asyncio.create_task(one(request, body, due_s)))
        _, late = await asyncio.wait(open_ones, timeout=patience_s)
    finally:
        await _cancel({watcher, *open_ones})
    for task in open_ones - late:
        task.result()
    return records, looks


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
