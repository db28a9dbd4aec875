"""One engine with a feed and a sink that applies what arrives, for tests of the feeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from gorgo.core.messages.kv_events import CacheEvictions, CacheSnapshot, KvEventBatch
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.kv_cache import KvCache
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm.block_pool import BlockPool
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.kv_events.path import ReportPath
from gorgo.lab.sim.kv_events.reports import BlockTokens
from gorgo.lab.sim.network import Link, TripDelays, random_table
from tests.lab.sim.profiles import round_profile

Kind = Literal["sglang", "vllm"]
ITEM_TOKENS = 16
#: A trip of one eighth of a second.
LINK = Link(rtt_s=0.25, jitter=0.0, spike_probability=0.0)


class Replica:
    """The replica at the other end of the path."""

    def __init__(self) -> None:
        self.link = LINK
        self.alive = True


class Sink:
    """A router's view: the index of events, or the set of the pushes."""

    def __init__(self, kernel: EventQueue) -> None:
        self._kernel = kernel
        self.index = KvEventIndex(block_tokens=ITEM_TOKENS, max_blocks_per_replica=10_000)
        self.pushed: set[int] = set()
        self.calls: list[tuple[float, str]] = []
        self.complete = True

    def on_kv_events(self, replica: str, batch: KvEventBatch, *, block_tokens: int, complete: bool) -> None:
        assert block_tokens == ITEM_TOKENS
        self.complete = complete
        self.index.apply(0, batch)
        kinds = ", ".join(type(event).__name__ for event in batch.events)
        self.calls.append((self._kernel.now, kinds))

    def on_kv_lost(self, replica: str) -> None:
        self.index.clear_replica(0)
        self.calls.append((self._kernel.now, "lost"))

    def on_cache_snapshot(self, replica: str, snapshot: CacheSnapshot) -> None:
        self.pushed = set(snapshot.hashes)
        self.calls.append((self._kernel.now, f"snapshot of {len(snapshot.hashes)}"))

    def on_cache_evictions(self, replica: str, evictions: CacheEvictions) -> None:
        self.pushed.difference_update(evictions.hashes)
        self.calls.append((self._kernel.now, f"evictions of {len(evictions.hashes)}"))

    def matched_items(self, hashes: Sequence[int]) -> int:
        return int(self.index.match(hashes, 1)[0]) // ITEM_TOKENS


class Scene:
    """A queue, a replica, its engine, the path and the sink."""

    def __init__(self, kind: Kind = "sglang", *, items: int = 20) -> None:
        self.kernel = EventQueue()
        self.replica = Replica()
        self.path = ReportPath(self.kernel, self.replica, TripDelays(random_table(1), 5))
        self.tokens = BlockTokens(item_bytes=8, item_tokens=ITEM_TOKENS, block_tokens=ITEM_TOKENS)
        self.sink = Sink(self.kernel)
        self._profile = replace(
            round_profile(kv_tokens=items * ITEM_TOKENS, chunk_tokens=64, max_running_requests=3), scheduler=kind
        )
        self.engine = self.new_engine()
        self.keys: set[bytes] = set()

    def new_engine(self) -> Engine[EngineRequest]:
        self.engine = make_engine(self._profile, item_bytes=8, item_tokens=ITEM_TOKENS)
        return self.engine

    def at(self, time_s: float, act: Callable[[], object]) -> None:
        self.kernel.at(time_s, lambda: (act(), None)[1])

    def serve(self, at_s: float, *items: str) -> None:
        """Serve a prompt of these items, in no time."""
        key = b"".join(item.encode().ljust(8) for item in items)
        self.keys.add(key)
        self.at(at_s, partial(self._serve, key))

    def _serve(self, key: bytes) -> None:
        tokens = len(key) // 8 * ITEM_TOKENS
        self.engine.submit(EngineRequest(key, prompt_tokens=tokens + 1, output_tokens=1), now=0.0)
        now = 0.0
        while (step := self.engine.start_step(now=now)) is not None:
            now = step.ends_s
            self.engine.finish_step(step)

    def cached_items(self, key: bytes) -> int:
        """Return what the engine itself has of a prompt."""
        cache = self.engine.cache
        if isinstance(cache, BlockPool):
            return len(cache.find(cache.contents(key)))
        assert isinstance(cache, KvCache)
        return cache.match(key).items

    def assert_right(self) -> None:
        """Compare the index with the engine's own contents for every prompt so far."""
        for key in self.keys:
            assert self.sink.matched_items(self.tokens.hashes(key)) == self.cached_items(key)
        self.sink.index.check()
