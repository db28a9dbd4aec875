"""`run_engine`: one simulated replica on a port.

Owns wiring and lifetime; `replica` has the state, `generation` and `information` the routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from aiohttp import web

from gorgo.apps.engine_server import generation, information
from gorgo.apps.engine_server.kv_events import KvEventLog, publishing
from gorgo.apps.engine_server.push.mirror import CacheMirror
from gorgo.apps.engine_server.push.reporter import PushReporter, PushTarget
from gorgo.apps.engine_server.replica import SimulatedReplica
from gorgo.sim.engine.kv_observer import KvObservers
from gorgo.sim.engine.profiles import EngineProfile
from gorgo.sim.network.links import JITTER

#: SGLang runs under uvicorn, which closes a connection idle for so long.
KEEP_ALIVE_S = 5.0

#: Longest request body: far above 32,768 tokens of text, and a bound all the same.
_MAX_BODY_BYTES = 64 * 1024 * 1024


async def run_engine(
    *,
    name: str,
    profile: EngineProfile,
    rtt_ms: float,
    seed: int,
    host: str,
    port: int,
    ready: Callable[[str, int], None] | None = None,
    stop: asyncio.Event | None = None,
    model: str = "gorgo-sim",
    adapters: Sequence[str] = (),
    keep_alive_s: float = KEEP_ALIVE_S,
    jitter: float = JITTER,
    push: PushTarget | None = None,
    kv_events: str | None = None,
    notify: Callable[[str], None] = print,
) -> None:
    """Serve a simulated replica until `stop` is set, or for ever.

    Parameters
    ----------
    name:
        Of the replica; enters the seed, so that replicas of one fleet do not jitter alike.
    profile:
        The simulated engine.
    model, adapters:
        Names that `/v1/models` lists: the base model, and LoRA adapters of it.
    rtt_ms, jitter:
        Distance to the client: mean round trip, and the mean of the exponential added to each one-way trip, as a share
        of it.
    push:
        Where the engine pushes what it caches; nowhere by default.
    kv_events:
        Address of ZeroMQ at which the engine publishes what it caches; nowhere by default.
    notify:
        Called with what happens to pushes.
    ready:
        Called with the bound address once connections are accepted.
    """
    replica = SimulatedReplica(
        name=name, model_name=model, profile=profile, rtt_s=rtt_ms / 1e3, jitter=jitter, seed=seed, adapters=adapters
    )
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    generation.add_routes(app, replica)
    information.add_routes(app, replica)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, keepalive_timeout=keep_alive_s, shutdown_timeout=1.0
    )
    await runner.setup()
    reporting = None
    publisher = AsyncExitStack()
    cache = replica.engine.cache
    mirror = CacheMirror(block_tokens=cache.event_tokens)
    events = KvEventLog(block_tokens=cache.event_tokens, vllm=replica.is_vllm)
    observers = [each for each, wanted in ((mirror, push), (events, kv_events)) if wanted is not None]
    if observers:
        cache.report_to(KvObservers(observers))
    if push is not None:
        reporting = asyncio.create_task(PushReporter(push, mirror, notify=notify).run())
    try:
        if kv_events is not None:
            replica.kv_events = await publisher.enter_async_context(
                publishing(kv_events, events, vllm=replica.is_vllm, travel_s=replica.path.one_way_s)
            )
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        if ready is not None:
            bound = runner.addresses[0]
            ready(bound[0], bound[1])
        await (stop or asyncio.Event()).wait()
    finally:
        if reporting is not None:
            reporting.cancel()
            await asyncio.wait((reporting,))
        await publisher.aclose()
        replica.close()
        await runner.cleanup()
