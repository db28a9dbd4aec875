"""Many reloads under load: no request fails, and nothing is left of any of them."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from gorgo.core.fleet.snapshot import ReplicaSnapshot
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, REPLICA, FakeReplica, chat, delta
from tests.proxy.followed import Followed, follow, regions

CHAT = "/v1/chat/completions"
CLIENTS = 4
RAMP_S = 0.01
#: Of the last requests and versions, up to a bound that is not reached here; and series of replicas in the fleet, which
#: depend on who got traffic last.
BOUNDED = {"Sample", "Decision", "TtftEstimate", "WeightsChange", "Counter", "Histogram"}
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
    # The Router knows who joined until its ramp is over; ramps end here before anything is counted.
    made = partial(regions, overload={"slow_start_s": RAMP_S})
    return [
        made({"a": a, "b": b}),
        made({"a": a, "b": b, "c": c}),
        made({"a": a, "b": b, "c": d}),
        made({"a": a, "b": {"url": b.url, "draining": True}, "c": d}),
        b"proxy: [",
        made({"a": a, "c": {"url": d.url, "models": ["m"]}}),
        made({"a": a, "c": {"url": d.url, "models": ["m"]}}, limits={"max_attempts": 2}),
        made({"d": d}, proxy={"policy": "gorgo", "weights": {"w_rtt": 0.7}}),
        made({"d": d, "a": b}, proxy={"policy": "gorgo", "probe_interval_s": 1000.0}),
        made({"a": c, "b": d}, proxy={"policy": "least-load"}),
    ]


@dataclass(frozen=True)
class Kept:
    """What a leak would show in, once nothing runs."""

    tasks: int
    descriptors: int
    #: Of replicas that are gone.
    old_series: int
    #: By class, those of this project.
    objects: Counter[str]
    rss_kib: int


def kept(followed: Followed) -> Kept:
    gc.collect()
    return Kept(
        tasks=len(asyncio.all_tasks()),
        descriptors=len(os.listdir("/proc/self/fd")),
        old_series=len(replicas_with_series(followed) - followed.state.replicas.targets.keys()),
        objects=Counter(
            type(found).__qualname__ for found in gc.get_objects() if f"{type(found).__module__}".startswith("gorgo.")
        ),
        rss_kib=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024,
    )


def replicas_with_series(followed: Followed) -> set[str]:
    families = followed.state.telemetry.metrics.registry.collect()
    return {sample.labels["replica"] for family in families for sample in family.samples if "replica" in sample.labels}


async def quiet(followed: Followed, first: bytes) -> Kept:
    """As it was at the start, with nothing open and no connection but those of the replicas in the fleet."""
    await followed.rewrite(first)
    await followed.fleet.idle()
    await until(lambda: not followed.state.replicas.draining_targets)
    await until(lambda: all(view.slow_start_for_s is None for view in views(followed)))
    response = await followed.fleet.client.post(CHAT, content=chat(stream=True))  # at which ramps are forgotten
    assert response.status_code == 200
    await followed.fleet.idle()
    return kept(followed)


def views(followed: Followed) -> list[ReplicaSnapshot]:
    return followed.state.routing.router.view.snapshots(now=followed.state.routing.clock())


async def reload_often(start: Start, folder: Path, *, warm_up: int, reloads: int) -> tuple[Kept, Kept]:
    """Reload under load, in two parts. Answers what was there after each."""
    fakes = [await start.replica(in_pieces) for _ in range(4)]
    for fake in fakes:
        fake.metrics, fake.loads = "sglang:num_running_reqs 0.0\n", {"loads": []}
    edits = texts(fakes)
    followed = await follow(start, folder, edits[0], fakes)
    served = 0
    seen: list[Kept] = []
    for count in (warm_up, reloads - warm_up):
        replay = Replay(followed)
        async with replay.running():
            for text in itertools.islice(itertools.cycle(edits), count):
                await followed.rewrite(text)
        assert replay.wrong == []
        served += replay.served
        seen.append(await quiet(followed, edits[0]))
    assert (followed.count("applied") + followed.count("refused")) == reloads + 2
    assert followed.count("refused") == reloads / len(edits)
    assert served > reloads, "the load was there"
    followed.state.routing.router.index.check()
    warm, end = seen
    return warm, end


def check_nothing_is_left(warm: Kept, end: Kept) -> None:
    assert end.tasks <= warm.tasks + 2
    # The clients' and the replicas' ends of idle connections are counted too, and come and go.
    assert end.descriptors <= warm.descriptors + 4 * CLIENTS
    assert end.old_series == warm.old_series == 0
    assert warm.objects["UpstreamClient"] >= 2, "objects are counted"
    grown = {name: (warm.objects[name], count) for name, count in end.objects.items() if count > warm.objects[name]}
    assert grown.keys() <= BOUNDED, grown


@pytest.mark.system
async def test_a_hundred_reloads_during_a_replay_lose_nothing_and_leave_nothing(start: Start, tmp_path: Path) -> None:
    check_nothing_is_left(*await reload_often(start, tmp_path, warm_up=20, reloads=100))


@pytest.mark.system
@pytest.mark.timeout(240)  # 40 s on two idle cores
async def test_a_thousand_reloads_during_a_replay_do_not_grow_the_process(start: Start, tmp_path: Path) -> None:
    # By the end of the warm-up caches, rings and the allocator have what they keep.
    warm, end = await reload_often(start, tmp_path, warm_up=300, reloads=1000)
    check_nothing_is_left(warm, end)
    # A leak of one upstream or one stream's buffers per reload would be 50 % and more.
    assert end.rss_kib < warm.rss_kib * 1.10
