"""One cache of an engine as its events describe it: a replica's rank, tier and KV cache group.

Owns the translation of the engine's hashes to own ones, and the number of copies. See `kv_index` for the sources of
all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from gorgo.core.messages.kv_events import KvTier


class TierBlocks:
    """The blocks of one tier: own hash to a bit mask over slots.

    Several caches of a replica can have one block (ranks, groups). The mask has one bit for them, `more` the number of
    others.
    """

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        #: (own hash, bit of the slot) -> caches of that replica with the block, less one.
        self.more: dict[tuple[int, int], int] = {}

    def add(self, own: int, bit: int) -> None:
        mask = self.masks.get(own)
        if mask is None:
            self.masks[own] = bit
        elif mask & bit:
            self.more[own, bit] = self.more.get((own, bit), 0) + 1
        else:
            self.masks[own] = mask | bit

    def remove(self, own: int, bit: int) -> None:
        more = self.more.get((own, bit)) if self.more else None
        if more is not None:
            if more > 1:
                self.more[own, bit] = more - 1
            else:
                del self.more[own, bit]
            return
        mask = self.masks[own] ^ bit
        if mask:
            self.masks[own] = mask
        else:
            del self.masks[own]


@dataclass(slots=True)
class KvSource:
    """The blocks of one cache, by the engine's hash, oldest first.

    Parameters
    ----------
    bit:
        Mask of the replica's slot.
    rank, tier, group:
        Which of the replica's caches.
    blocks:
        Blocks of the tier on all replicas.
    """

    bit: int
    rank: int
    tier: KvTier
    group: int
    blocks: TierBlocks
    #: Engine's hash -> own hash.
    own: dict[int, int] = field(default_factory=dict)
    #: Engine's hash -> copies beyond the first.
    copies: dict[int, int] = field(default_factory=dict)

    def store(self, engine_hash: int, own: int) -> int:
        """Store one copy of a block; return the blocks added, 0 or 1. A hash of another block replaces that one."""
        known = self.own.get(engine_hash)
        if known == own:
            self.copies[engine_hash] = self.copies.get(engine_hash, 0) + 1
            return 0
        if known is not None:
            self._forget(engine_hash)
        self.own[engine_hash] = own
        self.blocks.add(own, self.bit)
        return 1 if known is None else 0

    def evict(self, engine_hash: int) -> int | None:
        """Remove one copy of a block; return the blocks removed, 0 or 1, or `None` if the hash is unknown."""
        if engine_hash not in self.own:
            return None
        copies = self.copies.get(engine_hash) if self.copies else None
        if copies is None:
            self._forget(engine_hash)
            return 1
        if copies > 1:
            self.copies[engine_hash] = copies - 1
        else:
            del self.copies[engine_hash]
        return 0

    def drop_oldest(self, count: int) -> int:
        """Remove the blocks stored first with all their copies; return how many."""
        oldest = list(islice(self.own, count))
        for engine_hash in oldest:
            self._forget(engine_hash)
        return len(oldest)

    def owned(self) -> Iterator[int]:
        """Yield the own hash of each block."""
        return iter(self.own.values())

    def _forget(self, engine_hash: int) -> None:
        self.blocks.remove(self.own.pop(engine_hash), self.bit)
        self.copies.pop(engine_hash, None)
