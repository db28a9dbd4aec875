"""The event index: which replica reports which blocks as cached, for one model and block size.

Owns the reports and their bound, both those of events (`KvEventIndex`) and those of engines that push (`PushedBlocks`).
See `kv_source` for one cache and for the hashes, `index` for the estimate from requests alone.

Theory of operation. Each block of an event gets an own hash, chained from the tokens and the own hash of the parent,
and each own hash has a bit mask over slots. An engine's hash only finds the own hash again, for children and removals.
Engines may evict a block whose children stay, so there is no tree: a match reads the masks block by block until no
replica is left.

The bound is per replica. An engine announces each eviction, so its entries are bounded by its caches, and the bound
matters only for lost removals and broken engines; those cost no other replica its blocks. It removes the blocks stored
first, a share at a time: deleting a dict's first keys one by one takes quadratic time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count, groupby, islice, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.decision import KvEventStats
from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch, KvTier
from gorgo.core.prefix.index import set_bits, slots_of
from gorgo.core.prefix.kv_source import TOKEN_BYTES, KvSource, TierBlocks, chain_hashes, chain_root, next_hash

# Speculated blocks: prompts that were dispatched to a replica with a feed, until the feed reports them.
#
# Owns the blocks of one index, and the order in which prompts expire. See `kv_feeds` for when they begin and end.
#
# Theory of operation. A report is late by the prefill and by one way, so a burst of siblings would find nothing. Each
# block that a prompt adds counts at once. A report of a block ends it. A block of two prompts belongs to the later one.
# A prompt that expires was lost on its way, or its report was.


#: Blocks of all speculated prompts, about 75 MB: two seconds of 100 prompts a second with 2,500 new blocks each. The
#: prompts that expire first make room.
MAX_BLOCKS = 500_000


class SpeculatedBlocks:
    """Speculated blocks of all replicas, for one model and block size.

    Parameters
    ----------
    tier:
        Blocks of the GPU on all replicas.
    """

    def __init__(self, tier: TierBlocks) -> None:
        self._tier = tier
        #: Own hash -> its prompt, by slot; none of them is empty.
        self._prompts: dict[int, dict[int, Speculation]] = {}

    def of(self, slot: int) -> dict[int, Speculation] | None:
        """Return the blocks of a replica; `None` without any. Not to be changed."""
        return self._prompts.get(slot)

    def blocks_of(self, slot: int) -> int:
        """Return the blocks of a replica."""
        return len(self._prompts.get(slot, ()))

    def add(self, prompt: Speculation) -> None:
        """Count the blocks of a prompt on its replica."""
        blocks, bit = self._prompts.setdefault(prompt.slot, {}), 1 << prompt.slot
        for own_hash in prompt.hashes:
            if own_hash not in blocks:
                self._tier.add(own_hash, bit)
            blocks[own_hash] = prompt
        if not blocks:
            del self._prompts[prompt.slot]

    def remove(self, prompt: Speculation) -> None:
        """Remove what is left of a prompt."""
        blocks = self._prompts.get(prompt.slot, {})
        for own_hash in prompt.hashes:
            if blocks.get(own_hash) is prompt:
                self.confirm(prompt.slot, own_hash)

    def confirm(self, slot: int, own_hash: int) -> None:
        """End a block that is speculated: it was reported."""
        blocks = self._prompts[slot]
        del blocks[own_hash]
        self._tier.remove(own_hash, 1 << slot)
        if not blocks:
            del self._prompts[slot]

    def confirm_all(self, slot: int, hashes: Iterable[int]) -> None:
        """End those of some blocks that are speculated."""
        blocks = self._prompts.get(slot)
        if blocks:
            for own_hash in blocks.keys() & set(hashes):
                self.confirm(slot, own_hash)

    def clear_replica(self, slot: int) -> None:
        """Remove all blocks of a replica."""
        for own_hash in list(self._prompts.get(slot, ())):
            self.confirm(slot, own_hash)

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each own hash with the bit of its slot."""
        for slot, blocks in self._prompts.items():
            assert blocks, "a replica without blocks is removed"
            for own_hash in blocks:
                yield own_hash, 1 << slot


@dataclass(slots=True, eq=False)
class Speculation:
    """Blocks that one prompt adds to a replica, until `expires_s`."""

    blocks: SpeculatedBlocks
    slot: int
    hashes: Sequence[int]
    expires_s: float


class SpeculationQueue:
    """Speculated prompts of all indexes, by the time at which they expire.

    Example
    -------
    >>> blocks, prompts = SpeculatedBlocks(TierBlocks()), SpeculationQueue()
    >>> prompts.add(Speculation(blocks, 0, [7, 8], expires_s=2.0))
    >>> prompts.add(Speculation(blocks, 0, [8, 9], expires_s=3.0))
    >>> prompts.expire(now=2.0)
    >>> blocks.blocks_of(0)
    2
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._order: list[tuple[float, int, Speculation]] = []
        self._numbers = count()

    def add(self, prompt: Speculation) -> None:
        """Begin a prompt; those that expire first end where it exceeds the bound."""
        prompt.hashes = prompt.hashes[:MAX_BLOCKS]
        self.blocks += len(prompt.hashes)
        while self.blocks > MAX_BLOCKS:
            self._end(heappop(self._order)[2])
        prompt.blocks.add(prompt)
        heappush(self._order, (prompt.expires_s, next(self._numbers), prompt))

    def withdraw(self, prompt: Speculation) -> None:
        """End a prompt before its time."""
        self._end(prompt)

    def expire(self, *, now: float) -> None:
        """End the prompts that are due."""
        while self._order and self._order[0][0] <= now:
            self._end(heappop(self._order)[2])

    def check(self) -> None:
        """Assert the bound and its count."""
        assert self.blocks == sum(len(prompt.hashes) for _, _, prompt in self._order) <= MAX_BLOCKS

    def _end(self, prompt: Speculation) -> None:
        prompt.blocks.remove(prompt)
        self.blocks -= len(prompt.hashes)
        prompt.hashes = ()


# Blocks that engines without events push: a set of own hashes per replica.
#
# Owns the sets. See `KvEventIndex`, which matches them together with the blocks of events.
#
# A block that a first token has confirmed counts beside those of the snapshot until the next one, which shows whether
# the engine has retained it.


class PushedBlocks:
    """Pushed blocks of all replicas, for one model and block size.

    Parameters
    ----------
    tier:
        Blocks of the GPU on all replicas.

    Example
    -------
    >>> tier = TierBlocks()
    >>> pushed = PushedBlocks(tier)
    >>> pushed.replace(1, [7, 8, 9], limit=100), tier.masks
    (0, {7: 2, 8: 2, 9: 2})
    >>> pushed.remove(1, [8]), pushed.add(1, [10], limit=100), pushed.replace(1, [9], limit=100), tier.masks
    (None, 0, 0, {9: 2})
    """

    def __init__(self, tier: TierBlocks) -> None:
        self._tier = tier
        #: Blocks of each slot; none of them is empty.
        self._own: dict[int, _HashSet] = {}
        #: Those of them that no snapshot has shown, with the time of their confirmation, oldest first.
        self._confirmed: dict[int, dict[int, float]] = {}

    def blocks_of(self, slot: int) -> int:
        """Return the blocks of a replica."""
        return len(self._own.get(slot, ()))

    def reported(self, slot: int) -> int:
        """Return the blocks of a replica that its snapshot has."""
        return self.blocks_of(slot) - len(self._confirmed.get(slot, ()))

    def replace(self, slot: int, hashes: Sequence[int], *, limit: int) -> int:
        """Replace the reported blocks of a replica; return how many exceeded `limit` and were left out."""
        wanted, confirmed = dict.fromkeys(hashes), self._confirmed.get(slot, {})
        stored = self._own.get(slot, ())
        self.remove(slot, [own_hash for own_hash in stored if own_hash not in wanted and own_hash not in confirmed])
        return self.add(slot, wanted, limit=limit)

    def add(self, slot: int, hashes: Iterable[int], *, limit: int) -> int:
        """Add reported blocks to a replica; return how many exceeded `limit` and were left out."""
        stored, bit, excess = self._own.setdefault(slot, _HashSet()), 1 << slot, 0
        confirmed = self._confirmed.get(slot)
        for own_hash in hashes:
            if own_hash in stored:
                if confirmed:
                    confirmed.pop(own_hash, None)
                continue
            if len(stored) < limit:
                stored.add(own_hash)
                self._tier.add(own_hash, bit)
            else:
                excess += 1
        self._drop_empty(slot)
        return excess

    def confirm(self, slot: int, hashes: Iterable[int], *, limit: int, now: float) -> None:
        """Add blocks that a first token has confirmed; those beyond `limit` are left out."""
        stored, bit = self._own.setdefault(slot, _HashSet()), 1 << slot
        confirmed = self._confirmed.setdefault(slot, {})
        for own_hash in hashes:
            if own_hash not in stored:
                if len(stored) >= limit:
                    continue
                stored.add(own_hash)
                self._tier.add(own_hash, bit)
            elif confirmed.pop(own_hash, None) is None:
                continue
            confirmed[own_hash] = now
        self._drop_empty(slot)

    def expire_confirmed(self, slot: int, *, before_s: float) -> None:
        """Remove blocks confirmed before `before_s` that no snapshot has shown."""
        confirmed = self._confirmed.get(slot, {})
        self.remove(slot, [own_hash for own_hash, since_s in confirmed.items() if since_s < before_s])

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """Remove blocks of a replica; those that it does not have are ignored."""
        stored, bit = self._own.get(slot), 1 << slot
        if stored is None:
            return
        confirmed = self._confirmed.get(slot)
        for own_hash in hashes:
            if own_hash in stored:
                stored.remove(own_hash)
                self._tier.remove(own_hash, bit)
                if confirmed:
                    confirmed.pop(own_hash, None)
        self._drop_empty(slot)

    def set_max_blocks(self, limit: int) -> None:
        """Remove about the oldest blocks of each replica beyond `limit`."""
        for slot, stored in list(self._own.items()):
            self.remove(slot, list(islice(stored, max(0, len(stored) - limit))))

    def remove_some(self, slot: int, count: int) -> int:
        """Remove up to `count` blocks of a replica; return how many."""
        newest = list(islice(self._own[slot].newest(), count)) if slot in self._own else []
        self.remove(slot, newest)
        return len(newest)

    def clear_replica(self, slot: int) -> None:
        """Remove all blocks of a replica."""
        self.remove(slot, list(self._own.get(slot, ())))

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each own hash with the bit of its slot."""
        for slot, stored in self._own.items():
            for own_hash in stored:
                yield own_hash, 1 << slot

    def check(self, limit: int) -> None:
        """Assert every invariant."""
        assert all(0 < len(stored) <= limit for stored in self._own.values())
        for slot, confirmed in self._confirmed.items():
            assert confirmed
            assert confirmed.keys() <= set(self._own[slot])

    def _drop_empty(self, slot: int) -> None:
        if slot in self._own and not len(self._own[slot]):
            del self._own[slot]
        if slot in self._confirmed and not self._confirmed[slot]:
            del self._confirmed[slot]


class _HashSet:
    """Own hashes in parts, as those of `TierBlocks`."""

    #: With few blocks each takes 15 KB: there is one of these per replica.
    PARTS = 64
    SHIFT = 58

    def __init__(self) -> None:
        #: Oldest first.
        self._parts: list[dict[int, None]] = [{} for _ in range(self.PARTS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, own_hash: int) -> bool:
        return own_hash in self._parts[own_hash >> self.SHIFT]

    def __iter__(self) -> Iterator[int]:
        """Yield the oldest of each part, then the next ones."""
        rows = zip_longest(*self._parts)
        return (own_hash for own_hash in chain.from_iterable(rows) if own_hash is not None)

    def newest(self) -> Iterator[int]:
        """Yield the blocks, the newest of a part first: after removals the oldest of a dict are slow to find."""
        return chain.from_iterable(map(reversed, self._parts))

    def add(self, own_hash: int) -> None:
        """Add a block that is not there."""
        self._parts[own_hash >> self.SHIFT][own_hash] = None
        self._count += 1

    def remove(self, own_hash: int) -> None:
        """Remove a block that is there."""
        del self._parts[own_hash >> self.SHIFT][own_hash]
        self._count -= 1


#: Value of a block in CPU memory, which is copied before its use; 1 on the GPU.
CPU_WEIGHT = 0.8
#: Most caches of a replica: 64 data-parallel ranks, each with two tiers of four KV cache groups. Ranks and groups come
#: from the wire.
MAX_SOURCES = 512
#: Blocks of a prompt that are looked up at a time.
_CHUNK = 128
#: Share of its bound that a full replica gives up at once.
_EVICTED_SHARE = 1 / 16


class KvMatch(NamedTuple):
    """The leading blocks of a prompt by slot, and their tokens, weighed by tier."""

    blocks: NDArray[np.float64]
    tokens: NDArray[np.float64]


class KvEventIndex:
    """Blocks reported as cached, per replica.

    Parameters
    ----------
    block_tokens:
        Tokens per block; blocks of another size are counted and left out.
    max_blocks_per_replica:
        Bound on memory: blocks of one replica, each of its caches counted.

    Example
    -------
    >>> from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
    >>> index = KvEventIndex(block_tokens=2, max_blocks_per_replica=1000)
    >>> prompt = token_bytes([1, 2, 3, 4])
    >>> stored = BlocksStored(hashes=(7, 8), parent=None, tokens=prompt, block_tokens=2, tier=KvTier.GPU)
    >>> index.apply(1, KvEventBatch(sent_s=None, rank=0, events=(stored,)))
    >>> index.match(chain_hashes(prompt, block_tokens=2), 2)
    array([0., 4.])
    """

    def __init__(self, *, block_tokens: int, max_blocks_per_replica: int) -> None:
        self.block_tokens = block_tokens
        self.max_blocks_per_replica = max_blocks_per_replica
        #: By slot.
        self.stats: defaultdict[int, KvEventStats] = defaultdict(KvEventStats)
        self._tiers = {tier: TierBlocks() for tier in KvTier}
        self.pushed = PushedBlocks(self._tiers[KvTier.GPU])
        self.speculated = SpeculatedBlocks(self._tiers[KvTier.GPU])
        #: Caches of each slot by rank, tier and group; none of them is empty.
        self._sources: dict[int, dict[tuple[int, KvTier, int], KvSource]] = {}
        self._blocks: Counter[int] = Counter()
        #: Whether any replica has had a cache in CPU memory.
        self._uses_cpu = False

    def apply(self, slot: int, batch: KvEventBatch) -> None:
        """Apply the events of a replica's message, in their order."""
        for event in batch.events:
            match event:
                case BlocksStored():
                    self._store(slot, batch.rank, event)
                case BlocksRemoved():
                    self._remove(slot, batch.rank, event)
                case CacheCleared():
                    self.clear_replica(slot, rank=batch.rank)

    def set_max_blocks(self, max_blocks_per_replica: int) -> None:
        """Replace the bound, and remove what exceeds it."""
        self.max_blocks_per_replica = max_blocks_per_replica
        for slot in list(self._blocks):
            while self._blocks[slot] > max_blocks_per_replica:
                self._evict_oldest(slot)
            self._drop_empty(slot)
        self.pushed.set_max_blocks(max_blocks_per_replica)

    def clear_replica(self, slot: int, *, rank: int | None = None) -> None:
        """Remove all blocks of a replica, or those of one rank."""
        sources = self._sources.get(slot, {})
        for key, source in list(sources.items()):
            if rank is None or source.rank == rank:
                self._blocks[slot] -= source.drop_oldest(len(source.own))
                del sources[key]
        self._drop_empty(slot)
        if rank is None:
            self.pushed.clear_replica(slot)
            self.speculated.clear_replica(slot)

    def remove_some(self, slot: int, count: int, *, rank: int | None = None) -> int:
        """Remove up to `count` reported blocks of a replica, or of one rank, the newest first; return how many."""
        removed = 0
        for source in self._sources.get(slot, {}).values():
            if rank is None or source.rank == rank:
                removed += source.drop_newest(count - removed)
        if removed:
            self._blocks[slot] -= removed
            self._drop_empty(slot)
        return removed if rank is not None else removed + self.pushed.remove_some(slot, count - removed)

    def ranks(self, slot: int) -> set[int]:
        """Return the ranks of a replica that have blocks."""
        return {source.rank for source in self._sources.get(slot, {}).values()}

    def blocks(self, slot: int) -> int:
        """Return the blocks of a replica, each of its caches counted."""
        return self._blocks.get(slot, 0) + self.pushed.blocks_of(slot)

    def gpu_blocks(self, slot: int) -> int:
        """Return the blocks of a replica on its GPUs: of each rank the KV cache group with the most."""
        most: Counter[int] = Counter()
        for (rank, tier, _), source in self._sources.get(slot, {}).items():
            if tier is KvTier.GPU:
                most[rank] = max(most[rank], len(source.own))
        return most.total() + self.pushed.blocks_of(slot)

    def match(self, hashes: Sequence[int], n_slots: int) -> NDArray[np.float64]:
        """Return the leading blocks of a prompt on each of the first `n_slots` slots, in tokens weighed by tier."""
        return self.match_blocks(hashes, n_slots).tokens

    def match_blocks(self, hashes: Sequence[int], n_slots: int) -> KvMatch:
        """Return the leading blocks of a prompt on each of the first `n_slots` slots, and their tokens."""
        blocks, penalties = np.zeros(n_slots), None
        remaining, depth = (1 << n_slots) - 1, 0
        for gpu_mask, cpu_mask, run in self._runs(hashes):
            fast = gpu_mask & remaining
            slower = cpu_mask & remaining & ~fast
            if fast | slower != remaining:
                set_bits(blocks, remaining ^ (fast | slower), depth)
                remaining = fast | slower
                if not remaining:
                    break
            length = len(list(run))
            if slower:
                penalties = np.zeros(n_slots) if penalties is None else penalties
                penalties[[*slots_of(slower)]] += length
            depth += length
        set_bits(blocks, remaining, depth)
        whole = blocks if penalties is None else blocks - penalties * (1 - CPU_WEIGHT)
        return KvMatch(blocks, whole * self.block_tokens)

    def check(self) -> None:
        """Assert every invariant; visits every block."""
        counts = {tier: Counter[tuple[int, int]]() for tier in KvTier}
        for slot, sources in self._sources.items():
            assert 0 < len(sources) <= MAX_SOURCES
            assert self._blocks[slot] == sum(len(source.own) for source in sources.values())
            assert self._blocks[slot] <= self.max_blocks_per_replica
            for (rank, tier, group), source in sources.items():
                assert (source.bit, source.rank, source.tier, source.group) == (1 << slot, rank, tier, group)
                assert source.own, "a cache without blocks is removed"
                assert source.copies.keys() <= source.own.keys()
                assert all(copies > 0 for copies in source.copies.values())
                counts[tier].update((own_hash, source.bit) for own_hash in source.owned())
        assert self._blocks.keys() == self._sources.keys()
        assert self._uses_cpu or not self._tiers[KvTier.CPU].masks
        self.pushed.check(self.max_blocks_per_replica)
        counts[KvTier.GPU].update(self.pushed.entries())
        counts[KvTier.GPU].update(self.speculated.entries())
        for tier, blocks in self._tiers.items():
            expected: Counter[int] = Counter()
            for own_hash, bit in counts[tier]:
                expected[own_hash] |= bit
            assert blocks.masks == expected, "a bit for each replica with the block, and no other"
            assert blocks.more == {key: count - 1 for key, count in counts[tier].items() if count > 1}

    # -- helpers

    def _runs(self, hashes: Sequence[int]) -> Iterator[tuple[int, int, Iterator[object]]]:
        """Yield runs of blocks on the same replicas: the masks of both tiers, and the blocks.

        Neighbours mostly are on the same replicas.
        """
        gpu, cpu = self._tiers[KvTier.GPU], self._tiers[KvTier.CPU]
        # In chunks: a prompt that no replica has ends with its first block.
        chunks = (hashes[start : start + _CHUNK] for start in range(0, len(hashes), _CHUNK))
        if not self._uses_cpu:
            for mask, run in groupby(chain.from_iterable(map(gpu.masks_of, chunks))):
                yield mask, 0, run
            return
        pairs = chain.from_iterable(zip(gpu.masks_of(chunk), cpu.masks_of(chunk), strict=True) for chunk in chunks)
        for (fast, slower), runs in groupby(pairs):
            yield fast, slower, runs

    def _store(self, slot: int, rank: int, event: BlocksStored) -> None:
        count, stats = len(event.hashes), self.stats[slot]
        if event.tier is None:
            stats.other_tiers += count
        elif event.tokens and event.block_tokens != self.block_tokens:
            stats.other_block_sizes += count
        elif (source := self._source(slot, rank, event.tier, event.group)) is None:
            stats.excess_sources += count
        else:
            hashes, owned = self._chained(slot, event) if event.tokens else self._known(slot, event)
            stats.stored += len(hashes)
            self._store_in(slot, source, hashes, owned)
            self.speculated.confirm_all(slot, owned)
            if not source.own:
                self._drop_empty(slot)

    def _store_in(self, slot: int, source: KvSource, hashes: Sequence[int], owned: Sequence[int]) -> None:
        """Store blocks in one of the replica's caches, within the bound."""
        if self._blocks[slot] + len(hashes) <= self.max_blocks_per_replica:
            self._blocks[slot] += source.store(hashes, owned)
            return
        for engine_hash, own_hash in zip(hashes, owned, strict=True):
            self._blocks[slot] += source.store((engine_hash,), (own_hash,))
            if self._blocks[slot] > self.max_blocks_per_replica:
                self._evict_oldest(slot)

    def _chained(self, slot: int, event: BlocksStored) -> tuple[Sequence[int], Sequence[int]]:
        """Return the engine's and the own hash of each block of an event; none after an unknown parent."""
        if event.parent is None:
            root = chain_root(event.adapter, event.cache_salt)
        else:
            parent_hash = self._own_hash(slot, event.parent)
            if parent_hash is None:
                self.stats[slot].unknown_parents += len(event.hashes)
                return (), ()
            root = parent_hash
        size = self.block_tokens
        if not event.extra:
            return event.hashes, chain_hashes(event.tokens, block_tokens=size, root=root)
        owned = []
        for block, start in enumerate(range(0, len(event.tokens), size * TOKEN_BYTES)):
            root = next_hash(root, event.tokens[start : start + size * TOKEN_BYTES], event.extra.get(block, b""))
            owned.append(root)
        return event.hashes, owned

    def _known(self, slot: int, event: BlocksStored) -> tuple[Sequence[int], Sequence[int]]:
        """Return the same of those blocks of an event without tokens that another cache of the replica has."""
        pairs = [(engine_hash, self._own_hash(slot, engine_hash)) for engine_hash in event.hashes]
        stored = [(engine_hash, own_hash) for engine_hash, own_hash in pairs if own_hash is not None]
        self.stats[slot].without_tokens += len(pairs) - len(stored)
        return [engine_hash for engine_hash, _ in stored], [own_hash for _, own_hash in stored]

    def _own_hash(self, slot: int, engine_hash: int) -> int | None:
        for source in self._sources[slot].values():
            own_hash = source.own.get(engine_hash)
            if own_hash is not None:
                return own_hash
        return None

    def _remove(self, slot: int, rank: int, event: BlocksRemoved) -> None:
        if event.tier is None:
            self.stats[slot].other_tiers += len(event.hashes)
            return
        source = self._sources.get(slot, {}).get((rank, event.tier, event.group))
        if source is None:
            self.stats[slot].unknown_removals += len(event.hashes)
            return
        before, stats = len(source.own), self.stats[slot]
        unknown = source.evict(event.hashes)
        stats.unknown_removals += unknown
        stats.removed += len(event.hashes) - unknown
        self._blocks[slot] -= before - len(source.own)
        if not source.own:
            self._drop_empty(slot)

    def _source(self, slot: int, rank: int, tier: KvTier, group: int) -> KvSource | None:
        """Return a cache of the replica, made if missing; `None` beyond the bound."""
        sources = self._sources.setdefault(slot, {})
        source = sources.get((rank, tier, group))
        if source is None and len(sources) < MAX_SOURCES:
            source = KvSource(1 << slot, rank, tier, group, self._tiers[tier])
            self._uses_cpu |= tier == KvTier.CPU
            sources[rank, tier, group] = source
        return source

    def _evict_oldest(self, slot: int) -> None:
        largest = max(self._sources[slot].values(), key=lambda source: len(source.own))
        excess = max(1, int(self.max_blocks_per_replica * _EVICTED_SHARE))
        evicted = largest.drop_oldest(min(excess, len(largest.own)))
        self.stats[slot].evicted += evicted
        self._blocks[slot] -= evicted
        if not largest.own and len(self._sources[slot]) > 1:
            del self._sources[slot][largest.rank, largest.tier, largest.group]

    def _drop_empty(self, slot: int) -> None:
        """Remove caches without blocks, and a replica without caches."""
        sources = self._sources.get(slot, {})
        for key in [key for key, source in sources.items() if not source.own]:
            del sources[key]
        if not sources:
            self._sources.pop(slot, None)
            self._blocks.pop(slot, None)
