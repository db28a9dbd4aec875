"""What is believed cached where: one radix tree over block hashes, and who holds each node.

Owns which replica is estimated to have which blocks, and the bounds. See `core.prefix.radix` for the tree,
`core.prefix.residency` for one replica's blocks and their LRU order, `core.prompt.fingerprint` for blocks of a prompt.

Theory of operation. A node's `held` is an integer with one bit per slot, so that one walk answers for every replica.
Residency is closed under prefixes (who holds a node holds its parent), so along a path the sets only shrink; the same
is true of `confirmed`. A replica gives up what it used least recently, leaves first.

The bound over all replicas evicts the oldest leaf of any of them. A replica's oldest tick only ever grows, so a heap
with one entry per replica, corrected when it comes to the top, finds it.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from gorgo.core.prefix.radix import RadixTree
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES, NO_PREFIX, ConfirmedPrefix, Node, Residency

#: Below so many set bits a loop over them is faster than unpacking the whole mask (measured: about 20).
_FEW_BITS = 16


class PrefixIndex:
    """Blocks believed cached, per replica, in one tree.

    Parameters
    ----------
    max_blocks:
        Bound on memory: neither the blocks stored nor the pairs of a node and a replica holding it exceed it.
    bounded:
        Whether each replica holds at most its capacity too; replicas without one are bounded by `max_blocks` alone.

    Example
    -------
    >>> index = PrefixIndex(max_blocks=1000, bounded=True)
    >>> index.add_replica(0, capacity_blocks=100)
    >>> index.add_replica(1)
    >>> index.insert(b"block--1block--2", 1)
    ConfirmedPrefix(blocks=0, tick=0)
    >>> index.match(b"block--1block--2block--3", 2)
    array([0., 2.])
    """

    def __init__(self, *, max_blocks: int, bounded: bool) -> None:
        self.max_blocks = max_blocks
        self.stored_blocks = 0
        self.nodes = 0
        self._bounded = bounded
        self._tree = RadixTree(Node, item_bytes=BLOCK_HASH_BYTES)
        self._residencies: dict[int, Residency] = {}
        self._resident_nodes = 0
        self._tick = 0
        #: (a tick not after the replica's oldest, slot), one per replica.
        self._oldest: list[tuple[int, int]] = []

    @property
    def bounded(self) -> bool:
        return self._bounded

    @bounded.setter
    def bounded(self, bounded: bool) -> None:
        self._bounded = bounded
        for holding in self._residencies.values():
            self._trim_replica(holding)

    def resize(self, max_blocks: int) -> None:
        """Another bound on memory; what is too much for it goes at once, least recently used first."""
        self.max_blocks = max_blocks
        for holding in self._residencies.values():
            self._trim_replica(holding)
        self._trim_total()

    def add_replica(self, slot: int, *, capacity_blocks: int | None = None) -> None:
        assert slot not in self._residencies, f"slot {slot} is taken"
        self._residencies[slot] = Residency(slot, capacity_blocks)
        self._list_oldest()

    def set_capacity(self, slot: int, capacity_blocks: int | None) -> None:
        self._residencies[slot].capacity = capacity_blocks
        self._trim_replica(self._residencies[slot])

    def remove_replica(self, slot: int) -> None:
        """Forget the replica and all that it held."""
        self.flush(slot)
        del self._residencies[slot]
        self._list_oldest()

    def flush(self, slot: int | None = None) -> None:
        """Forget what one replica holds, or what all of them do."""
        for holding in self._residencies.values() if slot is None else (self._residencies[slot],):
            self._evict(holding, 0)

    def resident_blocks(self, slot: int) -> int:
        return self._residencies[slot].blocks

    def match(self, blocks: bytes, n_slots: int) -> NDArray[np.float64]:
        """Leading blocks that each of the first `n_slots` slots is believed to hold. Leaves the order of use alone."""
        depths = np.zeros(n_slots)
        path, depth = self._tree.walk(blocks)
        everyone = (1 << n_slots) - 1
        deeper = 0
        for node in reversed(path):
            held = node.residents & everyone
            if held != deeper:
                _set_bits(depths, held ^ deeper, depth)
                deeper = held
            depth = node.end - len(node.edge) // BLOCK_HASH_BYTES
        return depths

    def insert(self, blocks: bytes, slot: int) -> ConfirmedPrefix:
        """Believe that `slot` holds `blocks` from now on, as yet unconfirmed, and that it used them last.

        Answers what it had shown to hold of them before; nothing unless `bounded`, where alone that can be corrected.
        """
        holding = self._residencies[slot]
        path = self._path_within(blocks, holding)
        belief = holding.confirmed_prefix(path) if self._bounded else NO_PREFIX
        self._add(path, holding, shown=False)
        return belief

    def confirm(self, blocks: bytes, slot: int) -> None:
        """As `insert`, and the replica has shown that it holds them."""
        holding = self._residencies[slot]
        bit = holding.bit
        path = self._path_within(blocks, holding)
        self._add(path, holding, shown=True)
        for node in reversed(path):
            if node.confirmed & bit:
                break
            node.confirmed = node.confirmed | bit if node.confirmed else bit

    def retract(self, blocks: bytes, slot: int) -> None:
        """Take back what was never confirmed along `blocks`, with all that hangs below it; the rest counts as used."""
        holding = self._residencies[slot]
        kept: Node | None = None
        for node in self._tree.walk(blocks)[0]:
            if not node.residents & holding.bit:
                return
            if not node.confirmed & holding.bit:
                for dropped in holding.remove_below(node):
                    self._dropped(dropped)
                if kept is not None:
                    self._tick += 2
                    holding.touch(kept, self._tick)
                return
            kept = node

    def evict_older(self, slot: int, *, before: int) -> None:
        """A block last used at tick `before` was not cached any more: nor is what was used earlier, leaves first.

        Stops at what is not confirmed: it has not been prefilled yet, so it cannot have been evicted.
        """
        holding = self._residencies[slot]
        while (oldest := holding.oldest_tick()) is not None and oldest < before:
            if not next(iter(holding.recent)).confirmed & holding.bit:
                return
            self._dropped(holding.evict(oldest))

    def check(self) -> None:
        """Assert every invariant; visits the whole tree."""
        stored = nodes = 0
        below: dict[int, dict[Node, int]] = {slot: {} for slot in self._residencies}
        held_by: dict[int, list[Node]] = {slot: [] for slot in self._residencies}
        for node in self._tree.descendants():
            stored += len(node.edge) // BLOCK_HASH_BYTES
            nodes += 1
            parent = node.parent
            assert parent is not None
            assert node.residents, "somebody holds every node"
            assert not node.confirmed & ~node.residents, "only what is held is confirmed"
            if parent is not self._tree.root:
                assert not node.residents & ~parent.residents, "residency is closed under prefixes"
                assert not node.confirmed & ~parent.confirmed, "confirmation is closed under prefixes"
            for slot in _slots_of(node.residents):
                held_by[slot].append(node)
                below[slot][parent] = below[slot].get(parent, 0) + 1
        assert (stored, nodes) == (self.stored_blocks, self.nodes)
        assert max(stored, self._resident_nodes) <= self.max_blocks
        assert self._resident_nodes == sum(map(len, held_by.values()))
        assert sorted(slot for _, slot in self._oldest) == sorted(self._residencies)
        for slot, holding in self._residencies.items():
            below[slot].pop(self._tree.root, None)
            holding.check(held_by[slot], below[slot])
            assert holding.blocks <= self._free_blocks(holding)

    # -- helpers

    def _path_within(self, blocks: bytes, holding: Residency) -> list[Node]:
        """Nodes that spell `blocks`; what would not fit even alone is cut off."""
        blocks = blocks[: self._free_blocks(holding) * BLOCK_HASH_BYTES]
        return self._path_to(blocks) if blocks else []

    def _add(self, path: list[Node], holding: Residency, *, shown: bool) -> None:
        """Let the replica hold the whole path, used now."""
        if not path:
            return
        for node in reversed(path):
            if node.residents & holding.bit:
                break
            holding.add(node)
            self._resident_nodes += 1
        self._tick += 2
        holding.touch(path[-1], self._tick + shown)
        self._trim_replica(holding)
        self._trim_total()

    def _path_to(self, blocks: bytes) -> list[Node]:
        """Nodes that spell exactly `blocks`, made where they are missing."""
        path, matched = self._tree.walk(blocks)
        if path and matched < path[-1].end:
            path[-1] = self._split(path[-1], matched)
        rest = blocks[matched * BLOCK_HASH_BYTES :]
        if rest:
            path.append(self._tree.append(path[-1] if path else self._tree.root, rest))
            self.nodes += 1
            self.stored_blocks += len(rest) // BLOCK_HASH_BYTES
        return path

    def _split(self, node: Node, at: int) -> Node:
        upper = self._tree.split(node, at)
        self.nodes += 1
        for slot in _slots_of(upper.residents):
            self._residencies[slot].split(upper)
        self._resident_nodes += upper.residents.bit_count()
        return upper

    def _dropped(self, node: Node) -> None:
        """A replica has dropped `node`; what nobody holds goes."""
        self._resident_nodes -= 1
        if not node.residents:
            self._tree.remove(node)
            self.nodes -= 1
            self.stored_blocks -= len(node.edge) // BLOCK_HASH_BYTES

    def _free_blocks(self, holding: Residency) -> int:
        """The most blocks that the replica may hold."""
        if not self._bounded or holding.capacity is None:
            return self.max_blocks
        return max(0, min(holding.capacity, self.max_blocks))

    def _trim_replica(self, holding: Residency) -> None:
        room = self._free_blocks(holding)
        if holding.blocks > room:
            self._evict(holding, room)

    def _evict(self, holding: Residency, room: int) -> None:
        """Take from the replica what it used least recently, until no more than `room` blocks are left."""
        while holding.blocks > room:
            oldest = holding.oldest_tick()
            assert oldest is not None
            self._dropped(holding.evict(oldest))

    def _trim_total(self) -> None:
        while self.stored_blocks > self.max_blocks or self._resident_nodes > self.max_blocks:
            self._evict_oldest_of_all()

    def _evict_oldest_of_all(self) -> None:
        bound, slot = self._oldest[0]
        holding = self._residencies[slot]
        oldest = holding.oldest_tick()
        if oldest == bound:
            self._dropped(holding.evict(oldest))
        else:
            heapreplace(self._oldest, (self._tick + 1 if oldest is None else oldest, slot))

    def _list_oldest(self) -> None:
        self._oldest = [(0, slot) for slot in self._residencies]
        heapify(self._oldest)


def _set_bits(depths: NDArray[np.float64], mask: int, depth: int) -> None:
    """Write `depth` where `mask` has a bit."""
    if mask.bit_count() <= _FEW_BITS:
        for slot in _slots_of(mask):
            depths[slot] = depth
        return
    size = len(depths)
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    depths[np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)] = depth


def _slots_of(mask: int) -> list[int]:
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
