"""Four `gorgo serve` over one store that fails in every way: no request is lost, and they know each other again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.live.peer_store.relay import Relay, relay
from tests.live.peer_store.server import RedisServer, needs_redis
from tests.live.peer_store.server import running as store_running
from tests.peers_live.fleet import CLOCK_AHEAD, CLOCK_BEHIND, MODEL, OTHER_FORMAT, Router, running

pytestmark = [pytest.mark.system, needs_redis, pytest.mark.timeout(900)]
#: Requests per second over all routers.
RATE = 8.0
#: From the store's return until each router knows the others.
KNOWN_S = 5.0


class Clients:
    """An endless stream of requests, to the routers in turn."""

    def __init__(self, routers: Sequence[Router], http: httpx.AsyncClient) -> None:
        self._routers = routers
        self._http = http
        self.statuses: list[int | str] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(10**6):
                tasks.create_task(self._send(number))
                await asyncio.sleep(1.0 / RATE)

    async def _send(self, number: int) -> None:
        router = self._routers[number % len(self._routers)]
        session = number % 12
        text = f"session {session} " * 200 + f"question {number}"
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 8}
        try:
            async with self._http.stream("POST", f"{router.url}/v1/chat/completions", json=body, timeout=60) as answer:
                last = b""
                async for chunk in answer.aiter_bytes():
                    last = chunk
            self.statuses.append(answer.status_code if b"[DONE]" in last else "cut")
        except httpx.HTTPError as error:
            self.statuses.append(type(error).__name__)


@asynccontextmanager
async def load(routers: Sequence[Router]) -> AsyncIterator[tuple[Clients, httpx.AsyncClient]]:
    """Send requests in the block; afterwards all were served, and all ledgers are zero."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=200)) as http:
        clients = Clients(routers, http)
        task = asyncio.create_task(clients.run())
        try:
            yield clients, http
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert set(clients.statuses) == {200}
        for router in routers:
            await ledger_is_zero(router, http)


async def ledger_is_zero(router: Router, http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while True:
            check = await router.status(http)
            assert check["violation"] is None
            if not check["in_flight"] and not check["queued"] and not check["exchanges"]:
                return
            await asyncio.sleep(0.1)


async def know_each_other(routers: Sequence[Router], http: httpx.AsyncClient, *, peers: int) -> float:
    """Return after how many seconds each router has its store and hears of `peers` others."""
    started_s = time.monotonic()
    async with asyncio.timeout(40):
        for router in routers:
            while not (
                await router.metric(http, "gorgo_peer_store_up") == 1.0
                and await router.metric(http, "gorgo_peers") == float(peers)
            ):
                await asyncio.sleep(0.05)
    return time.monotonic() - started_s


async def are_alone(routers: Sequence[Router], http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        for router in routers:
            while await router.metric(http, "gorgo_peer_store_up") or await router.metric(http, "gorgo_peers"):
                await asyncio.sleep(0.05)


async def test_a_store_that_fails_in_every_way_costs_no_request(tmp_path: Path) -> None:
    with store_running(tmp_path) as store:
        async with relay(store.port) as relayed:
            far = f"redis://127.0.0.1:{relayed.port}/0"
            with running(tmp_path / "fleet", [store.url, store.url, far, far]) as routers:
                async with load(routers) as (clients, http):
                    await know_each_other(routers, http, peers=3)
                    back_s = {
                        "killed": await killed(store, routers, http),
                        "paused": await paused(store, routers, http),
                        "full": await full(store, routers, http),
                        "flushed": await flushed(store, routers, http),
                        "cut off": await cut_off(relayed, routers, http),
                    }
                    print(back_s, len(clients.statuses))  # noqa: T201
    assert max(back_s.values()) <= KNOWN_S, back_s
    assert len(clients.statuses) > 100


async def killed(store: RedisServer, routers: Sequence[Router], http: httpx.AsyncClient) -> float:
    store.kill()
    await are_alone(routers, http)
    await asyncio.to_thread(store.start)
    return await know_each_other(routers, http, peers=3)


async def paused(store: RedisServer, routers: Sequence[Router], http: httpx.AsyncClient) -> float:
    store.pause()
    try:
        await asyncio.sleep(10.0)
        await are_alone(routers, http)
    finally:
        store.resume()
    return await know_each_other(routers, http, peers=3)


async def full(store: RedisServer, routers: Sequence[Router], http: httpx.AsyncClient) -> float:
    store.command("CONFIG", "SET", "maxmemory", "1")
    await are_alone(routers, http)
    store.command("CONFIG", "SET", "maxmemory", "0")
    return await know_each_other(routers, http, peers=3)


async def flushed(store: RedisServer, routers: Sequence[Router], http: httpx.AsyncClient) -> float:
    store.command("FLUSHALL")
    return await know_each_other(routers, http, peers=3)


async def cut_off(relayed: Relay, routers: Sequence[Router], http: httpx.AsyncClient) -> float:
    relayed.cut()
    await are_alone(routers[2:], http)
    assert await know_each_other(routers[:2], http, peers=1) < KNOWN_S
    relayed.mend()
    return await know_each_other(routers, http, peers=3)


async def test_two_versions_of_records_side_by_side_route_each_with_their_own(tmp_path: Path) -> None:
    newer = dict.fromkeys((2, 3), OTHER_FORMAT)
    with store_running(tmp_path) as store, running(tmp_path / "f", [store.url] * 4, changed=newer) as routers:
        async with load(routers) as (_, http):
            await know_each_other(routers, http, peers=1)
            async with asyncio.timeout(KNOWN_S):
                for router in routers:
                    # Those of the other version may be read after the one that counts.
                    while await router.metric(http, 'gorgo_peers_differing{subject="format"}') != 2.0:
                        await asyncio.sleep(0.1)
            await asyncio.sleep(5.0)


async def test_routers_with_clocks_five_seconds_off_share_as_others_do(tmp_path: Path) -> None:
    off = {1: CLOCK_AHEAD, 2: CLOCK_BEHIND}
    with store_running(tmp_path) as store, running(tmp_path / "f", [store.url] * 4, changed=off) as routers:
        async with load(routers) as (clients, http):
            await know_each_other(routers, http, peers=3)
            now_s = [(await router.status(http, "/admin/status"))["now_s"] for router in routers]
            assert max(now_s) - min(now_s) > 8.0
            await asyncio.sleep(5.0)
            assert await know_each_other(routers, http, peers=3) < KNOWN_S
            for router in routers:
                peers = (await router.status(http, "/admin/status"))["peer_store"]["peers"]
                assert all(peer["counts"] and 0.0 <= peer["age_s"] < 2.0 for peer in peers)
        assert len(clients.statuses) > 30


async def test_a_killed_router_is_replaced_with_what_it_knew(tmp_path: Path) -> None:
    """The new one has the history of all in the store before its first request."""
    with store_running(tmp_path) as store:
        with running(tmp_path / "first", [store.url] * 2) as routers:
            async with load(routers) as (_, http):
                await know_each_other(routers, http, peers=1)
                await asyncio.sleep(4.0)
        with running(tmp_path / "second", [store.url]) as (router,):
            async with httpx.AsyncClient() as http:
                assert await router.metric(http, 'gorgo_peer_reports_total{result="read"}') > 20
