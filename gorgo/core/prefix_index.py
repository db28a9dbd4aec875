"""What is believed cached where: one radix tree over block hashes, and who holds each node.

Owns residency, its bounds and the order of eviction. The tree itself is `core.radix`; which blocks a prompt has is
`core.fingerprint`.

Theory of operation. A node's `held` is an integer with one bit per slot, so that one walk answers for every replica.
Residency is closed under prefixes (who holds a node holds its parent), so along a path the sets only shrink; the same
is true of `confirmed`. Eviction is least recently used, leaves first, per replica: every insert or confirm gets the
next tick, noted only at the last node of its path in the replica's `recent` (ordered by tick). A node's true last use
is the latest of its own tick and those of what ever hung below it, so when a leaf is evicted its parent takes over
its tick, and since the leaf was the oldest of all, that is the front of the order. An entry that comes to the front
while the replica still holds something below it says nothing any more and is dropped. So each step is O(1), nothing
is searched or sorted, and the order never has more entries than the replica holds nodes.

A tick is odd when a replica has shown the use that it stands for, by a first token, and even when it is only believed.
So a leaf's tick, and what its parent takes over, tell whether an engine really had the blocks then, which is what a
report that they are gone can be held against (`Belief`, `correct`).

The bound over all replicas evicts the oldest leaf of any of them. A replica's oldest tick only ever grows, so a heap
with one entry per replica, corrected when it comes to the top, finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heapreplace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.radix import RadixNode, RadixTree

#: Bytes of one block hash.
BLOCK_HASH_BYTES = 8
#: Below so many set bits a loop over them is faster than unpacking the whole mask (measured: about 20).
_FEW_BITS = 16
#: Children looked at for one that the replica holds; thousands may branch off a shared start.
_FEW_CHILDREN = 64


class Belief(NamedTuple):
    """What a replica had shown to hold of a prompt when the prompt was dispatched there.

    `blocks` leading ones, the last of which was used at `tick` or later; 0 where that is not known.
    """

    blocks: int = 0
    tick: int = 0


_NOTHING = Belief()


class _Node(RadixNode):
    """A run of blocks held by the same replicas. Bit `slot` of `held` and `confirmed` stands for that replica."""

    __slots__ = ("confirmed", "held")

    def __init__(self, edge: bytes, end: int, parent: _Node | None) -> None:
        super().__init__(edge, end, parent)
        self.held = 0
        self.confirmed = 0

    def inherit(self, lower: _Node) -> None:
        self.held = lower.held
        self.confirmed = lower.confirmed


class _Holding:
    """What one replica holds."""

    __slots__ = ("below", "bit", "blocks", "capacity", "nodes", "recent")

    def __init__(self, slot: int, capacity: int | None) -> None:
        self.bit = 1 << slot
        self.capacity = capacity
        self.blocks = 0
        self.nodes = 0
        #: Last ticks, oldest first. Every leaf is here; an inner node is where a prompt ended there.
        self.recent: OrderedDict[_Node, int] = OrderedDict()
        #: How many children of an inner node this replica holds; leaves are absent.
        self.below: dict[_Node, int] = {}


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
    Belief(blocks=0, tick=0)
    >>> index.match(b"block--1block--2block--3", 2)
    array([0., 2.])
    """

    def __init__(self, *, max_blocks: int, bounded: bool) -> None:
        self.max_blocks = max_blocks
        self.stored_blocks = 0
        self.nodes = 0
        self._bounded = bounded
        self._tree = RadixTree(_Node, item_bytes=BLOCK_HASH_BYTES)
        self._holdings: dict[int, _Holding] = {}
        self._held_nodes = 0
        self._tick = 0
        #: (a tick not after the replica's oldest, slot), one per replica.
        self._oldest: list[tuple[int, int]] = []

    @property
    def bounded(self) -> bool:
        return self._bounded

    @bounded.setter
    def bounded(self, bounded: bool) -> None:
        self._bounded = bounded
        for holding in self._holdings.values():
            self._fit(holding)

    def resize(self, max_blocks: int) -> None:
        """Another bound on memory; what is too much for it goes at once, least recently used first."""
        self.max_blocks = max_blocks
        for holding in self._holdings.values():
            self._fit(holding)
        self._shrink()

    def add_replica(self, slot: int, *, capacity_blocks: int | None = None) -> None:
        assert slot not in self._holdings, f"slot {slot} is taken"
        self._holdings[slot] = _Holding(slot, capacity_blocks)
        self._list_oldest()

    def set_capacity(self, slot: int, capacity_blocks: int | None) -> None:
        self._holdings[slot].capacity = capacity_blocks
        self._fit(self._holdings[slot])

    def remove_replica(self, slot: int) -> None:
        """Forget the replica and all that it held."""
        self.flush(slot)
        del self._holdings[slot]
        self._list_oldest()

    def flush(self, slot: int | None = None) -> None:
        """Forget what one replica holds, or what all of them do."""
        for holding in self._holdings.values() if slot is None else (self._holdings[slot],):
            while holding.recent:
                self._evict_oldest(holding)

    def resident_blocks(self, slot: int) -> int:
        return self._holdings[slot].blocks

    def match(self, blocks: bytes, n_slots: int) -> NDArray[np.float64]:
        """Leading blocks that each of the first `n_slots` slots is believed to hold. Leaves the order of use alone."""
        depths = np.zeros(n_slots)
        path, depth = self._tree.walk(blocks)
        everyone = (1 << n_slots) - 1
        deeper = 0
        for node in reversed(path):
            held = node.held & everyone
            if held != deeper:
                _set_bits(depths, held ^ deeper, depth)
                deeper = held
            depth = node.end - len(node.edge) // BLOCK_HASH_BYTES
        return depths

    def insert(self, blocks: bytes, slot: int) -> Belief:
        """Believe that `slot` holds `blocks` from now on, as yet unconfirmed, and that it used them last.

        Answers what it had shown to hold of them before; nothing unless `bounded`, where alone that can be corrected.
        """
        holding = self._holdings[slot]
        path = self._path_within(blocks, holding)
        belief = self._shown(path, holding) if self._bounded else _NOTHING
        self._take(path, holding, shown=False)
        return belief

    def confirm(self, blocks: bytes, slot: int) -> None:
        """As `insert`, and the replica has shown that it holds them."""
        holding = self._holdings[slot]
        bit = holding.bit
        path = self._path_within(blocks, holding)
        self._take(path, holding, shown=True)
        for node in reversed(path):
            if node.confirmed & bit:
                break
            node.confirmed = node.confirmed | bit if node.confirmed else bit

    def withdraw(self, blocks: bytes, slot: int) -> None:
        """Take back what was never confirmed along `blocks`, with all that hangs below it; the rest counts as used."""
        holding = self._holdings[slot]
        kept: _Node | None = None
        for node in self._tree.walk(blocks)[0]:
            if not node.held & holding.bit:
                return
            if not node.confirmed & holding.bit:
                self._drop_below(node, holding)
                if kept is not None:
                    self._touch(kept, holding)
                return
            kept = node

    def correct(self, slot: int, *, before: int) -> None:
        """A block last used at tick `before` was not cached any more: nor is what was used earlier, leaves first.

        Stops at what is not confirmed: it has not been prefilled yet, so it cannot have been evicted.
        """
        holding = self._holdings[slot]
        while (oldest := self._oldest_tick(holding)) is not None and oldest < before:
            if not next(iter(holding.recent)).confirmed & holding.bit:
                return
            self._evict_oldest(holding)

    def check(self) -> None:
        """Assert every invariant; visits the whole tree."""
        stored = nodes = 0
        below: dict[int, dict[_Node, int]] = {slot: {} for slot in self._holdings}
        held_by: dict[int, list[_Node]] = {slot: [] for slot in self._holdings}
        for node in self._tree.descendants():
            stored += len(node.edge) // BLOCK_HASH_BYTES
            nodes += 1
            parent = node.parent
            assert parent is not None
            assert node.held, "somebody holds every node"
            assert not node.confirmed & ~node.held, "only what is held is confirmed"
            if parent is not self._tree.root:
                assert not node.held & ~parent.held, "residency is closed under prefixes"
                assert not node.confirmed & ~parent.confirmed, "confirmation is closed under prefixes"
            for slot in _slots_of(node.held):
                held_by[slot].append(node)
                below[slot][parent] = below[slot].get(parent, 0) + 1
        assert (stored, nodes) == (self.stored_blocks, self.nodes)
        assert max(stored, self._held_nodes) <= self.max_blocks
        assert self._held_nodes == sum(map(len, held_by.values()))
        assert sorted(slot for _, slot in self._oldest) == sorted(self._holdings)
        for slot, holding in self._holdings.items():
            self._check_holding(holding, held_by[slot], below[slot])

    def _check_holding(self, holding: _Holding, nodes: list[_Node], below: dict[_Node, int]) -> None:
        below.pop(self._tree.root, None)
        assert holding.below == below
        assert holding.nodes == len(nodes)
        assert holding.blocks == sum(len(node.edge) for node in nodes) // BLOCK_HASH_BYTES
        assert holding.recent.keys() <= set(nodes), "only what is held is in the order of use"
        assert holding.recent.keys() >= {node for node in nodes if node not in below}, "every leaf can be evicted"
        ticks = list(holding.recent.values())
        assert ticks == sorted(set(ticks)), "oldest first"
        assert holding.blocks <= self._room(holding)

    def _path_within(self, blocks: bytes, holding: _Holding) -> list[_Node]:
        """Nodes that spell `blocks`; what would not fit even alone is cut off."""
        blocks = blocks[: self._room(holding) * BLOCK_HASH_BYTES]
        return self._path_to(blocks) if blocks else []

    def _take(self, path: list[_Node], holding: _Holding, *, shown: bool) -> None:
        """Let the replica hold the whole path, used now."""
        if not path:
            return
        for node in reversed(path):
            if node.held & holding.bit:
                break
            self._hold(node, holding)
        self._touch(path[-1], holding, shown=shown)
        self._fit(holding)
        self._shrink()

    def _shown(self, path: list[_Node], holding: _Holding) -> Belief:
        for node in reversed(path):
            if node.confirmed & holding.bit:
                return Belief(node.end, self._last_shown(node, holding))
        return _NOTHING

    def _last_shown(self, node: _Node | None, holding: _Holding) -> int:
        """A tick at which the replica showed to hold `node`, the last one as far as a single way down tells."""
        latest = 0
        while node is not None:
            tick = holding.recent.get(node, 0)
            latest = max(latest, tick) if tick % 2 else latest
            newest = islice(reversed(node.children.values()), _FEW_CHILDREN)
            node = None
            for child in newest:
                if child.confirmed & holding.bit:
                    node = child
                    break
        return latest

    def _path_to(self, blocks: bytes) -> list[_Node]:
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

    def _split(self, node: _Node, at: int) -> _Node:
        upper = self._tree.split(node, at)
        self.nodes += 1
        for slot in _slots_of(upper.held):
            holding = self._holdings[slot]
            holding.nodes += 1
            holding.below[upper] = 1
        self._held_nodes += upper.held.bit_count()
        return upper

    def _hold(self, node: _Node, holding: _Holding) -> None:
        # A node's only holder shares its bit with all other such nodes: 28 to 96 bytes less each.
        node.held = node.held | holding.bit if node.held else holding.bit
        holding.blocks += len(node.edge) // BLOCK_HASH_BYTES
        holding.nodes += 1
        self._held_nodes += 1
        parent = node.parent
        if parent is not None and parent is not self._tree.root:
            holding.below[parent] = holding.below.get(parent, 0) + 1

    def _drop(self, node: _Node, holding: _Holding) -> None:
        """Undo `_hold` on a leaf of the replica; a node that nobody holds goes."""
        node.held &= ~holding.bit
        node.confirmed &= ~holding.bit
        holding.blocks -= len(node.edge) // BLOCK_HASH_BYTES
        holding.nodes -= 1
        self._held_nodes -= 1
        parent = node.parent
        if parent is not None and parent is not self._tree.root:
            left = holding.below.pop(parent) - 1
            if left:
                holding.below[parent] = left
        if not node.held:
            self._tree.remove(node)
            self.nodes -= 1
            self.stored_blocks -= len(node.edge) // BLOCK_HASH_BYTES

    def _drop_below(self, top: _Node, holding: _Holding) -> None:
        """Take `top` and all below it from the replica."""
        going = [top]
        for node in going:
            if node in holding.below:
                going.extend(child for child in node.children.values() if child.held & holding.bit)
        for node in reversed(going):
            holding.recent.pop(node, None)
            self._drop(node, holding)

    def _touch(self, node: _Node, holding: _Holding, *, shown: bool = False) -> None:
        self._tick += 2
        holding.recent[node] = self._tick + shown
        holding.recent.move_to_end(node)

    def _room(self, holding: _Holding) -> int:
        """The most blocks that the replica may hold."""
        if not self._bounded or holding.capacity is None:
            return self.max_blocks
        return max(0, min(holding.capacity, self.max_blocks))

    def _fit(self, holding: _Holding) -> None:
        room = self._room(holding)
        while holding.blocks > room:
            self._evict_oldest(holding)

    def _evict_oldest(self, holding: _Holding) -> None:
        """Take the least recently used leaf from the replica, which holds one."""
        tick = self._oldest_tick(holding)
        assert tick is not None
        leaf, _ = holding.recent.popitem(last=False)
        self._drop(leaf, holding)
        parent = leaf.parent
        assert parent is not None
        if parent is not self._tree.root and parent not in holding.recent and parent not in holding.below:
            holding.recent[parent] = tick
            holding.recent.move_to_end(parent, last=False)

    def _oldest_tick(self, holding: _Holding) -> int | None:
        """Tick of the least recently used leaf, which is at the front then."""
        recent, below = holding.recent, holding.below
        while recent:
            node = next(iter(recent))
            if node not in below:
                return recent[node]
            del recent[node]
        return None

    def _shrink(self) -> None:
        while self.stored_blocks > self.max_blocks or self._held_nodes > self.max_blocks:
            self._evict_oldest_of_all()

    def _evict_oldest_of_all(self) -> None:
        bound, slot = self._oldest[0]
        holding = self._holdings[slot]
        oldest = self._oldest_tick(holding)
        if oldest == bound:
            self._evict_oldest(holding)
        else:
            heapreplace(self._oldest, (self._tick + 1 if oldest is None else oldest, slot))

    def _list_oldest(self) -> None:
        self._oldest = [(0, slot) for slot in self._holdings]
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
