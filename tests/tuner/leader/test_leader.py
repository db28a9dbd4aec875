"""Leadership in a real store and in a real PostgreSQL: one holder, lost with its connection."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gorgo.errors import HistoryError, LeadershipLost
from gorgo.live.peer_store.connection import store_client
from tests.live.peer_store.server import ENVIRON, RedisServer, needs_redis
from tests.tuner.history.postgres_server import PostgresServer
from tuner import leader
from tuner.leader import MARGIN_S, AdvisoryLock, FileLock, StoreLease, lock_key

# --- Leadership in a real PostgreSQL: one holder, lost with its connection.


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


async def leads_soon(lock: AdvisoryLock) -> None:
    """The server frees the locks of a connection when its process has ended, a little after the connection."""
    async with asyncio.timeout(10):
        while (reason := await lock.try_to_lead()) is not None:
            assert reason == "another process leads"
            await asyncio.sleep(0.01)


async def test_of_two_candidates_one_leads_and_the_other_after_it(database: str) -> None:
    first, second = (AdvisoryLock(database, ["http://a", "http://b"]) for _ in range(2))
    assert await first.try_to_lead() is None
    assert await second.try_to_lead() == "another process leads"
    await first.confirm_leadership()
    await first.release()
    await leads_soon(second)
    with pytest.raises(LeadershipLost):
        await first.confirm_leadership()
    await second.release()


async def test_a_group_that_shares_a_proxy_does_not_lead_beside_it_and_locks_nothing(database: str) -> None:
    first, overlapping, other = (
        AdvisoryLock(database, urls) for urls in (["http://b"], ["http://a", "http://b"], ["http://a"])
    )
    assert await first.try_to_lead() is None
    assert await overlapping.try_to_lead() == "another process leads"
    assert await other.try_to_lead() is None
    for lock in (first, overlapping, other):
        await lock.release()


async def test_a_lost_connection_is_a_lost_leadership(database: str) -> None:
    import psycopg

    lock, standby = (AdvisoryLock(database, ["http://a"]) for _ in range(2))
    assert await lock.try_to_lead() is None
    with psycopg.connect(database, autocommit=True) as operator:
        operator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    await leads_soon(standby)
    with pytest.raises(LeadershipLost, match="connection with the advisory lock is lost"):
        await lock.confirm_leadership()
    await standby.release()


async def test_a_server_that_says_nothing_is_a_lost_leadership_and_hangs_no_thread(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "QUERY_S", 0.3)
    lock = AdvisoryLock(database, ["http://a"])
    assert await lock.try_to_lead() is None
    assert lock._connection is not None
    blocked = asyncio.create_task(asyncio.to_thread(leader._query, lock._connection, "SELECT pg_sleep(60)"))
    await asyncio.sleep(0.1)
    with pytest.raises(LeadershipLost):
        await lock.confirm_leadership()
    async with asyncio.timeout(10):
        await asyncio.gather(blocked, return_exceptions=True)
    assert blocked.exception() is not None


async def test_a_database_without_an_answer_is_a_reason_and_no_error() -> None:
    lock = AdvisoryLock("postgresql://gorgo@127.0.0.1:1/history", ["http://a"])
    assert await lock.try_to_lead() == "postgresql+psycopg://gorgo@127.0.0.1:1/history gives no lock: OperationalError"
    with pytest.raises(LeadershipLost):
        await lock.confirm_leadership()


def test_keys_are_numbers_of_the_address_that_postgresql_takes() -> None:
    keys = [lock_key(f"http://{name}") for name in "abcdefgh"]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


HOLDER = """
import asyncio, sys
from pathlib import Path
from tuner.leader import FileLock
assert asyncio.run(FileLock(Path(sys.argv[1]), ["http://a"]).try_to_lead()) is None
print("leads", flush=True)
sys.stdin.read()
"""


async def test_second_candidate_is_refused_with_the_process_that_leads(tmp_path: Path) -> None:
    first, second = (FileLock(tmp_path / "h", ["http://a"]) for _ in range(2))
    assert await first.try_to_lead() is None
    assert await second.try_to_lead() == f"process {os.getpid()} tunes http://a with this history"
    await first.release()
    assert await second.try_to_lead() is None
    await second.release()


async def test_groups_that_share_a_proxy_exclude_each_other_and_others_do_not(tmp_path: Path) -> None:
    first, overlapping, other = (
        FileLock(tmp_path / "h", urls) for urls in (["http://a", "http://b"], ["http://b", "http://c"], ["http://c"])
    )
    assert await first.try_to_lead() is None
    assert await overlapping.try_to_lead() == f"process {os.getpid()} tunes http://b with this history"
    assert await other.try_to_lead() is None, "a refused candidate locks nothing"
    await first.release()
    await other.release()


async def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "h")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "leads\n"
        lock = FileLock(tmp_path / "h", ["http://a"])
        assert await lock.try_to_lead() == f"process {holder.pid} tunes http://a with this history"
        holder.kill()
        holder.wait()
    assert await lock.try_to_lead() is None
    await lock.confirm_leadership()
    await lock.release()


async def test_a_folder_that_is_missing_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"nowhere/h\.[0-9a-f]{12}\.lock: No such file"):
        await FileLock(tmp_path / "nowhere" / "h", ["http://a"]).try_to_lead()


async def test_a_lock_leaves_no_file_open_for_writing(tmp_path: Path) -> None:
    """A disk with one cannot be made read-only."""
    lock = FileLock(tmp_path / "history.sqlite3", ["http://a", "http://b"])
    assert await lock.try_to_lead() is None
    modes = [fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE for file in lock._open]
    assert modes == [os.O_RDONLY] * 2
    assert [path.read_text() for path in sorted(tmp_path.glob("*.lock"))] == [f"{os.getpid()}\n"] * 2
    await lock.release()


# --- The lease in a real store: one holder, renewed, deleted by its holder alone, ended by the holder's own clock.


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


@needs_redis
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


@needs_redis
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


@needs_redis
async def test_a_holder_without_renewals_stops_before_another_one_may_lead(redis_server: RedisServer) -> None:
    clock = Clock()
    async with candidates(redis_server, 1, lease_s=10.0, clock=clock) as (lease,):  # type: ignore[arg-type]
        assert await lease.try_to_lead() is None
        clock.now = 10.0 - MARGIN_S - 0.01
        await lease.confirm_leadership()
        clock.now = 10.0 - MARGIN_S
        with pytest.raises(LeadershipLost, match="has ended"):
            await lease.confirm_leadership()


@needs_redis
async def test_a_release_deletes_no_lease_of_another_process(redis_server: RedisServer) -> None:
    async with candidates(redis_server, 1) as (lease,):
        assert await lease.try_to_lead() is None
        redis_server.command("SET", KEY, "another holder")
        await lease.release()
        assert b"another holder" in redis_server.command("GET", KEY)


@needs_redis
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


@needs_redis
async def test_a_store_without_an_answer_is_a_reason_and_no_error(redis_server: RedisServer) -> None:
    async with candidates(redis_server, 1) as (lease,):
        redis_server.kill()
        try:
            assert str(await lease.try_to_lead()).startswith("the store gives no lease: ")
        finally:
            redis_server.start()
        assert await lease.try_to_lead() is None
