"""The lease in a real store: one holder, renewed, deleted by its holder alone, ended by the holder's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gorgo.errors import LeadershipLost
from gorgo.live.peer_store.connection import store_client
from tests.live.peer_store.server import ENVIRON, RedisServer, needs_redis
from tuner.leader import MARGIN_S, StoreLease

pytestmark = needs_redis
KEY = "gorgo:g:tuner"


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def candidates(server: RedisServer, count: int, **options: float) -> AsyncIterator[list[StoreLease]]:
    clients = [store_client(server.shared(), ENVIRON) for _ in range(count)]
    leases = [StoreLease(client, "g", **options) for client in clients]  # type: ignore[arg-type]
    try:
        yield leases
    finally:
        for lease, client in zip(leases, clients, strict=True):
            await lease.release()
            await client.aclose()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.01)


async def test_of_two_candidates_one_leads_and_each_leader_has_a_higher_number(redis_server: RedisServer) -> None:
    async with candidates(redis_server, 2) as (first, second):
        assert await first.try_to_lead() is None
        assert await second.try_to_lead() == "another process leads"
        await first.confirm_leadership()
        with pytest.raises(LeadershipLost):
            await second.confirm_leadership()
        await first.release()
        with pytest.raises(LeadershipLost):
            await first.confirm_leadership()
        assert await second.try_to_lead() is None
        assert (first.token, second.token) == (1, 2)


async def test_a_lease_is_renewed_to_its_whole_time(redis_server: RedisServer) -> None:
    async with candidates(redis_server, 2, lease_s=60.0, renew_s=0.05) as (first, second):
        assert await first.try_to_lead() is None
        redis_server.command("PEXPIRE", KEY, "20000")

        def left_ms() -> int:
            return int(redis_server.command("PTTL", KEY).split(b":")[-1])

        async with asyncio.timeout(10):
            while left_ms() <= 20_000:
                await asyncio.sleep(0.01)
        assert await second.try_to_lead() == "another process leads"
        await first.confirm_leadership()


async def test_a_holder_without_renewals_stops_before_another_one_may_lead(redis_server: RedisServer) -> None:
    clock = Clock()
    async with candidates(redis_server, 1, lease_s=10.0, clock=clock) as (lease,):  # type: ignore[arg-type]
        assert await lease.try_to_lead() is None
        clock.now = 10.0 - MARGIN_S - 0.01
        await lease.confirm_leadership()
        clock.now = 10.0 - MARGIN_S
        with pytest.raises(LeadershipLost, match="has ended"):
            await lease.confirm_leadership()


async def test_a_release_deletes_no_lease_of_another_process(redis_server: RedisServer) -> None:
    async with candidates(redis_server, 1) as (lease,):
        assert await lease.try_to_lead() is None
        redis_server.command("SET", KEY, "another holder")
        await lease.release()
        assert b"another holder" in redis_server.command("GET", KEY)


async def test_a_lease_that_another_process_holds_is_found_at_the_next_renewal(redis_server: RedisServer) -> None:
    async with candidates(redis_server, 1, lease_s=60.0, renew_s=0.05) as (lease,):
        assert await lease.try_to_lead() is None
        redis_server.command("SET", KEY, "another holder")

        async def confirmed() -> bool:
            try:
                await lease.confirm_leadership()
            except LeadershipLost:
                return False
            return True

        async with asyncio.timeout(10):
            while await confirmed():
                await asyncio.sleep(0.01)
        assert b"another holder" in redis_server.command("GET", KEY), "the renewal compares"


async def test_a_store_without_an_answer_is_a_reason_and_no_error(redis_server: RedisServer) -> None:
    async with candidates(redis_server, 1) as (lease,):
        redis_server.kill()
        try:
            assert str(await lease.try_to_lead()).startswith("the store gives no lease: ")
        finally:
            redis_server.start()
        assert await lease.try_to_lead() is None
