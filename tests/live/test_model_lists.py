"""Lists of models of replicas: one fetch and one answer for all clients with the same key, counted for each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.config.model import ClientRuleConfig, ClientsConfig
from gorgo.live.model_lists import FRESH_S, MAX_LISTS, ModelLists
from tests.proxy.conftest import Start, config_for
from tests.proxy.fakes import answer
from tests.proxy.intruders.test_client_keys import KEY, OTHER, entry


class Lists:
    """Lists at a time that the test sets, with a fetch that waits for the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fetched = 0
        self.open = asyncio.Event()
        self.lists = ModelLists(lambda: self.now)

    async def fetch(self) -> bytes:
        self.fetched += 1
        number = self.fetched
        await self.open.wait()
        return b"%d" % number

    def get(self, key: bytes = b"k") -> asyncio.Task[bytes]:
        return asyncio.ensure_future(self.lists.get([(b"accept", b"a"), (b"authorization", key)], self.fetch))


async def test_many_at_once_share_one_fetch_and_the_next_ones_its_answer() -> None:
    lists = Lists()
    waiting = [lists.get() for _ in range(300)]
    await asyncio.sleep(0)
    lists.open.set()
    assert set(await asyncio.gather(*waiting)) == {b"1"}
    lists.now = FRESH_S - 0.1
    assert await lists.get() == b"1"
    lists.now = FRESH_S
    assert await lists.get() == b"2"


async def test_another_key_has_another_answer_and_their_number_is_bounded() -> None:
    lists = Lists()
    lists.open.set()
    for number in range(MAX_LISTS + 1):
        assert await lists.get(b"%d" % number) == b"%d" % (number + 1)
    assert await lists.get(b"1") == b"2"  # still there
    assert await lists.get(b"0") == b"%d" % (MAX_LISTS + 2)


async def test_a_client_that_leaves_ends_no_fetch_of_others_and_a_failure_is_not_an_answer() -> None:
    lists = Lists()
    first, second = lists.get(), lists.get()
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    lists.open.set()
    assert await second == b"1"

    async def fail() -> bytes:
        raise OSError("no replica")

    with pytest.raises(OSError, match="no replica"):
        await lists.lists.get([(b"authorization", b"new")], fail)
    assert await lists.get(b"new") == b"2"


async def test_three_hundred_calls_reach_the_replica_once_and_count_for_their_client(
    start: Start, tmp_path: Path
) -> None:
    replica = await start.replica(answer(200, b'{"object": "list", "data": []}'))
    path = tmp_path / "clients.keys"
    path.write_text(f"{entry('alice', KEY)}\n{entry('bob', OTHER)}\n")
    rule = ClientRuleConfig(name="alice", requests_per_minute=6.0)
    config = replace(config_for([replica]), clients=ClientsConfig(keys_file=str(path), rules=(rule,)))
    fleet = await start.proxy(config, [replica])

    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await fleet.client.get("/v1/models", headers=headers)).status_code

    assert [await status(KEY) for _ in range(3)] == [200, 429, 429]
    assert await asyncio.gather(*(status(OTHER) for _ in range(300))) == [200] * 300
    assert len([seen for seen in replica.seen if seen.path == "/v1/models"]) == 1
