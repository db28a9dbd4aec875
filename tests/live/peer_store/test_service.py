"""Routers over one real store: what each learns of the other, and how they go on while it fails in every way."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from gorgo.config.model import SharedConfig
from gorgo.core.messages.actions import Action
from gorgo.core.peers.codec import decode_report, encode_report
from gorgo.core.peers.records import PeerReport, PeerStatus, ReplicaLoad
from gorgo.live.event_loop import epoch_clock
from gorgo.live.peer_store.connection import StoreNames, seal_key, store_client
from gorgo.live.peer_store.local import LocalPeers
from gorgo.live.telemetry.metric_table import StoreFault
from gorgo.live.workers.counts import make_memory
from gorgo.live.workers.reports import SharedReports, reports_bytes
from tests.core.routers import PROMPT, blocks_of
from tests.live.peer_store.group import GROUP_KEY, KEY_ID, Member, member, until
from tests.live.peer_store.relay import relay
from tests.live.peer_store.server import RedisServer

pytestmark = pytest.mark.usefixtures("quick")


# --- Two routers in one process over one real store: what each learns of the other, and how soon.


def listed(one: Member, router: str) -> bool:
    return router in {row.router for row in one.service.known_peers()}


async def test_load_and_prefixes_of_one_are_known_to_the_other(redis_server: RedisServer) -> None:
    shared = redis_server.shared()
    async with member(shared, "eu-1") as first, member(shared, "eu-2") as second:
        await until(lambda: first.heard == {"eu-2": True} and second.heard == {"eu-1": True})
        first.serve("r1")
        await until(lambda: second.load_of_others() == 1.0 and second.knows_prefixes())
        assert first.load_of_others() == 0.0
        assert first.service.link.joined
        assert second.service.link.joined
        first.router.check()
        second.router.check()


class Linked:
    """In place of a worker's link."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = asyncio.Event()
        self.on_ended: list[Callable[[int], None]] = []


@pytest.fixture
def memory() -> Iterator[int]:
    """What two workers share."""
    descriptor = make_memory(2, more=reports_bytes(2))
    yield descriptor
    os.close(descriptor)


def applied_at(one: Member) -> list[PeerReport]:
    """The reports that a router applies from now on, by any way."""
    found: list[PeerReport] = []
    apply = one.router.peers.on_report

    def on_report(report: PeerReport, *, now: float, age_s: float = 0.0) -> list[Action]:
        found.append(report)
        return apply(report, now=now, age_s=age_s)

    one.router.peers.on_report = on_report  # type: ignore[method-assign]
    return found


async def test_workers_of_one_router_hear_of_each_other_at_once_and_of_everything_once(
    redis_server: RedisServer, memory: int
) -> None:
    """Each is a member of the group; what one worker did counts once at the other worker and at another router."""
    shared = redis_server.shared()
    async with member(shared, "eu", boot_id="w0") as first, member(shared, "eu", boot_id="w1") as second:
        links = [Linked(0), Linked(1)]
        rings = [SharedReports(memory, 2, own=number) for number in range(2)]
        workers = [
            LocalPeers(link, ring, each.router, each.gateway, each.clock, key_id=KEY_ID, store=each.service)  # type: ignore[arg-type]
            for link, ring, each in zip(links, rings, (first, second), strict=True)
        ]
        async with member(shared, "us") as third:
            await until(lambda: sorted(third.heard) == ["eu"] and len(third.service.known_peers()) == 2)
            for worker in workers:
                worker.write_report()
            for worker in workers:
                worker.read_reports()
            await until(lambda: len(second.service.known_peers()) == 2)
            near, far = applied_at(second), applied_at(third)
            for number in range(12):
                first.dispatch(f"r{number}", tokens=1000 + number)
                workers[0].write_report()
                workers[1].read_reports()
                assert second.load_of_others() == number + 1, "without the store"
                await asyncio.sleep(0.03)
            first.serve("served")
            await until(lambda: third.load_of_others() == 13.0 and third.knows_prefixes())
            workers[0].write_report()
            workers[1].read_reports()
            assert second.load_of_others() == 13.0

            def prefilled_s(reports: list[PeerReport]) -> float:
                own = [each for each in reports if each.router == first.service.member]
                return sum(prefill.prefill_s for report in own for prefill in report.prefills)

            assert prefilled_s(near) == pytest.approx(prefilled_s(far))
            assert len(near) > 12
            workers[0].write_report()
            links[1].on_ended[0](0)
            workers[1].read_reports()
            assert second.load_of_others() == 0.0, "a worker that has ended has nothing in flight"


async def test_a_long_prefill_is_reported_before_its_turn(redis_server: RedisServer) -> None:
    """With reports in turn the store has one each 100 ms; of ten long prefills in 100 ms it has most at once."""
    shared = redis_server.shared()
    async with member(shared, "eu-1") as first, member(shared, "eu-2") as second:
        await until(lambda: first.heard == {"eu-2": True})
        seen: set[float] = set()
        for number in range(10):
            first.dispatch(f"r{number}", tokens=3000)
            for _ in range(6):
                await asyncio.sleep(0.005)
                seen.add(second.load_of_others())
        assert len(seen) >= 6


async def test_a_router_that_joins_has_the_history_of_the_others_in_its_order(redis_server: RedisServer) -> None:
    shared = redis_server.shared()
    async with member(shared, "eu-1") as first:
        first.serve("r1")
        await until(lambda: first.service.counts.reports["written"] > 0 and not first.service.peers.outbox)
    # It has ended; the store has its history.
    async with member(shared, "eu-2") as second:
        await second.service.wait_joined(5.0)
        await until(lambda: second.knows_prefixes())


@pytest.mark.system
async def test_a_restarted_router_is_another_one(redis_server: RedisServer) -> None:
    shared = redis_server.shared()
    async with member(shared, "eu-2") as second:
        for run in ("run1", "run2"):
            async with member(shared, "eu-1", boot_id=run) as first:
                first.dispatch(run)
                await until(partial(listed, second, f"eu-1/{run}"))
        assert {row.router for row in second.service.known_peers()} == {"eu-1/run1", "eu-1/run2"}
        # The load of both counts until each is silent for long enough.
        await until(lambda: second.load_of_others() == 0.0)


async def test_age_of_a_report_is_by_the_stores_clock(redis_server: RedisServer) -> None:
    """The host's clock is five seconds off, to either side."""
    shared, clock = redis_server.shared(), epoch_clock()
    async with (
        member(shared, "eu-1", clock=lambda: clock() - 5.0) as behind,
        member(shared, "eu-2", clock=lambda: clock() + 5.0) as ahead,
        member(shared, "eu-3") as right,
    ):
        for one in (behind, ahead, right):
            one.serve(f"r{one.service.member}")
        for one in (behind, ahead, right):
            await until(partial(one.hears_of, 2.0))
            assert all(row.counts and 0.0 <= row.age_s < 1.0 for row in one.service.known_peers())


async def test_a_router_with_another_key_shares_load_alone(redis_server: RedisServer) -> None:
    shared = redis_server.shared()
    async with member(shared, "eu-1", key_id="other") as first, member(shared, "eu-2") as second:
        first.serve("r1")
        await until(lambda: second.load_of_others() == 1.0)
        assert not second.knows_prefixes()
        (row,) = second.service.known_peers()
        assert list(row.differences) == ["key"]
        assert second.service.measures().differing == {"key": 1}


async def test_groups_do_not_hear_of_each_other(redis_server: RedisServer) -> None:
    async with (
        member(redis_server.shared(group="one"), "eu-1") as first,
        member(redis_server.shared(group="two"), "eu-2") as second,
    ):
        first.dispatch("r1")
        await until(lambda: first.service.counts.reports["written"] > 3 and second.service.link.joined)
        assert second.heard == {}


async def test_disagreements_are_named(redis_server: RedisServer) -> None:
    shared = redis_server.shared()
    async with member(shared, "eu-1", policy="least-load"), member(shared, "eu-2") as second:
        await until(lambda: bool(second.service.known_peers()))
        (row,) = second.service.known_peers()
        assert row.differences == {"policy": "policy least-load, here gorgo-ms"}


async def test_an_ejection_of_a_peer_is_probed_at_once(redis_server: RedisServer) -> None:
    shared = redis_server.shared()
    async with member(shared, "eu-1") as first, member(shared, "eu-2") as second:
        await until(lambda: first.heard == {"eu-2": True})
        report = PeerReport("eu-9/x", 1, KEY_ID, status=PeerStatus("gorgo-ms", ejected=("b",)))
        await put(redis_server, "eu-9/x", encode_report(report))
        await until(lambda: first.probed == ["b"] and second.probed == ["b"])


async def put(server: RedisServer, name: str, text: bytes, *, field: bytes = b"report", key: str = GROUP_KEY) -> None:
    """Write an entry as some router would, or somebody with another key."""
    names = StoreNames("g", seal_key(server.shared(), {server.shared().key_env: key}))
    async with store_client(server.shared(), {}) as client:
        number = await client.xadd(names.stream(name), {field: names.sealed(name, text)})
        assert isinstance(number, bytes)
        await client.zadd(names.members, {names.listed(name): int(number.partition(b"-")[0])})


async def test_what_somebody_without_the_group_s_key_writes_is_not_parsed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parsed: list[bytes] = []

    def decode(text: bytes) -> PeerReport:
        parsed.append(text)
        return decode_report(text)

    monkeypatch.setattr("gorgo.live.peer_store.streams.decode_report", decode)
    report = encode_report(PeerReport("eu-2/run1", 10**9, KEY_ID, loads=(ReplicaLoad("a", 50),)))
    async with member(redis_server.shared(), "eu-1") as first, member(redis_server.shared(), "eu-2") as second:
        await until(lambda: first.heard == {"eu-2": True})
        await put(redis_server, "eu-2/run1", report, key="f" * 32)
        await put(redis_server, "eu-9/x", report, key="f" * 32)
        await until(lambda: first.service.counts.reports["forged"] == 1)
        second.dispatch("r1")
        await until(lambda: first.load_of_others() == 1.0)
        assert first.heard == {"eu-2": True}
    assert report not in parsed
    assert "peer_entry_forged" in {record.getMessage() for record in caplog.records}


async def test_a_flood_of_forged_members_hides_neither_an_old_one_nor_a_new_one(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.peer_store.streams.MAX_LISTED", 50)
    shared = redis_server.shared()
    async with member(shared, "eu-1") as first, member(shared, "eu-2") as second:
        await until(lambda: first.heard == {"eu-2": True})
        async with store_client(shared, {}) as client:
            await client.zadd(StoreNames("g", b"").members, {f"eu-{n}/x#{n:032x}": 2**50 for n in range(200)})
        second.dispatch("r1")
        await until(lambda: first.load_of_others() == 1.0)
        async with member(shared, "eu-3"):
            await until(lambda: first.heard == {"eu-2": True, "eu-3": True})


async def test_reports_of_another_version_are_named_once_and_the_others_count(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gorgo")
    newer = json.loads(encode_report(PeerReport("eu-9/x", 1, KEY_ID)))
    newer[0] += 1
    async with member(redis_server.shared(), "eu-1") as first, member(redis_server.shared(), "eu-2") as second:
        for _ in range(3):
            await put(redis_server, "eu-9/x", json.dumps([*newer, "more"]).encode())
        await until(lambda: first.service.counts.reports["other_format"] == 3)
        assert first.service.measures().differing == {"format": 1}
        second.dispatch("r1")
        await until(lambda: first.load_of_others() == 1.0)
    events = [record.getMessage() for record in caplog.records]
    assert events.count("peer_report_unreadable") == 2  # once for each of both


async def test_entries_that_are_no_report_of_their_member_are_counted_and_skipped(redis_server: RedisServer) -> None:
    stolen = encode_report(PeerReport("eu-2/run1", 10**9, KEY_ID, loads=(ReplicaLoad("a", 50),)))
    async with member(redis_server.shared(), "eu-1") as first, member(redis_server.shared(), "eu-2") as second:
        await put(redis_server, "eu-9/x", stolen)
        await put(redis_server, "eu-9/x", b"\xff" * 100)
        await put(redis_server, "eu-9/x", PROMPT, field=b"other")
        reports = first.service.counts.reports
        await until(lambda: (reports["foreign"], reports["malformed"]) == (1, 2))
        second.dispatch("r1")
        await until(lambda: first.load_of_others() == 1.0)


async def test_a_gap_in_the_numbers_of_reports_is_counted(redis_server: RedisServer) -> None:
    async with member(redis_server.shared(), "eu-1") as first:
        for seq in (1, 2, 6, 7):
            await put(redis_server, "eu-9/x", encode_report(PeerReport("eu-9/x", seq, KEY_ID)))
        await until(lambda: first.service.counts.reports["read"] == 4)
        assert first.service.counts.reports["missed"] == 3


# --- A store that fails in every way: routers go on alone, say so once, and know each other again by themselves.


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


@pytest.mark.system
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
    monkeypatch.setattr("gorgo.live.peer_store.streams.MAX_PREFIXES", 3)
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
