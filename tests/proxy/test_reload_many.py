"""A thousand reloads under load: no request fails, and nothing is left of any of them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from gorgo.proxy.upstream import HttpUpstream
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, REPLICA, FakeReplica, chat, delta
from tests.proxy.followed import Followed, follow, regions

CHAT = "/v1/chat/completions"
RELOADS = 1000
#: Until caches, rings and the allocator have what they keep.
WARM_UP = 300
CLIENTS = 4
WORDS = [delta("one"), delta("two"), delta("three"), DONE]


async def in_pieces(request: web.Request, _: bytes) -> web.StreamResponse:
    """A stream that spans several turns of the loop, so that reloads fall into it."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for word in WORDS:
        await response.write(word)
        await asyncio.sleep(0.001)
    request.app[REPLICA].seen.clear()  # the test's own memory must not grow either
    return response


@dataclass
class Replay:
    """Clients that ask one after another until told to stop."""

    followed: Followed
    served: int = 0
    wrong: list[str] = field(default_factory=list)
    stop: bool = False

    async def client(self, number: int) -> None:
        for turn in itertools.count():
            if self.stop:
                return
            # Long prompts of a few sessions: the index has something to keep and something to lose.
            text = f"session {number} {turn % 7} " * 100
            body = chat(stream=True, messages=[{"role": "user", "content": text}])
            response = await self.followed.fleet.client.post(CHAT, content=body)
            if response.status_code != 200 or response.content != b"".join(WORDS):
                self.wrong.append(f"{response.status_code} {response.text}")
            self.served += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self.client(number))
            try:
                yield
            finally:
                self.stop = True


def texts(fakes: list[FakeReplica]) -> list[bytes]:
    """One round of edits: come, go, move, drain, other words, other settings, a broken file."""
    a, b, c, d = fakes
    return [
        regions({"a": a, "b": b}),
        regions({"a": a, "b": b, "c": c}),
        regions({"a": a, "b": b, "c": d}),
        regions({"a": a, "b": {"url": b.url, "draining": True}, "c": d}),
        b"proxy: [",
        regions({"a": a, "c": {"url": d.url, "models": ["m"]}}),
        regions({"a": a, "c": {"url": d.url, "models": ["m"]}}, limits={"max_attempts": 2}),
        regions({"d": d}, proxy={"policy": "gorgo", "weights": {"w_rtt": 0.7}}),
        regions({"d": d, "a": b}, proxy={"policy": "gorgo", "probe_interval_s": 1000.0}),
        regions({"a": c, "b": d}, proxy={"policy": "least-load"}),
    ]


@dataclass(frozen=True)
class Kept:
    """What a leak would show in, once nothing runs."""

    tasks: int
    descriptors: int
    upstreams: int
    #: Of replicas that are gone. Those of the others depend on who got traffic last.
    old_series: int
    rss_kib: int


def kept(followed: Followed) -> Kept:
    gc.collect()
    urls = {replica.url for replica in followed.fleet.replicas}
    return Kept(
        tasks=len(asyncio.all_tasks()),
        descriptors=len(os.listdir("/proc/self/fd")),
        # By address: what a test before this one left to the collector is not this one's.
        upstreams=sum(isinstance(found, HttpUpstream) and found._base in urls for found in gc.get_objects()),
        old_series=len(replicas_with_series(followed) - followed.state.targets.keys()),
        rss_kib=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024,
    )


def replicas_with_series(followed: Followed) -> set[str]:
    families = followed.state.metrics.registry.collect()
    return {sample.labels["replica"] for family in families for sample in family.samples if "replica" in sample.labels}


async def quiet(followed: Followed, first: bytes) -> Kept:
    """As it was at the start, with nothing open and no connection but those of the replicas in the fleet."""
    await followed.rewrite(first)
    await followed.fleet.idle()
    await until(lambda: not followed.state.leaving)
    return kept(followed)


@pytest.mark.timeout(240)  # 15 s on two idle cores
async def test_a_thousand_reloads_during_a_replay_lose_nothing_and_leave_nothing(start: Start, tmp_path: Path) -> None:
    fakes = [await start.replica(in_pieces) for _ in range(4)]
    for fake in fakes:
        fake.metrics, fake.loads = "sglang:num_running_reqs 0.0\n", {"loads": []}
    edits = texts(fakes)
    followed = await follow(start, tmp_path, edits[0], fakes)
    served = []
    seen: list[Kept] = []
    for reloads in (WARM_UP, RELOADS - WARM_UP):
        replay = Replay(followed)
        async with replay.running():
            for text in itertools.islice(itertools.cycle(edits), reloads):
                await followed.rewrite(text)
        assert replay.wrong == []
        served.append(replay.served)
        seen.append(await quiet(followed, edits[0]))
    assert (followed.count("applied") + followed.count("refused")) == RELOADS + 2
    assert followed.count("refused") == RELOADS / len(edits)
    assert sum(served) > RELOADS, "the load was there"
    followed.state.router.index.check()
    warm, end = seen
    assert end.tasks <= warm.tasks + 2
    # The clients' and the replicas' ends of idle connections are counted too, and come and go.
    assert end.descriptors <= warm.descriptors + 4 * CLIENTS
    assert end.upstreams == warm.upstreams == 2
    assert end.old_series == warm.old_series == 0
    # A leak of one upstream or one stream's buffers per reload would be 50 % and more.
    assert end.rss_kib < warm.rss_kib * 1.10
