"""The publisher of one engine's KV events: a numbered batch per moment, and the newest batches for replays.

Owns the events between an engine's cache and the way to the router. An engine that starts has a new publisher, whose
numbers begin at 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.sim.engine.kv_observer import KvObserver
from gorgo.sim.kv_events.tokens import BlockTokens

#: Batches that an engine can replay: vLLM's and SGLang's default.
BUFFERED_BATCHES = 10_000
_MASK = (1 << 64) - 1


class Publisher(KvObserver):
    """Observes a cache and numbers its batches.

    Parameters
    ----------
    tokens:
        Expansion of the items.
    pending:
        Called with it at the first event since the last batch.
    """

    def __init__(self, tokens: BlockTokens, pending: Callable[[Publisher], None]) -> None:
        self._tokens = tokens
        self._pending = pending
        self._events: list[KvEvent] = []
        self._buffer: deque[KvEventBatch] = deque(maxlen=BUFFERED_BATCHES)
        #: Number of the next batch.
        self.next_number = 0

    # -- the observer of the cache

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        self._add(
            BlocksStored(
                hashes=tuple([one & _MASK for one in hashes]),
                parent=None if parent is None else parent & _MASK,
                tokens=self._tokens.expand(items),
                block_tokens=self._tokens.block_tokens,
                tier=KvTier.GPU,
            )
        )

    def removed(self, hashes: Sequence[int]) -> None:
        self._add(BlocksRemoved(hashes=tuple([one & _MASK for one in hashes]), tier=KvTier.GPU))

    def cleared(self) -> None:
        self._add(CacheCleared())

    # -- batches

    def take_batch(self, *, now: float) -> tuple[int, KvEventBatch]:
        """Return the events since the last batch, with their number."""
        batch = KvEventBatch(sent_s=now, rank=0, events=tuple(self._events))
        self._events.clear()
        self._buffer.append(batch)
        self.next_number += 1
        return self.next_number - 1, batch

    def replay(self, first: int) -> tuple[int, list[KvEventBatch]]:
        """Return the batches from number `first` on, or the oldest there is, with the number of the first one."""
        oldest = self.next_number - len(self._buffer)
        begins = max(first, oldest)
        return begins, list(self._buffer)[begins - oldest :]

    def _add(self, event: KvEvent) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._pending(self)
