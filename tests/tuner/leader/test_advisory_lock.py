"""Leadership in a real PostgreSQL: one holder, lost with its connection."""

from __future__ import annotations

import asyncio

import pytest

from gorgo.errors import LeadershipLost
from tests.tuner.history.postgres_server import PostgresServer
from tuner.leader import advisory_lock
from tuner.leader.advisory_lock import AdvisoryLock, lock_key


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    return postgres.new_database()


async def test_of_two_candidates_one_leads_and_the_other_after_it(database: str) -> None:
    first, second = (AdvisoryLock(database, ["http://a", "http://b"]) for _ in range(2))
    assert await first.try_to_lead() is None
    assert await second.try_to_lead() == "another process leads"
    await first.confirm_leadership()
    await first.release()
    assert await second.try_to_lead() is None
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
    assert await standby.try_to_lead() is None
    with pytest.raises(LeadershipLost, match="connection with the advisory lock is lost"):
        await lock.confirm_leadership()
    await standby.release()


async def test_a_server_that_says_nothing_is_a_lost_leadership_and_hangs_no_thread(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisory_lock, "QUERY_S", 0.3)
    lock = AdvisoryLock(database, ["http://a"])
    assert await lock.try_to_lead() is None
    assert lock._connection is not None
    blocked = asyncio.create_task(asyncio.to_thread(advisory_lock._query, lock._connection, "SELECT pg_sleep(60)"))
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
