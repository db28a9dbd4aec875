"""Heads that are not complete, on many connections: bounded in sum, and a head in one piece is served beside them."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from gorgo.live.listener.heads import PartialHeads
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import REPLICA, answer, chat
from tests.proxy.raw import RawClient, connected

BEGIN = b"GET /health HTTP/1.1\r\nhost: g\r\nx-long: "


class CountingHeads(PartialHeads):
    """Also counts all bytes that ever waited."""

    def __init__(self) -> None:
        super().__init__()
        self.came_bytes = 0

    def replace(self, before: int, now: int) -> bool:
        self.came_bytes += max(0, now - before)
        return super().replace(before, now)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[CountingHeads]:
    """The sums of the listeners, each with room for two of the test's heads."""
    made: list[CountingHeads] = []

    def make() -> PartialHeads:
        made.append(CountingHeads())
        return made[-1]

    monkeypatch.setattr("gorgo.live.listener.heads.MAX_BYTES", 100_000)
    monkeypatch.setattr("gorgo.live.listener.listener.PartialHeads", make)
    return made


async def begun(client: RawClient) -> None:
    """Send 40 kB of a head."""
    client.writer.write(BEGIN + b"a" * 40_000)
    await client.writer.drain()


async def test_heads_that_do_not_end_are_bounded_in_sum_and_whole_ones_pass(
    start: Start, heads: list[CountingHeads]
) -> None:
    fleet = await start.fleet([answer(200)])
    async with AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(connected(fleet.addresses.data)) for _ in range(3)]
        await begun(first)
        await begun(second)
        await until(lambda: sum(one.used_bytes for one in heads) > 80_000)
        await begun(third)
        refused = await third.rest()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"buffers_full" in refused
        assert (await fleet.client.post("/v1/chat/completions", content=chat())).status_code == 200
        first.writer.write(b"\r\n\r\n")
        assert (await first.head()).startswith(b"HTTP/1.1 200 ")
        fourth = await stack.enter_async_context(connected(fleet.addresses.data))
        await begun(fourth)
        fourth.writer.write(b"\r\n\r\n")
        assert (await fourth.head()).startswith(b"HTTP/1.1 200 ")


async def test_connections_that_end_in_the_middle_of_a_head_count_no_longer(
    start: Start, heads: list[CountingHeads]
) -> None:
    fleet = await start.fleet([answer(200)])
    for number in range(10):
        async with connected(fleet.addresses.data) as client:
            await begun(client)
            if number % 2:
                client.reset()
    await until(lambda: not sum(one.used_bytes for one in heads))
    async with connected(fleet.addresses.data) as client:
        await begun(client)
        client.writer.write(b"\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200 ")


async def test_bytes_behind_requests_in_progress_are_bounded_in_sum_and_each_request_is_answered(
    start: Start, heads: list[CountingHeads]
) -> None:
    async def late(request: web.Request, body: bytes) -> web.StreamResponse:
        await request.app[REPLICA].release.wait()
        return await answer(200)(request, body)

    fleet = await start.fleet([late])
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(fleet.addresses.data)) for _ in range(5)]
        for client in clients:
            await client.post("/v1/chat/completions", chat())
        await until(lambda: len(fleet.replicas[0].seen) == len(clients))
        for number, client in enumerate(clients, 1):
            await begun(client)
            await until(lambda least=40_000 * number: sum(one.came_bytes for one in heads) >= least)  # type: ignore[misc]
            assert sum(one.used_bytes for one in heads) <= 100_000
        clients[2].writer.write(b"a" * 40_000)
        fleet.replicas[0].release.set()
        for client in clients:
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 200 ")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
            await client.reader.readexactly(length)
        for client in clients[2:]:
            assert await client.rest() == b"", "its connection ends: what came behind the request is dropped"
        for client in clients[:2]:
            client.writer.write(b"\r\n\r\n")
            assert (await client.head()).startswith(b"HTTP/1.1 200 ")
    await until(lambda: not sum(one.used_bytes for one in heads))
