"""Heads that are not complete, on many connections: bounded in sum, and a head in one piece is served beside them."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from gorgo.live.listener.heads import PartialHeads
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import answer, chat
from tests.proxy.raw import RawClient, connected

BEGIN = b"GET /health HTTP/1.1\r\nhost: g\r\nx-long: "


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[PartialHeads]:
    """The sums of the listeners, each with room for two of the test's heads."""
    made: list[PartialHeads] = []

    def make() -> PartialHeads:
        made.append(PartialHeads())
        return made[-1]

    monkeypatch.setattr("gorgo.live.listener.heads.MAX_BYTES", 100_000)
    monkeypatch.setattr("gorgo.live.listener.listener.PartialHeads", make)
    return made


async def begun(client: RawClient) -> None:
    """Send 40 kB of a head."""
    client.writer.write(BEGIN + b"a" * 40_000)
    await client.writer.drain()


async def test_heads_that_do_not_end_are_bounded_in_sum_and_whole_ones_pass(
    start: Start, heads: list[PartialHeads]
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
    start: Start, heads: list[PartialHeads]
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
