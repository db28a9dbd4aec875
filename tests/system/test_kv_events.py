"""KV events of real engines: estimates are what the engines find, how late they come, and faults with requests
under way.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gorgo.config.fleet import KvEventsConfig
from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import BlocksRemoved, KvEventBatch
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.live.extras import EVENTS, is_installed
from tests.live.kv_events.feeding import RecordingRouter, subscribed
from tests.ports import free_port
from tests.real.served import eventually
from tests.system.conversations import Conversations
from tests.system.environments import Environment
from tests.system.event_engines import EngineKind, EventEngine, EventPorts, simulated_kind, two_engines, vllm_kind
from tests.system.processes import RouterProcess, router_process
from tests.system.tiny_checkpoint import make_tiny_checkpoint
from tests.system.vllm_server import CACHED_TOKENS_FLAG, VllmServer, vllm_server, wait_until_ready
from tests.tuner.sidecar.relay import Relay

pytestmark = pytest.mark.skipif(not is_installed(EVENTS), reason="KV EVENTS SKIPPED: pyzmq is not installed")


# --- KV events of two real vLLM with few blocks: what the proxy estimates is what the engines find.


BLOCK_TOKENS = 32
#: Blocks of one engine: a tenth of what the conversations have.
BLOCKS = 128
REQUESTS = 1000
PUBLISHER = (
    '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'
)
FLAGS = (
    CACHED_TOKENS_FLAG,
    "--kv-events-config",
    PUBLISHER,
    "--num-gpu-blocks-override",
    str(BLOCKS),
    "--max-model-len",
    "2048",
)
MODELS = """
models: [{{name: tiny, tokenizer: '{tokenizer}'}}]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "tiny")


async def test_estimates_by_events_are_what_vllm_finds(
    vllm: Environment, tiny: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with ExitStack() as running:
        ports = [free_port(), free_port()]
        stacks = [running.enter_context(ExitStack()) for _ in ports]
        servers = [
            stack.enter_context(vllm_server(vllm, tiny, *FLAGS, port=port))
            for stack, port in zip(stacks, ports, strict=True)
        ]
        wait_until_ready(*servers)
        router = running.enter_context(routed(tmp_path, tiny, servers))
        conversations = Conversations(router.url, model="tiny", block_tokens=BLOCK_TOKENS)
        share = await asyncio.to_thread(conversations.run, REQUESTS)
        record_property("share within one block", share)
        record_property("cached tokens", sum(conversations.cached))
        assert share >= 0.99, conversations.wrong
        assert sum(conversations.cached) > REQUESTS * BLOCK_TOKENS, "the cache was of use"

        # An engine is killed and comes back at other ports for its events, with an empty cache.
        servers[0].kill()
        stacks[0].close()
        stacks[0].enter_context(vllm_server(vllm, tiny, *FLAGS, port=ports[0]))
        wait_until_ready(servers[0])
        await eventually(lambda: states(router) == {"left": 1, "right": 1}, within_s=120)
        share = await asyncio.to_thread(conversations.run, 100)
        record_property("share after a kill", share)
        assert share >= 0.99, conversations.wrong

        # Another router learns both caches from the replays.
        second = running.enter_context(routed(tmp_path / "second", tiny, servers))
        await eventually(lambda: states(second) == {"left": 1, "right": 1}, within_s=30)
        conversations.url = second.url
        share = await asyncio.to_thread(conversations.run, 100)
        record_property("share of a new router", share)
        assert share >= 0.99, conversations.wrong


def routed(folder: Path, checkpoint: Path, servers: list[VllmServer]) -> Any:
    folder.mkdir(exist_ok=True)
    replicas = {"left": servers[0].url, "right": servers[1].url}
    more = MODELS.format(tokenizer=checkpoint / "tokenizer.json")
    return router_process(folder, replicas, engine="vllm, kv_events: auto", more=more)


def states(router: RouterProcess) -> dict[str, int]:
    """Whether the log says of each replica that its feed is live now."""
    found: dict[str, int] = {}
    for line in (router.folder / "router.log").read_text().splitlines():
        if '"kv_events_state"' in line:
            name = "left" if '"left"' in line else "right"
            found[name] = int('"state": "live"' in line or '"state":"live"' in line)
    return found


# --- Time from an event of a real vLLM, by its own clock, to the event's entry in an index on the same machine.


REQUESTS_KV_EVENT_DELAY = 300


class TimingRouter(RecordingRouter):
    """In the place of the Router: how late each batch with a removal is, s."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KvEventIndex(block_tokens=BLOCK_TOKENS, max_blocks_per_replica=1_000_000)
        self.late_s: list[float] = []

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]:
        self.index.apply(0, batch)
        assert batch.sent_s is not None
        if any(isinstance(event, BlocksRemoved) for event in batch.events):
            self.late_s.append(time.time() - batch.sent_s)
        return []


async def test_evictions_of_vllm_are_known_after_milliseconds(
    vllm: Environment, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tiny, ports, router = make_tiny_checkpoint(tmp_path / "tiny"), EventPorts.free(), TimingRouter()
    endpoint, replay = f"tcp://127.0.0.1:{ports.events}", f"tcp://127.0.0.1:{ports.replays}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{ports.events}", "replay_endpoint": f"tcp://*:{ports.replays}"}
    flags = (CACHED_TOKENS_FLAG, "--kv-events-config", json.dumps(events), "--num-gpu-blocks-override", str(BLOCKS))
    with vllm_server(vllm, tiny, *flags, "--max-model-len", "2048", port=ports.http) as server:
        await asyncio.to_thread(wait_until_ready, server)
        async with subscribed(KvEventsConfig(endpoint=endpoint, replay=replay), router=router) as feeding:
            await feeding.until("live")
            conversations = Conversations(server.url, model="tiny", block_tokens=BLOCK_TOKENS)
            await asyncio.to_thread(conversations.run, REQUESTS_KV_EVENT_DELAY)
            await asyncio.sleep(0.1)
    late_ms = np.array(router.late_s) * 1e3
    quantiles = {f"p{each}_ms": round(float(np.percentile(late_ms, each)), 2) for each in (50, 95, 99)}
    record_property("evictions", len(late_ms))
    record_property("late", quantiles)
    assert len(late_ms) > REQUESTS_KV_EVENT_DELAY / 4, "most prompts evict blocks"
    assert quantiles["p50_ms"] < 25.0


# --- Faults under KV events with requests under way: right again after a replay, counted, no request lost.


#: Streams under way at a kill, and at a restart of the router.
STREAMS, RESTART_STREAMS = 40, 200
#: Requests whose estimates are compared after each fault.
COMPARED = 100
MORE = """
models: [{{name: {model}, tokenizer: '{tokenizer}'}}]
limits: {{shutdown_grace_s: 35}}
"""


@pytest.fixture(params=["simulated", "vllm"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> EngineKind:
    if request.param == "simulated":
        return simulated_kind(tmp_path)
    return vllm_kind(request.getfixturevalue("vllm"), make_tiny_checkpoint(tmp_path / "tiny"))


@dataclass(frozen=True, slots=True)
class Rig:
    """Two engines, and routers before them."""

    kind: EngineKind
    engines: Mapping[str, EventEngine]
    folder: Path

    def router(self, name: str, relay: Relay | None = None) -> AbstractContextManager[RouterProcess]:
        """A router; with `relay`, that has the events of the left engine."""
        folder = self.folder / name
        folder.mkdir()
        rows = {}
        for engine in self.engines.values():
            port = relay.port if relay is not None and engine.name == "left" else engine.ports.events
            events = f"endpoint: 'tcp://127.0.0.1:{port}', replay: 'tcp://127.0.0.1:{engine.ports.replays}'"
            rows[engine.name] = f"{{{events}}}"
        return router_process(
            folder,
            {name: engine.url for name, engine in self.engines.items()},
            engine=self.kind.engine,
            # Both engines get conversations, also one after the other.
            policy="sticky-least-loaded",
            more=MORE.format(model=self.kind.model, tokenizer=self.kind.tokenizer),
            fields={name: f"kv_events: {text}" for name, text in rows.items()},
        )

    def conversations(self, router: RouterProcess) -> Conversations:
        return Conversations(router.url, model=self.kind.model, block_tokens=self.kind.block_tokens)


@pytest.fixture
def rig(kind: EngineKind, tmp_path: Path) -> Iterator[Rig]:
    with two_engines(kind) as engines:
        yield Rig(kind, engines, tmp_path)


@dataclass(frozen=True, slots=True)
class Stream:
    """How a stream ended: `whole`, with an error event (`broken`), `refused` by its status, or `lost`."""

    end: str
    replica: str


async def stream(client: httpx.AsyncClient, kind: EngineKind, number: int, tokens: int, streams: Streams) -> Stream:
    """Send a streamed request; note its replica at its first token and at its end."""
    text = " ".join(f"{number}-{place}" for place in range(60))
    body = {"model": kind.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
    body |= {"stream": True, "ignore_eos": True}
    end, last, replica = "lost", b"", ""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            replica = answer.headers.get("x-gorgo-replica", "")
            if answer.status_code != 200:
                return Stream("refused", replica)
            async for line in answer.aiter_lines():
                if line.startswith(": x-gorgo-continued"):
                    streams.continued.append(replica)
                if line.startswith("data:"):
                    if not last:
                        streams.begun.append(replica)
                    last = line.removeprefix("data:").strip().encode()
        if last == b"[DONE]":
            end = "whole"
        elif last and "error" in json.loads(last):
            end = "broken"
    except httpx.TransportError:
        pass
    if last:
        streams.ended.append(replica)
    return Stream(end, replica)


@asynccontextmanager
async def streaming(rig: Rig, router: RouterProcess, count: int, *, times: int = 1) -> AsyncIterator[Streams]:
    """Send requests at once, each for so many long answers' tokens."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=router.url, timeout=120, limits=limits) as client:
        streams, tokens = Streams(), times * rig.kind.long_answer
        for number in range(count):
            streams.tasks.append(asyncio.create_task(stream(client, rig.kind, number, tokens, streams)))
        try:
            yield streams
        finally:
            for task in streams.tasks:
                task.cancel()
            await asyncio.gather(*streams.tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Streams:
    """Replicas of the streams that had a first token, of those that another went on with, and of those that ended."""

    tasks: list[asyncio.Task[Stream]] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    continued: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def under_way(self) -> set[str]:
        return set(Counter(self.begun) - Counter(self.ended))

    async def ends(self) -> Counter[str]:
        return Counter([found.end for found in await asyncio.gather(*self.tasks)])


def feeds(router: RouterProcess) -> dict[str, dict[str, Any]]:
    """The feed of each replica, with the blocks that it reports."""
    rows = router.admin("/admin/fleet")["replicas"]
    return {row["name"]: row["cache"]["feed"] | {"blocks": row["cache"]["blocks"]} for row in rows}


async def live(router: RouterProcess) -> None:
    await eventually(lambda: all(feed["state"] == "live" for feed in feeds(router).values()), within_s=60)


async def same_blocks(router: RouterProcess, witness: RouterProcess) -> None:
    """Wait until both routers know the same blocks of each engine."""

    def blocks(of: RouterProcess) -> dict[str, int]:
        return {name: feed["blocks"] for name, feed in feeds(of).items()}

    await eventually(lambda: blocks(router) == blocks(witness), within_s=30)


async def right(conversations: Conversations) -> None:
    share = await asyncio.to_thread(conversations.run, COMPARED)
    assert share >= 0.99, conversations.wrong


async def until(condition: Callable[[], bool]) -> None:
    await eventually(condition, within_s=60)


async def test_a_subscriber_that_was_cut_off_is_right_again_after_a_replay(rig: Rig) -> None:
    with ExitStack() as running:
        relay = running.enter_context(Relay(rig.engines["left"].ports.events))
        router = running.enter_context(rig.router("cut", relay))
        witness = running.enter_context(rig.router("witness"))
        await live(router)
        await live(witness)
        conversations = rig.conversations(router)
        await right(conversations)
        before = feeds(router)["left"]
        assert before["blocks"] > 0
        relay.cut()
        await until(lambda: feeds(router)["left"]["state"] == "cut")
        # Served all the same: `run` fails for any answer but a good one.
        await asyncio.to_thread(conversations.run, COMPARED)
        relay.mend()
        await live(router)
        after = feeds(router)["left"]
        assert after["replays"] > before["replays"], "the replay is counted"
        assert after["failed_replays"] == 0
        await same_blocks(router, witness)
        await right(conversations)


async def test_an_engine_killed_in_mid_stream_loses_no_request_and_is_known_to_be_empty(rig: Rig) -> None:
    with ExitStack() as running:
        router = running.enter_context(rig.router("killed"))
        await live(router)
        conversations = rig.conversations(router)
        await right(conversations)
        before = feeds(router)["left"]
        assert before["blocks"] > 0
        # Streams of one engine may have ended before the first token of the other's.
        async with streaming(rig, router, STREAMS, times=4) as streams:
            await until(lambda: {"left", "right"} <= streams.under_way())
            rig.engines["left"].kill()
            ends = await streams.ends()
        # A stream with a first token goes on at the engine that is left; others were sent there from the start.
        assert ends == {"whole": STREAMS}
        assert set(streams.continued) == {"left"}, "a stream was under way there"
        assert router.in_flight() == 0
        await until(lambda: feeds(router)["left"]["blocks"] == 0)
        rig.engines["left"].begin()
        rig.engines["left"].wait_until_ready()
        await live(router)
        after = feeds(router)["left"]
        assert after["replays"] > before["replays"]
        await right(conversations)


async def test_a_router_restarted_with_200_requests_under_way_knows_both_caches(rig: Rig) -> None:
    with ExitStack() as running, ExitStack() as first_router:
        first = first_router.enter_context(rig.router("first"))
        await live(first)
        conversations = rig.conversations(first)
        await right(conversations)
        async with streaming(rig, first, RESTART_STREAMS) as streams:
            await until(lambda: first.in_flight() >= RESTART_STREAMS / 2)
            stopping = asyncio.create_task(asyncio.to_thread(first_router.close))
            second = running.enter_context(rig.router("second"))
            ends = await streams.ends()
            await stopping
        assert ends == {"whole": RESTART_STREAMS}
        await live(second)
        assert all(feed["replays"] >= 1 and feed["blocks"] > 0 for feed in feeds(second).values())
        conversations.url = second.url
        await right(conversations)
