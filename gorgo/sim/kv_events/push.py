"""Pushes of one replica's cache: its full set of blocks each five seconds, and evictions in batches of 100 ms.

Owns the reporter beside the engine. Nothing is numbered and nothing is repeated: what a lost push said is known with
the next full set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from gorgo.core.messages.kv_events import CacheEvictions, CacheSnapshot
from gorgo.sim.engine.engines import CacheReporter, Engine
from gorgo.sim.engine.kv_observer import KvObserver
from gorgo.sim.kv_events.path import ReportPath
from gorgo.sim.kv_events.tokens import BlockTokens

#: Between two full sets, and between the first eviction of a batch and its push, s.
SNAPSHOT_S, EVICTIONS_S = 5.0, 0.1


class PushSink(Protocol):
    """Receiver of pushes."""

    def on_cache_snapshot(self, replica: str, snapshot: CacheSnapshot) -> None: ...

    def on_cache_evictions(self, replica: str, evictions: CacheEvictions) -> None: ...


class PushFeed(CacheReporter, KvObserver):
    """The reporter of one replica; parameters as in `EventFeed`. `first_s` is the time of its first full set."""

    def __init__(self, name: str, path: ReportPath, tokens: BlockTokens, sink: PushSink, *, first_s: float) -> None:
        self._name = name
        self.path = path
        self._tokens = tokens
        self._sink = sink
        #: Engine's hash -> own hash, and copies of each own one, of the engine that runs.
        self._own: dict[int, int] = {}
        self._copies: Counter[int] = Counter()
        #: Evicted since the last push: own hash and time.
        self._evicted: dict[int, float] = {}
        self.path.after(first_s, self._push_snapshot)

    def attach(self, model: Engine[Any]) -> None:
        """Report the cache of an engine that starts."""
        self._forget()
        model.cache.report_to(self)

    def started(self) -> None:
        """Push the empty cache of an engine that is back."""
        self._send_snapshot()

    def rejoin(self) -> None:
        """Change nothing: the reporter does not know."""

    # -- the observer of the cache

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        root = 0 if parent is None else self._own[parent]
        for engine_hash, own in zip(hashes, self._tokens.hashes(items, root), strict=True):
            self._own[engine_hash] = own
            self._copies[own] += 1
            self._evicted.pop(own, None)

    def removed(self, hashes: Sequence[int]) -> None:
        for engine_hash in hashes:
            own = self._own[engine_hash]
            self._copies[own] -= 1
            if not self._copies[own]:
                del self._copies[own], self._own[engine_hash]
                if not self._evicted:
                    self.path.after(EVICTIONS_S, self._push_evictions)
                self._evicted[own] = self.path.now

    def cleared(self) -> None:
        self._forget()

    # -- pushes

    def _forget(self) -> None:
        self._own.clear()
        self._copies.clear()
        self._evicted.clear()

    def _push_snapshot(self) -> None:
        self._send_snapshot()
        self.path.after(SNAPSHOT_S, self._push_snapshot)

    def _send_snapshot(self) -> None:
        snapshot = CacheSnapshot(model=None, block_tokens=self._tokens.block_tokens, hashes=tuple(self._copies))
        self._count(len(snapshot.hashes))
        self.path.carry(partial(self._sink.on_cache_snapshot, self._name, snapshot))

    def _push_evictions(self) -> None:
        if not self._evicted:
            return  # Cleared or stored again meanwhile.
        evicted, self._evicted = self._evicted, {}
        self._count(len(evicted))
        self.path.carry(partial(self._receive_evictions, evicted))

    def _receive_evictions(self, evicted: dict[int, float]) -> None:
        self.path.totals.eviction_delays_s.extend(self.path.now - at_s for at_s in evicted.values())
        self._sink.on_cache_evictions(
            self._name,
            CacheEvictions(model=None, block_tokens=self._tokens.block_tokens, hashes=tuple(evicted)),
        )

    def _count(self, hashes: int) -> None:
        self.path.totals.messages += 1
        self.path.totals.hashes += hashes
