"""`gorgo engine` that both publishes KV events and pushes its cache: each has every change."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from msgspec import msgpack

from gorgo.core.prefix.kv_source import chain_hashes
from gorgo.lab.engine_server import run_engine
from gorgo.lab.engine_server.push import PushTarget
from gorgo.live.kv_events.sockets import import_zmq
from tests.lab.engine_server.conftest import QUICK
from tests.lab.engine_server.test_reporter import listening, until
from tests.live.kv_events.extra import needs_zmq

LAST = b"\xff" * 8


@asynccontextmanager
async def serving(push_url: str) -> AsyncIterator[str]:
    """Yield the address of an engine with both reports."""
    stop, bound = asyncio.Event(), asyncio.get_running_loop().create_future()
    engine = asyncio.create_task(
        run_engine(
            name="test",
            profile=QUICK,
            rtt_ms=0.0,
            seed=0,
            host="127.0.0.1",
            port=0,
            ready=lambda host, port: bound.set_result(f"http://{host}:{port}"),
            stop=stop,
            push=PushTarget(url=push_url, replica="r0", model="gorgo-sim", token="secret"),
            kv_events="tcp://127.0.0.1:0",
            notify=lambda _: None,
        )
    )
    try:
        yield await bound
    finally:
        stop.set()
        await engine


async def replayed(port: int) -> list[dict[str, Any]]:
    """Return all events that the engine has published."""
    zmq = import_zmq()
    context = zmq.asyncio.Context()
    try:
        replays = context.socket(zmq.DEALER)
        replays.connect(f"tcp://127.0.0.1:{port}")
        await replays.send_multipart([b"", bytes(8)])
        events: list[dict[str, Any]] = []
        while (frames := await replays.recv_multipart())[-2] != LAST:
            events += msgpack.decode(frames[-1])[1]
        return events
    finally:
        context.destroy(linger=0)


@needs_zmq
async def test_an_engine_pushes_the_blocks_that_its_events_name() -> None:
    async with AsyncExitStack() as running, asyncio.timeout(10):
        # The first push is refused, so that the next one comes half a second later: with the blocks of the prompt.
        proxy = await running.enter_async_context(listening((503, {})))
        url = await running.enter_async_context(serving(proxy.url))
        session = await running.enter_async_context(aiohttp.ClientSession(url))
        body = {"model": "gorgo-sim", "prompt": "".join(f"{number:04d}" for number in range(512)), "max_tokens": 1}
        async with session.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
        await until(lambda: any(hashes for _, _, hashes in proxy.pushes))
        async with session.get("/server_info") as answer:
            port = (await answer.json())["kv_events"]["replay_endpoint_port_base"]
        events = await replayed(port)
    (query, pushed) = next((query, hashes) for _, query, hashes in proxy.pushes if hashes)
    assert {event["type"] for event in events} == {"BlockStored"}
    tokens = array("I", [token for event in events for token in event["token_ids"]])
    assert len(tokens) >= 512
    assert sorted(pushed) == sorted(chain_hashes(tokens.tobytes(), block_tokens=int(query["block_tokens"])))
