"""The four states of the published cache map, in one process, and over a restart of the router."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, ModelConfig, RegionConfig
from gorgo.lab.engine_server import cache_reports as reporter
from gorgo.lab.engine_server import run_engine, server
from gorgo.lab.engine_server.cache_reports import PushReporter, PushTarget
from tests.lab.engine_server.conftest import QUICK
from tests.ports import free_port
from tests.proxy.conftest import QUIET, Running, Start, until

# --- The four states of the published cache map, with a simulated engine that pushes to a proxy over sockets.
#
# Cold start, stickiness beside a less loaded replica, eviction, recovery after lost reports. Intervals are short;
# those in use are 5 s for the whole cache and 0.1 s for evictions.


TOKENS = {"PUSH_0": "token-of-replica-0", "PUSH_1": "token-of-replica-1"}
#: 128 blocks of 16 tokens.
SMALL = replace(QUICK, kv_tokens=2048, context_tokens=2048)
PROMPT_TOKENS = 512
SYNC_S = 0.25


@dataclass
class Answer:
    replica: str
    estimated: int
    reported: int
    source: str


@dataclass
class Fleet:
    """A proxy over two engines that push."""

    proxy: Running

    async def ask(self, prompt: str, *, output: int = 1) -> Answer:
        body = {"model": "gorgo-sim", "prompt": prompt, "max_tokens": output}
        answer = await self.proxy.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        decisions = self.proxy.state.routing.router.view.decisions(answer.headers["x-request-id"])
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        return Answer(
            decisions[-1].replica,
            decisions[-1].estimated_cached_tokens,
            details.get("cached_tokens", 0),
            decisions[-1].cache_source,
        )

    def blocks(self, replica: str) -> int:
        feed = self.proxy.state.routing.router.caches.pushed_feed(replica, "gorgo-sim", 16)
        return 0 if feed is None else feed.reported_blocks

    def stats(self, replica: str) -> Any:
        return self.proxy.state.replicas.targets[replica].pushes.stats

    async def synced(self, replica: str) -> None:
        """Wait for a whole push that began after now."""
        before = self.stats(replica).snapshots
        await until(lambda: self.stats(replica).snapshots >= before + 2)


def prompt(number: int) -> str:
    """Return a prompt of as many tokens, four bytes each."""
    return "".join(f"{number:02d}{place:02x}"[:4] for place in range(256)) * (PROMPT_TOKENS // 256)


@asynccontextmanager
async def engine(port: int, target: PushTarget) -> AsyncIterator[None]:
    stop, bound = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(
        run_engine(
            name=target.replica,
            profile=SMALL,
            rtt_ms=0.0,
            seed=0,
            host="127.0.0.1",
            port=port,
            ready=lambda *_: bound.set(),
            stop=stop,
            push=target,
            notify=lambda _: None,
        )
    )
    try:
        waiting = asyncio.create_task(bound.wait())
        await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()
        yield
    finally:
        stop.set()
        await running


@pytest.fixture
async def fleet(start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(server, "PushReporter", partial(PushReporter, sync_s=SYNC_S, batch_s=0.01))
    monkeypatch.setattr(reporter, "LEAST_SYNC_S", 0.05)
    ports = [free_port(), free_port()]
    rows = tuple(
        ReplicaConfig(
            name=f"r{n}", region="here", url=f"http://127.0.0.1:{port}", engine="sglang", push_token_env=f"PUSH_{n}"
        )
        for n, port in enumerate(ports)
    )
    config = Config(
        proxy=replace(QUIET, policy="sticky-least-loaded"),
        regions=(RegionConfig(name="here"),),
        replicas=rows,
        models=(ModelConfig(name="gorgo-sim", tokenizer="simulated"),),
    )
    proxy = await start.proxy(config, [], environ=TOKENS)
    async with AsyncExitStack() as engines:
        for n, port in enumerate(ports):
            target = PushTarget(
                url=proxy.addresses.admin_url, replica=f"r{n}", model="gorgo-sim", token=TOKENS[f"PUSH_{n}"]
            )
            await engines.enter_async_context(engine(port, target))
        found = Fleet(proxy)
        await until(lambda: all(found.stats(f"r{n}").snapshots for n in range(2)))
        yield found


async def test_cold_start_is_known_after_one_push(fleet: Fleet) -> None:
    first = await fleet.ask(prompt(1))
    assert (first.estimated, first.reported) == (0, 0)
    await until(lambda: fleet.blocks(first.replica) >= PROMPT_TOKENS // 16)
    second = await fleet.ask(prompt(1))
    assert (second.replica, second.source) == (first.replica, "push")
    assert second.estimated >= second.reported >= PROMPT_TOKENS - 16
    assert second.estimated - second.reported <= 16, "of a whole prompt the last block is computed"


async def test_holder_is_chosen_beside_a_less_loaded_replica(fleet: Fleet) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)
    busy = [asyncio.create_task(fleet.ask(prompt(1), output=400)) for _ in range(3)]
    await until(lambda: fleet.proxy.state.replicas.targets[holder].active == 3)
    assert (await fleet.ask(prompt(1))).replica == holder
    assert {answer.replica for answer in await asyncio.gather(*busy)} == {holder}


async def test_evicted_prompt_is_unknown_after_one_batch(fleet: Fleet) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)
    await fill(fleet, holder)
    answer = await fleet.ask(prompt(1))
    assert (answer.estimated, answer.reported) == (0, 0)
    assert fleet.stats(holder).evictions > 0


async def test_phantoms_of_lost_evictions_end_with_the_next_whole_push(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await fleet.synced(holder)
    push = PushReporter._push

    async def losing(self: PushReporter, session: Any, route: str, hashes: Any) -> Any:
        if route == "eviction":
            self._sequence += 1
            return "done"
        return await push(self, session, route, hashes)

    monkeypatch.setattr(PushReporter, "_push", losing)
    await fill(fleet, holder, synced=False)
    await fleet.synced(holder)
    answer = await fleet.ask(prompt(1))
    assert (answer.estimated, answer.reported) == (0, 0)
    assert fleet.stats(holder).lost > 0, "the gap in the sequence is counted"


async def test_router_that_forgot_knows_again_after_one_whole_push(fleet: Fleet) -> None:
    holder = (await fleet.ask(prompt(1))).replica
    await fleet.synced(holder)
    fleet.proxy.state.routing.router.caches.flush(now=fleet.proxy.state.routing.clock())
    assert fleet.blocks(holder) == 0
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)
    assert (await fleet.ask(prompt(1))).replica == holder
    fleet.proxy.state.routing.router.check()


async def test_the_four_states_follow_one_another_on_one_fleet(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run as in the published benchmark: of each state, what is estimated against what the engine reports."""
    cold = await fleet.ask(prompt(1))
    assert (cold.estimated, cold.reported) == (0, 0)
    holder = cold.replica
    await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // 16)

    busy = [asyncio.create_task(fleet.ask(prompt(1), output=400)) for _ in range(3)]
    await until(lambda: fleet.proxy.state.replicas.targets[holder].active == 3)
    sticky = await fleet.ask(prompt(1))
    for answer in (sticky, *await asyncio.gather(*busy)):
        assert (answer.replica, answer.source) == (holder, "push")
        assert 0 <= answer.estimated - answer.reported <= 16

    await fill(fleet, holder)
    evicted = await fleet.ask(prompt(1))
    assert (evicted.estimated, evicted.reported) == (0, 0)
    holder = evicted.replica
    await fleet.synced(holder)

    push = PushReporter._push

    async def losing(self: PushReporter, session: Any, route: str, hashes: Any) -> Any:
        self._sequence += 1
        return "done"

    with monkeypatch.context() as lost:
        lost.setattr(PushReporter, "_push", losing)
        await fill(fleet, holder, synced=False)
        assert fleet.blocks(holder) >= PROMPT_TOKENS // 16, "a phantom while reports are lost"
    assert PushReporter._push is push
    await fleet.synced(holder)
    recovered = await fleet.ask(prompt(1))
    assert (recovered.estimated, recovered.reported) == (0, 0)
    assert fleet.stats(holder).lost > 0

    fleet.proxy.state.routing.router.caches.flush(now=fleet.proxy.state.routing.clock())
    await until(lambda: fleet.blocks(recovered.replica) >= PROMPT_TOKENS // 16)
    again = await fleet.ask(prompt(1))
    assert (again.replica, again.source) == (recovered.replica, "push")
    assert 0 <= again.estimated - again.reported <= 16
    fleet.proxy.state.routing.router.check()


async def fill(fleet: Fleet, replica: str, *, synced: bool = True) -> None:
    """Fill the cache of a replica with other prompts, until the first one is evicted there."""
    target = fleet.proxy.state.replicas.targets[replica]
    for number in range(2, 8):
        body = {"model": "gorgo-sim", "prompt": prompt(number), "max_tokens": 1}
        url = f"{target.upstream._base}/v1/completions"
        answer = await fleet.proxy.client.post(url, json=body)
        assert answer.status_code == 200
    if synced:
        await until(lambda: fleet.stats(replica).evictions >= 1)
        await fleet.synced(replica)


# --- `gorgo serve` and `gorgo engine --push` as processes: a restarted router knows the cache again within 5 s.


ADMIN, PUSH = "token-of-an-operator", "token-of-an-engine"
#: Of a whole push, with the time that two processes take beside other tests.
LIMIT_S = 5.0 + 10.0


def regions(folder: Path, *, engine: int, data: int, admin: int) -> Path:
    document = {
        "proxy": {"region": "here", "bind": f"127.0.0.1:{data}", "admin_bind": f"127.0.0.1:{admin}"},
        "regions": [{"name": "here"}],
        "replicas": [
            {
                "name": "r0",
                "region": "here",
                "url": f"http://127.0.0.1:{engine}",
                "models": ["gorgo-sim"],
                "push_token_env": "PUSH",
            }
        ],
        "models": [{"name": "gorgo-sim", "tokenizer": "simulated"}],
        "simulation": {"rtt_ms": {"here": 0.0}},
    }
    path = folder / "regions.yaml"
    path.write_text(json.dumps(document))
    return path


@asynccontextmanager
async def gorgo(*words: str, environ: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
    )
    try:
        assert process.stdout is not None
        assert b"listening on" in await asyncio.wait_for(process.stdout.readline(), 60)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until_processes(condition: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> float:
    """Poll; return the time that it took."""
    began_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.05)
    return time.monotonic() - began_s


@pytest.mark.system
async def test_restarted_router_knows_the_cache_again_within_one_whole_push(tmp_path: Path) -> None:
    engine, data, admin = free_port(), free_port(), free_port()
    path = str(regions(tmp_path, engine=engine, data=data, admin=admin))
    headers = {"authorization": f"Bearer {ADMIN}"}
    router = {"GORGO_ADMIN_TOKEN": ADMIN, "PUSH": PUSH}
    push = ("engine", "--config", path, "--replica", "r0", "--push", f"http://127.0.0.1:{admin}")
    async with (
        gorgo(*push, environ={"PUSH": PUSH}),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}", headers=headers, timeout=10) as operator,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{data}", timeout=30) as client,
    ):

        async def cache() -> Any:
            (row,) = (await operator.get("/admin/fleet")).json()["replicas"]
            return row["cache"]

        async def ask() -> httpx.Response:
            body = {"model": "gorgo-sim", "prompt": prompt(1), "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer

        async def known() -> bool:
            found = await cache()
            return bool(found["source"] == "push" and found["blocks"] >= 30)

        async with gorgo("serve", "--config", path, environ=router):
            await ask()
            await until_processes(known)
            assert (await operator.get("/metrics", headers={"authorization": f"Bearer {PUSH}"})).status_code == 401
        async with gorgo("serve", "--config", path, environ=router):
            assert await until_processes(known, LIMIT_S) < LIMIT_S
            answer = await ask()
            assert int(answer.headers["x-gorgo-estimated-cached-tokens"]) >= 480, "from the push: it served none before"
