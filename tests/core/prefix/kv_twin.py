"""The event index written the slow and obvious way: each cache lists the whole prompt up to each of its blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, KvTier

Path = tuple[int, ...]
Cache = tuple[int, int, KvTier, int]


@dataclass
class KvTwin:
    """Same contract as `KvEventIndex` for blocks of one token and no adapter, without a bound."""

    #: Cache (slot, rank, tier, group) and the engine's hash -> the prompt that ends there.
    paths: dict[tuple[Cache, int], Path] = field(default_factory=dict)
    copies: Counter[tuple[Cache, int]] = field(default_factory=Counter)
    unknown: int = 0

    def path(self, slot: int, engine_hash: int) -> Path | None:
        found = {path for (cache, known), path in self.paths.items() if (cache[0], known) == (slot, engine_hash)}
        return next(iter(found), None)

    def store(self, slot: int, rank: int, event: BlocksStored) -> None:
        assert event.tier is not None
        path = () if event.parent is None else self.path(slot, event.parent)
        tokens = list(event.tokens[::4])
        for place, engine_hash in enumerate(event.hashes):
            if not tokens:
                path = self.path(slot, engine_hash)
            elif path is not None:
                path = (*path, tokens[place])
            if path is None:
                self.unknown += 1
                continue
            entry = ((slot, rank, event.tier, event.group), engine_hash)
            if self.paths.get(entry, path) != path:
                self.copies[entry] = 0
            self.paths[entry] = path
            self.copies[entry] += 1

    def remove(self, slot: int, rank: int, event: BlocksRemoved) -> None:
        assert event.tier is not None
        for engine_hash in event.hashes:
            entry = ((slot, rank, event.tier, event.group), engine_hash)
            if entry in self.paths:
                self.copies[entry] -= 1
                if not self.copies[entry]:
                    del self.paths[entry]

    def clear(self, slot: int, rank: int | None) -> None:
        for entry in [entry for entry in self.paths if entry[0][0] == slot and rank in (None, entry[0][1])]:
            del self.paths[entry]
            self.copies[entry] = 0

    def match(self, prompt: Path, slot: int) -> float:
        total = 0.0
        for length in range(1, len(prompt) + 1):
            tiers = {
                cache[2] for (cache, _), path in self.paths.items() if cache[0] == slot and path == prompt[:length]
            }
            if not tiers:
                break
            total += 1.0 if KvTier.GPU in tiers else 0.8
        return total

    def blocks(self, slot: int) -> int:
        return sum(cache[0] == slot for cache, _ in self.paths)
