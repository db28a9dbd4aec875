"""An open loop of clients over several routers: each request at its time, to the router that the split has for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gorgo.lab.replay.bodies import BodiesAhead
from gorgo.lab.replay.client import ReplayClient, open_http
from gorgo.lab.replay.options import ReplayOptions
from gorgo.lab.replay.summary import ReplayRecord
from gorgo.lab.traces import TraceRequest, scheduled_s
from tests.peers_live.fleet import Router

MODEL = "gorgo-sim"
#: Between starting and the first request, s.
LEAD_S = 0.2


async def drive(
    requests: Sequence[TraceRequest], routers: Sequence[Router], router_of: Callable[[int], int], *, time_scale: float
) -> list[ReplayRecord]:
    """Send all and return their records, in the order of the requests."""
    options = [ReplayOptions(trace=Path("slice"), url=router.url, model=MODEL) for router in routers]
    async with open_http(options[0]) as http:
        start_s = time.monotonic() + LEAD_S
        clients = [ReplayClient(http, one, clock=time.monotonic, start_s=start_s, run="peers") for one in options]
        bodies = BodiesAhead(requests, MODEL)
        sent: list[asyncio.Task[ReplayRecord]] = []
        while (item := bodies.next()) is not None:
            request, body = item
            due_s = scheduled_s(request, time_scale)
            while start_s + due_s - time.monotonic() > 0.003 and bodies.build_one():
                await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
            client = clients[router_of(len(sent))]
            sent.append(asyncio.create_task(client.send(request, body, due_s)))
        return list(await asyncio.gather(*sent))
