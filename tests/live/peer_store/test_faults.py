"""A store that fails in every way: routers go on alone, say so once, and know each other again by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from gorgo.config.model import SharedConfig
from gorgo.live.telemetry.peers import StoreFault
from tests.core.routers import blocks_of
from tests.live.peer_store.group import Member, member, until
from tests.live.peer_store.relay import relay
from tests.live.peer_store.server import RedisServer

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisServer]:
    """The store of the module, as it was at the end."""
    yield redis_server
    redis_server.kill()
    redis_server.start()


@asynccontextmanager
async def two(shared: SharedConfig, other: SharedConfig | None = None) -> AsyncIterator[tuple[Member, Member]]:
    async with member(shared, "eu-1") as first, member(other or shared, "eu-2") as second:
        await until(lambda: first.heard == {"eu-2": True} and second.heard == {"eu-1": True})
        yield first, second


def alone(one: Member, *faults: StoreFault) -> bool:
    return not one.service.link.joined and one.service.link.fault in faults


def failed_again(one: Member, failures: int) -> bool:
    return one.service.counts.failures["unreachable"] > failures + 1


async def test_routers_of_a_store_that_is_gone_are_alone_and_join_again(
    store: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")
    async with two(store.shared()) as (first, second):
        first.dispatch("before")
        await until(lambda: second.load_of_others() == 1.0)
        store.kill()
        await until(lambda: alone(first, "unreachable") and alone(second, "unreachable"))
        # A silent peer counts no longer; the own load stays, and nothing waits.
        await until(lambda: second.load_of_others() == 0.0)
        first.serve("meanwhile", blocks=blocks_of(7, 8, 9))
        store.start()
        # The report has the load of now and the prompt of the outage.
        await until(lambda: second.load_of_others() == 2.0 and second.knows_prefixes())
        await until(lambda: first.service.link.joined and second.service.link.joined)
        # A busy machine may make the store slow once more; each loss is said, and each return.
        events = [record.getMessage() for record in caplog.records]
        assert events.count("peer_store_lost") >= 2
        assert events.count("peer_store_joined") == events.count("peer_store_lost") + 2


async def test_a_paused_store_is_slow_and_costs_no_decision(store: RedisServer) -> None:
    async with two(store.shared()) as (first, second):
        store.pause()
        try:
            await until(lambda: alone(first, "slow") and alone(second, "slow"))
            started_s = first.clock()
            for number in range(50):
                first.dispatch(f"r{number}", tokens=3000)
                await asyncio.sleep(0)
            assert first.clock() - started_s < 1.0
        finally:
            store.resume()
        await until(lambda: second.load_of_others() == 50.0)


async def test_a_full_store_is_said_and_what_is_read_still_counts(store: RedisServer) -> None:
    async with two(store.shared()) as (first, second):
        store.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
        store.command("CONFIG", "SET", "maxmemory", "1")
        await until(lambda: alone(first, "full") and alone(second, "full"))
        first.serve("meanwhile")
        assert first.service.counts.failures["full"] > 0
        assert not first.service.link.fails("read")
        store.command("CONFIG", "SET", "maxmemory", "0")
        await until(lambda: second.load_of_others() == 1.0 and second.knows_prefixes())
        await until(lambda: first.service.link.joined and second.service.link.joined)


async def test_routers_of_a_flushed_store_know_each_other_again(store: RedisServer) -> None:
    async with two(store.shared()) as (first, second):
        store.command("FLUSHALL")
        first.serve("after")
        await until(lambda: second.load_of_others() == 1.0 and second.knows_prefixes())
        assert first.service.link.joined
        async with member(store.shared(), "eu-3") as third:
            await until(lambda: third.load_of_others() == 1.0)


async def test_a_store_without_the_routers_rights_is_refused_until_it_has_them(store: RedisServer) -> None:
    async with two(store.shared()) as (first, _):
        store.command("ACL", "SETUSER", "default", "-xadd")
        try:
            await until(lambda: alone(first, "refused"))
        finally:
            store.command("ACL", "SETUSER", "default", "+xadd")
        await until(lambda: first.service.link.joined)


async def test_a_key_of_another_kind_is_an_error_and_ends_nothing(store: RedisServer) -> None:
    store.command("SET", "gorgo:g:members", "no set")
    async with member(store.shared(), "eu-1") as first:
        await until(lambda: alone(first, "error"))
        store.command("DEL", "gorgo:g:members")
        await until(lambda: first.service.link.joined)


async def test_half_of_the_routers_cut_off_share_again_when_the_way_is_back(redis_server: RedisServer) -> None:
    async with relay(redis_server.port) as relayed:
        far = replace(redis_server.shared(), url=f"redis://127.0.0.1:{relayed.port}")
        async with (
            two(redis_server.shared()) as (first, second),
            member(far, "eu-3") as third,
            member(far, "eu-4") as fourth,
        ):
            await until(lambda: all(len(one.heard) == 3 for one in (first, second, third, fourth)))
            relayed.cut()
            third.dispatch("far")
            await until(lambda: alone(third, "slow") and alone(fourth, "slow"))
            await until(lambda: first.heard["eu-3"] is False and third.heard["eu-1"] is False)
            # The near half goes on sharing.
            first.dispatch("near")
            await until(lambda: second.load_of_others() == 1.0)
            assert (first.service.link.joined, fourth.load_of_others()) == (True, 0.0)
            relayed.mend()
            for one in (first, second, third, fourth):
                expected = 1.0 if one in (first, third) else 2.0
                await until(partial(one.hears_of, expected))


async def test_a_restarted_store_whose_clock_is_behind_is_read_from_its_start(redis_server: RedisServer) -> None:
    """Positions of the former store are after all that the new one takes."""
    async with two(redis_server.shared()) as (first, second):
        streams = second.service._reader._incoming._streams
        for stream in streams.values():
            stream.position = stream.position._replace(ms=stream.position.ms + 3_600_000)
        first.dispatch("after")
        await until(lambda: second.load_of_others() == 1.0)


async def test_what_a_failed_write_had_is_in_the_next_report_within_its_bounds(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.peer_store.writer.MAX_PREFIXES", 3)
    async with two(store.shared()) as (first, second):
        store.kill()
        await until(lambda: alone(first, "unreachable"))
        for number in range(5):
            first.serve(f"r{number}", blocks=blocks_of(10 * number + 1, 10 * number + 2))
            failures = first.service.counts.failures["unreachable"]
            await until(partial(failed_again, first, failures))
        store.start()
        await until(second.knows_prefixes)
        assert first.service.counts.dropped == 2
