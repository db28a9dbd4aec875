"""A whole proxy over simulated engines that publish KV events: decisions by what their caches hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from gorgo.config.fleet import KvEventsConfig, ReplicaConfig
from gorgo.config.model import Config, ModelConfig, RegionConfig
from gorgo.lab.engine_server import run_engine
from gorgo.lab.sim.engine.profiles import EngineProfile
from tests.lab.engine_server.conftest import QUICK
from tests.live.kv_events.feeding import needs_zmq
from tests.ports import free_port
from tests.proxy.conftest import QUIET, Running, Start, until

pytestmark = needs_zmq

#: 128 blocks of 16 tokens.
SGLANG = replace(QUICK, kv_tokens=2048, context_tokens=2048)
VLLM = replace(SGLANG, scheduler="vllm")
PROMPT_TOKENS = 512
BLOCK_TOKENS = 16


@dataclass
class Answer:
    replica: str
    estimated: int
    reported: int
    source: str


def prompt(number: int) -> str:
    """A prompt of four bytes a token that shares no block with those of other numbers."""
    return "".join(f"{number:02d}{place:02x}"[:4] for place in range(256)) * (PROMPT_TOKENS // 256)


@asynccontextmanager
async def engine(profile: EngineProfile, name: str, port: int, events_port: int = 0) -> AsyncIterator[None]:
    stop, bound = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(
        run_engine(
            name=name,
            profile=profile,
            rtt_ms=0.0,
            seed=0,
            host="127.0.0.1",
            port=port,
            ready=lambda *_: bound.set(),
            stop=stop,
            kv_events=f"tcp://127.0.0.1:{events_port}",
        )
    )
    try:
        await bound.wait()
        yield
    finally:
        stop.set()
        await running


@dataclass
class Fleet:
    """A proxy over two engines."""

    proxy: Running
    engines: AsyncExitStack

    async def ask(self, number: int) -> Answer:
        body = {"model": "gorgo-sim", "prompt": prompt(number), "max_tokens": 1}
        answer = await self.proxy.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        decision = self.proxy.state.routing.router.view.decisions(answer.headers["x-request-id"])[-1]
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        cached = details.get("cached_tokens", 0)
        return Answer(decision.replica, decision.estimated_cached_tokens, cached, decision.cache_source)

    def state(self, replica: str) -> str:
        feed = self.proxy.state.cache_states()[replica].feed
        assert feed is not None
        return feed.state

    def messages(self) -> int:
        return sum(stats.messages for stats in self.proxy.state.replicas.kv_feed_stats.values())

    def blocks(self, replica: str) -> int:
        return self.proxy.state.routing.router.caches.sources(now=self.proxy.state.routing.clock())[replica].blocks

    async def live(self) -> None:
        await until(lambda: [self.state(name) for name in ("r0", "r1")] == ["live", "live"])


@asynccontextmanager
async def fleet_of(start: Start, profile: EngineProfile, kind: str) -> AsyncIterator[Fleet]:
    ports = [free_port(), free_port()]
    config = Config(
        proxy=replace(QUIET, policy="sticky-least-loaded"),
        regions=(RegionConfig(name="here"),),
        replicas=tuple(
            ReplicaConfig(
                name=f"r{n}", region="here", url=f"http://127.0.0.1:{port}", engine=kind, kv_events=KvEventsConfig()
            )
            for n, port in enumerate(ports)
        ),
        models=(ModelConfig(name="gorgo-sim", tokenizer="simulated"),),
    )
    async with AsyncExitStack() as engines:
        for n, port in enumerate(ports):
            await engines.enter_async_context(engine(profile, f"r{n}", port))
        fleet = Fleet(await start.proxy(config, []), engines)
        await fleet.live()
        yield fleet
        await fleet.proxy.stop()


@pytest.mark.parametrize(("profile", "kind"), [(SGLANG, "sglang"), (VLLM, "vllm")], ids=["sglang", "vllm"])
async def test_a_decision_has_what_the_engine_reports_by_events(
    start: Start, profile: EngineProfile, kind: str
) -> None:
    async with fleet_of(start, profile, kind) as fleet:
        first = await fleet.ask(1)
        assert (first.estimated, first.reported) == (0, 0)
        await until(lambda: fleet.blocks(first.replica) >= PROMPT_TOKENS // BLOCK_TOKENS)
        again = await fleet.ask(1)
        assert (again.replica, again.source) == (first.replica, "events")
        assert again.reported >= PROMPT_TOKENS - BLOCK_TOKENS
        assert 0 <= again.estimated - again.reported <= BLOCK_TOKENS, "of a whole prompt the last block is computed"
        # Other prompts evict the first one, and the proxy knows it from the events.
        number = 1
        while fleet.proxy.state.replicas.kv_feed_stats[first.replica].events < 40 and number < 40:
            number += 1
            seen = fleet.messages()
            await fleet.ask(number)
            await until(lambda: fleet.messages() > seen)  # noqa: B023 - awaited
        await until(lambda: fleet.blocks("r0") + fleet.blocks("r1") <= 2 * profile.kv_tokens // BLOCK_TOKENS)
        for old in (1, number):
            answer = await fleet.ask(old)
            assert answer.source == "events"
            assert abs(answer.estimated - answer.reported) <= BLOCK_TOKENS
        fleet.proxy.state.routing.router.check()


async def test_a_proxy_that_starts_beside_warm_engines_knows_their_caches(start: Start) -> None:
    async with fleet_of(start, SGLANG, "sglang") as fleet:
        holder = (await fleet.ask(1)).replica
        await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // BLOCK_TOKENS)
        second = Fleet(await start.proxy(fleet.proxy.state.config, []), fleet.engines)
        await second.live()
        await until(lambda: second.blocks(holder) == fleet.blocks(holder))
        answer = await second.ask(1)
        assert (answer.replica, answer.source) == (holder, "events")
        assert answer.reported >= PROMPT_TOKENS - BLOCK_TOKENS
        await second.proxy.stop()


async def test_after_a_flush_the_events_are_replayed_and_complete(start: Start) -> None:
    async with fleet_of(start, SGLANG, "sglang") as fleet:
        holder = (await fleet.ask(1)).replica
        await until(lambda: fleet.blocks(holder) >= PROMPT_TOKENS // BLOCK_TOKENS)
        blocks, former = fleet.blocks(holder), fleet.proxy.state.replicas.kv_feed_stats[holder]
        assert (await fleet.proxy.admin.post("/admin/flush", json={"replica": holder})).status_code == 200
        await until(
            lambda: fleet.proxy.state.replicas.kv_feed_stats[holder] is not former and fleet.blocks(holder) == blocks
        )
        await fleet.live()
        answer = await fleet.ask(1)
        assert (answer.replica, answer.source) == (holder, "events")
        assert answer.estimated >= PROMPT_TOKENS - BLOCK_TOKENS
        sources = fleet.proxy.state.routing.router.caches.sources(now=fleet.proxy.state.routing.clock())
        assert sources[holder].complete


async def test_an_engine_that_restarts_at_other_ports_is_found_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.kv_events.subscriber.RETRY_S", 0.05)
    monkeypatch.setattr("gorgo.live.kv_events.subscriber.TICK_S", 0.05)
    async with fleet_of(start, SGLANG, "sglang") as fleet:
        holder = (await fleet.ask(1)).replica
        await until(lambda: fleet.blocks(holder) > 0)
        await fleet.engines.aclose()
        await until(lambda: fleet.state(holder) == "cut")
        urls = {row.name: row.url for row in fleet.proxy.state.config.replicas}
        for name, url in urls.items():
            await fleet.engines.enter_async_context(engine(SGLANG, name, int(url.rpartition(":")[2])))
        await fleet.live()
        assert fleet.blocks(holder) == 0
        answer = await fleet.ask(1)
        assert answer.reported == 0
        await until(lambda: fleet.blocks(answer.replica) >= PROMPT_TOKENS // BLOCK_TOKENS)
