"""A publisher of an engine on real sockets, a subscriber, and a Router that records what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gorgo.config.fleet import KvEventsConfig
from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
from gorgo.engines.registry import dialect
from gorgo.lab.engine_server.cache_reports import BUFFERED, TOPIC, KvEventLog, KvEventPublisher
from gorgo.live.extras import EVENTS, is_installed
from gorgo.live.kv_events.sockets import import_zmq
from gorgo.live.kv_events.subscriber import KvSubscriber, KvSubscriptions
from gorgo.live.kv_feed_stats import KvFeedStats
from gorgo.live.upstream.target import Target

BLOCK_TOKENS = 4
REPLICA = "r"


class RecordingRouter:
    """In the place of the Router: the blocks that it is told of."""

    def __init__(self) -> None:
        self.index = KvEventIndex(block_tokens=BLOCK_TOKENS, max_blocks_per_replica=1_000_000)
        self.batches = 0
        self.complete = False
        self.lost = 0
        #: Blocks removed by each slice of a clear, and those left at each loss.
        self.cleared: list[int] = []
        self.at_loss: list[int] = []

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]:
        assert (replica, model, block_tokens) == (REPLICA, None, BLOCK_TOKENS)
        self.batches += 1
        self.complete = complete
        self.index.apply(0, batch)
        return []

    def forget_some(self, replica: str, *, blocks: int, now: float) -> bool:
        return self.index.remove_some(0, blocks) > 0

    def clear_some(self, replica: str, *, model: str | None, rank: int, blocks: int, now: float) -> bool:
        removed = self.index.remove_some(0, blocks, rank=rank)
        self.cleared.append(removed)
        return removed > 0

    def on_kv_lost(self, replica: str, *, now: float) -> list[Action]:
        self.at_loss.append(self.index.blocks(0))
        self.index.clear_replica(0)
        self.lost += 1
        return []

    def cached(self, prompt: list[int]) -> int:
        """Tokens of `prompt` that are known to be cached."""
        hashes = chain_hashes(token_bytes(prompt), block_tokens=BLOCK_TOKENS)
        return int(self.index.match(hashes, 1)[0])


@dataclass
class Feeding:
    """A subscriber and what it subscribes to."""

    router: RecordingRouter
    feeds: KvSubscriptions
    target: Target
    answers: dict[str, object]
    asked: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    run: Callable[[], Coroutine[Any, Any, None]] | None = None

    @property
    def stats(self) -> KvFeedStats:
        return self.feeds.stats[REPLICA]

    async def until(self, state: str, **counts: int) -> None:
        """Wait until the replica has this state and these counts."""
        await until(
            lambda: self.stats.state == state and all(getattr(self.stats, key) == n for key, n in counts.items())
        )

    def restart(self) -> None:
        """As a reload of the intervals does: the end of the former run is not waited for."""
        assert self.run is not None
        self.tasks[-1].cancel()
        self.tasks.append(asyncio.create_task(self.run()))

    def configure(self, config: KvEventsConfig | None) -> None:
        """As a reload does."""
        self.target.kv_events = config
        self.target.kv_events_changed.set()


async def until(true: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def subscribed(
    config: KvEventsConfig | None,
    *,
    engine: str = "vllm",
    answers: Mapping[str, object] | None = None,
    feeds: KvSubscriptions | None = None,
    router: RecordingRouter | None = None,
) -> AsyncIterator[Feeding]:
    """A running subscriber of one replica on this machine."""
    target = SimpleNamespace(
        name=REPLICA,
        kv_events=config,
        kv_events_changed=asyncio.Event(),
        attempts=0,
        dialect=dialect(engine),
        detects_engine=False,
        found_engine=None,
        upstream=SimpleNamespace(checked_host="127.0.0.1"),
    )
    feeding = Feeding(
        router or RecordingRouter(), feeds or KvSubscriptions(), cast(Target, target), dict(answers or {})
    )

    async def answer(path: str) -> object:
        feeding.asked.append(path)
        return feeding.answers.get(path)

    delivered: list[Action] = []

    def deliver(actions: Iterable[Action]) -> None:
        delivered.extend(actions)

    subscriber = KvSubscriber(
        feeding.feeds,
        feeding.target,
        feeding.router,
        monotonic,
        answer=answer,
        is_current=lambda: True,
        deliver=deliver,
    )
    feeding.run = subscriber.run
    feeding.tasks.append(asyncio.create_task(subscriber.run()))
    await asyncio.sleep(0)
    try:
        yield feeding
    finally:
        feeding.tasks[-1].cancel()
        await asyncio.wait(feeding.tasks)
        for task in feeding.tasks:
            assert task.cancelled(), task.exception()
        await feeding.feeds.aclose()
        assert not delivered
        assert REPLICA not in feeding.feeds.stats


class Engine:
    """A publisher with a cache of prompts, each of which is a chain of blocks."""

    def __init__(
        self,
        *,
        endpoint: str = "tcp://127.0.0.1:0",
        replay: str | None = "tcp://127.0.0.1:0",
        topic_in_replays: bool = True,
        vllm: bool = True,
        buffered: int = BUFFERED,
        process: int = 0,
    ) -> None:
        zmq = import_zmq()
        self.log = KvEventLog(block_tokens=BLOCK_TOKENS, vllm=vllm)
        self.publisher = KvEventPublisher(zmq, endpoint, replay, topic_in_replays=topic_in_replays, buffered=buffered)
        self._process = process

    def hashes(self, prompt: list[int]) -> list[int]:
        """The engine's own hashes of a prompt's blocks, which differ by process."""
        found, parent = [], self._process
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            parent = hash((parent, *prompt[end - BLOCK_TOKENS : end]))
            found.append(parent)
        return found

    async def store(self, prompt: list[int], *, sent: bool = True) -> None:
        """Store all blocks of a prompt; `sent`: subscribers get the message, not only the buffer."""
        hashes = self.hashes(prompt)
        self.log.stored(hashes, None, token_bytes(prompt[: len(hashes) * BLOCK_TOKENS]))
        await self.publish(sent=sent)

    async def evict(self, prompt: list[int], *, sent: bool = True) -> None:
        self.log.removed(self.hashes(prompt))
        await self.publish(sent=sent)

    async def publish(self, *, sent: bool = True) -> None:
        payload = self.log.take_message()
        assert payload is not None
        if sent:
            await self.publisher.publish(payload)
        else:
            number = self.publisher.next_number.to_bytes(8, "big")
            self.publisher.next_number += 1
            self.publisher._buffer.append((number, payload))

    @property
    def config(self) -> KvEventsConfig:
        return KvEventsConfig(endpoint=self.publisher.endpoint, replay=self.publisher.replay, topic=TOPIC)

    @property
    def announced(self) -> dict[str, Any]:
        """The answer to vLLM's `/kv_event_sources`."""
        publisher = self.publisher
        config = {"publisher": "zmq", "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay}
        return {"0": {"enable_kv_cache_events": True, "topic": TOPIC, **config}}


@asynccontextmanager
async def publishing(**more: Any) -> AsyncIterator[Engine]:
    """An engine that answers requests for replays; killed at the end."""
    engine = Engine(**more)
    task = asyncio.create_task(engine.publisher.serve_replays())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.wait((task,))
        engine.publisher.close()


def prompt(number: int, blocks: int = 3) -> list[int]:
    """Tokens of the prompt of that number."""
    return [number * 1000 + token for token in range(blocks * BLOCK_TOKENS)]


# --- Skips loudly what needs the extra `events`.


needs_zmq = pytest.mark.skipif(
    not is_installed(EVENTS), reason="KV EVENTS SKIPPED: pyzmq is not installed (extra `events`)"
)
