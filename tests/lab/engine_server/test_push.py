"""Pushes of a simulated engine: the mirror of its cache, and the reporter before an admin listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from gorgo.core.prefix.kv_source import chain_hashes
from gorgo.lab.engine_server import cache_reports as module
from gorgo.lab.engine_server.cache_reports import CacheMirror, PushReporter, PushTarget
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.request import EngineRequest
from tests.lab.engine_server.conftest import QUICK

# --- The mirror of a cache beside the caches of both kinds of simulated engine.


PROMPT = b"".join(b"%04d" % number for number in range(64))


def test_block_with_two_copies_is_evicted_with_the_second_one() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([7], None, b"aaaa")
    mirror.stored([7], None, b"aaaa")
    mirror.removed([7])
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (1, 0)
    mirror.removed([7])
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (0, 1)


def test_block_stored_again_before_the_push_is_not_evicted() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([7], None, b"aaaa")
    mirror.removed([7])
    mirror.stored([7], None, b"aaaa")
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (1, 0)


def test_block_behind_an_unknown_one_is_left_out() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([8], 7, b"bbbb")
    mirror.removed([8, 9])
    assert (len(mirror.blocks()), len(mirror.take_evicted())) == (0, 0)


def test_cleared_cache_has_no_evictions_and_needs_a_whole_push() -> None:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([7], None, b"aaaa")
    mirror.cleared()
    assert (len(mirror.blocks()), len(mirror.take_evicted()), mirror.was_cleared) == (0, 0, True)


@pytest.mark.parametrize("scheduler", ["sglang", "vllm"])
def test_mirror_of_an_engine_has_the_own_hashes_of_its_prompt(scheduler: str) -> None:
    engine: Engine[EngineRequest] = make_engine(replace(QUICK, scheduler=scheduler))  # type: ignore[arg-type]
    size = engine.cache.event_tokens
    mirror = CacheMirror(block_tokens=size)
    engine.cache.report_to(mirror)
    engine.submit(EngineRequest(PROMPT, prompt_tokens=64, output_tokens=2), now=0.0)
    now = 0.0
    while (step := engine.start_step(now=now)) is not None:
        engine.finish_step(step)
        now = step.ends_s
    expected = chain_hashes(PROMPT, block_tokens=size)
    assert set(expected) <= set(mirror.blocks().tolist())
    assert len(expected) > 0
    engine.flush()
    assert len(mirror.blocks()) == 0


# --- The reporter before an admin listener that answers as a test says.


@dataclass
class Proxy:
    """The admin listener; `answers` are given in turn, then success."""

    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    pushes: list[tuple[str, dict[str, str], list[int]]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""

    async def push(self, request: web.Request) -> web.Response:
        hashes = np.frombuffer(await request.read(), dtype="<u8").tolist()
        self.pushes.append((request.match_info["route"], dict(request.query), hashes))
        self.tokens.add(request.headers.get("authorization"))
        status, body = self.answers.pop(0) if self.answers else (200, {"sync_needed": False})
        return web.json_response(body, status=status)

    def routes(self) -> list[str]:
        return [route for route, *_ in self.pushes]


@asynccontextmanager
async def listening(*answers: tuple[int, dict[str, Any]]) -> AsyncIterator[Proxy]:
    proxy = Proxy(list(answers))
    app = web.Application()
    app.router.add_post("/internal/{route}", proxy.push)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield proxy
    finally:
        await runner.cleanup()


@asynccontextmanager
async def reporting(
    url: str, mirror: CacheMirror, *, sync_s: float = 1000.0, model: str | None = "m"
) -> AsyncIterator[list[str]]:
    said: list[str] = []
    target = PushTarget(url=url, replica="r0", model=model, token="secret")
    running = asyncio.create_task(PushReporter(target, mirror, notify=said.append, sync_s=sync_s, batch_s=0.005).run())
    try:
        yield said
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def mirror() -> CacheMirror:
    mirror = CacheMirror(block_tokens=1)
    mirror.stored([1, 2, 3], None, b"aaaabbbbcccc")
    return mirror


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SYNC_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.01)


@pytest.mark.usefixtures("_quick")
async def test_whole_cache_is_pushed_first_then_evictions(mirror: CacheMirror) -> None:
    async with listening() as proxy, reporting(proxy.url, mirror):
        await until(lambda: proxy.pushes)
        blocks = set(mirror.blocks().tolist())
        mirror.removed([3])
        await until(lambda: len(proxy.pushes) == 2)
    assert proxy.routes() == ["sync", "eviction"]
    (_, query, whole), (_, later, evicted) = proxy.pushes
    assert set(whole) == blocks
    assert len(evicted) == 1
    assert set(evicted) < blocks
    assert {key: query[key] for key in ("worker_id", "model", "block_tokens")} == {
        "worker_id": "r0",
        "model": "m",
        "block_tokens": "1",
    }
    assert query["epoch"] == later["epoch"]
    assert (query["sequence"], later["sequence"]) == ("0", "1")
    assert proxy.tokens == {"Bearer secret"}


@pytest.mark.usefixtures("_quick")
async def test_a_cache_of_a_model_and_its_adapters_is_pushed_without_a_name(mirror: CacheMirror) -> None:
    async with listening() as proxy, reporting(proxy.url, mirror, model=None):
        await until(lambda: proxy.pushes)
    assert "model" not in proxy.pushes[0][1]


@pytest.mark.usefixtures("_quick")
async def test_whole_cache_is_pushed_again_at_each_interval(mirror: CacheMirror) -> None:
    async with listening() as proxy, reporting(proxy.url, mirror, sync_s=0.01):
        await until(lambda: proxy.routes().count("sync") >= 3)


@pytest.mark.usefixtures("_quick")
async def test_proxy_that_needs_the_whole_cache_gets_it(mirror: CacheMirror) -> None:
    answers = [(200, {"sync_needed": False}), (200, {"sync_needed": True})]
    async with listening(*answers) as proxy, reporting(proxy.url, mirror):
        await until(lambda: proxy.pushes)
        mirror.removed([3])
        await until(lambda: len(proxy.pushes) == 3)
    assert proxy.routes() == ["sync", "eviction", "sync"]


@pytest.mark.usefixtures("_quick")
async def test_flushed_cache_is_pushed_at_once(mirror: CacheMirror) -> None:
    async with listening() as proxy, reporting(proxy.url, mirror):
        await until(lambda: proxy.pushes)
        mirror.cleared()
        await until(lambda: len(proxy.pushes) == 2)
    assert proxy.pushes[1][0] == "sync"
    assert proxy.pushes[1][2] == []


@pytest.mark.usefixtures("_quick")
async def test_refused_push_is_repeated_and_its_reason_given_once(mirror: CacheMirror) -> None:
    refusal = (401, {"error": {"code": "unauthorized", "message": "expected a token"}})
    async with listening(refusal, refusal, refusal) as proxy, reporting(proxy.url, mirror) as said:
        await until(lambda: len(said) == 2)
    assert said == ["pushes fail: 401 unauthorized: expected a token", "pushes are accepted"]
    assert proxy.routes() == ["sync"] * 4


@pytest.mark.usefixtures("_quick")
async def test_proxy_that_is_away_is_tried_again(mirror: CacheMirror) -> None:
    async with listening() as proxy:
        url = proxy.url
    async with reporting(url, mirror) as said:
        await until(lambda: said)
        assert "ClientConnectorError" in said[0]
        port = int(url.rsplit(":", 1)[1])
        back = Proxy()
        app = web.Application()
        app.router.add_post("/internal/{route}", back.push)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await until(lambda: back.pushes)
        finally:
            await runner.cleanup()
    assert said[1] == "pushes are accepted"
