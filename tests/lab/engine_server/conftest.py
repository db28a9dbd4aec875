"""A simulated replica on a socket for each test that asks for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest

from gorgo.lab.engine_server import run_engine
from gorgo.lab.sim.engine.profiles import EngineProfile

#: Fast enough for tests, slow enough that a stream of some hundred tokens is still running when it is broken off.
QUICK = EngineProfile(
    name="quick",
    prefill_base_s=0.001,
    prefill_tokens_per_s=100_000.0,
    prefill_kappa_s=0.0,
    chunk_tokens=4096,
    decode_base_s=0.001,
    decode_per_request_s=0.0,
    decode_kv_s=0.0,
    kv_tokens=50_000,
    max_running_requests=64,
)

Start = Callable[..., Awaitable[aiohttp.ClientSession]]


@asynccontextmanager
async def serving(
    *, profile: EngineProfile = QUICK, rtt_ms: float = 0.0, jitter: float = 0.0, adapters: Sequence[str] = ()
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose base is a fresh replica."""
    stop = asyncio.Event()
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ready(host: str, port: int) -> None:
        bound.set_result(f"http://{host}:{port}")

    engine = asyncio.create_task(
        run_engine(
            name="test",
            profile=profile,
            rtt_ms=rtt_ms,
            jitter=jitter,
            seed=0,
            host="127.0.0.1",
            port=0,
            ready=ready,
            stop=stop,
            adapters=adapters,
        )
    )
    try:
        async with aiohttp.ClientSession(await bound) as session:
            yield session
    finally:
        stop.set()
        await engine


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start replicas that end with the test."""
    async with AsyncExitStack() as stack:

        async def begin(
            *, profile: EngineProfile = QUICK, rtt_ms: float = 0.0, jitter: float = 0.0, adapters: Sequence[str] = ()
        ) -> aiohttp.ClientSession:
            replica = serving(profile=profile, rtt_ms=rtt_ms, jitter=jitter, adapters=adapters)
            return await stack.enter_async_context(replica)

        yield begin


@pytest.fixture
async def engine(start: Start) -> aiohttp.ClientSession:
    """A replica with no distance."""
    return await start()
