"""What one replica is believed to hold of the tree of prefixes, and in what order it would go.

Owns, for one replica, the order of use and the sums over what it holds. The tree, who else holds a node, and when
something has to go is `prefix_index`.

Theory of operation. Eviction is least recently used, leaves first: every use gets the next tick, noted only at the last
node of its path in `recent` (ordered by tick). A node's true last use is the latest of its own tick and those of what
ever hung below it, so when a leaf is evicted its parent takes over its tick, and since the leaf was the oldest of all,
that is the front of the order. An entry that comes to the front while the replica still holds something below it says
nothing any more and is dropped. So each step is O(1), nothing is searched or sorted, and the order never has more
entries than the replica holds nodes.

A tick is odd when the replica has shown the use that it stands for, by a first token, and even when it is only
believed. So a leaf's tick, and what its parent takes over, tell whether an engine really had the blocks then, which is
what a report that they are gone can be held against (`ConfirmedPrefix`).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from gorgo.core.prefix.radix import RadixNode

#: Bytes of one block hash.
BLOCK_HASH_BYTES = 8
#: Children looked at for one that the replica holds; thousands may branch off a shared start.
_FEW_CHILDREN = 64


class ConfirmedPrefix(NamedTuple):
    """What a replica had shown to hold of a prompt when the prompt was dispatched there.

    `blocks` leading ones, the last of which was used at `tick` or later; 0 where that is not known.
    """

    blocks: int = 0
    tick: int = 0


NO_PREFIX = ConfirmedPrefix()


class Node(RadixNode):
    """A run of blocks held by the same replicas. Bit `slot` of `held` and `confirmed` stands for that replica."""

    __slots__ = ("confirmed", "residents")

    def __init__(self, edge: bytes, end: int, parent: Node | None) -> None:
        super().__init__(edge, end, parent)
        self.residents = 0
        self.confirmed = 0

    def inherit(self, lower: Node) -> None:
        self.residents = lower.residents
        self.confirmed = lower.confirmed


class Residency:
    """What one replica holds.

    Parameters
    ----------
    slot:
        The replica's bit in the nodes.
    capacity:
        Blocks that it may hold, `None` if that is not known. May be replaced.
    """

    __slots__ = ("bit", "blocks", "capacity", "children", "nodes", "recent")

    def __init__(self, slot: int, capacity: int | None) -> None:
        self.bit = 1 << slot
        self.capacity = capacity
        self.blocks = 0
        self.nodes = 0
        #: Last ticks, oldest first. Every leaf is here; an inner node is where a prompt ended there.
        self.recent: OrderedDict[Node, int] = OrderedDict()
        #: How many children of an inner node this replica holds; leaves and the root are absent.
        self.children: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        """Hold `node`, whose parent it holds or is about to."""
        # A node's only holder shares its bit with all other such nodes: 28 to 96 bytes less each.
        node.residents = node.residents | self.bit if node.residents else self.bit
        self.blocks += len(node.edge) // BLOCK_HASH_BYTES
        self.nodes += 1
        parent = node.parent
        if parent is not None and parent.end:
            self.children[parent] = self.children.get(parent, 0) + 1

    def remove(self, node: Node) -> None:
        """Undo `take` on a leaf of the replica that is not in the order of use any more."""
        node.residents &= ~self.bit
        node.confirmed &= ~self.bit
        self.blocks -= len(node.edge) // BLOCK_HASH_BYTES
        self.nodes -= 1
        parent = node.parent
        if parent is not None and parent.end:
            left = self.children.pop(parent) - 1
            if left:
                self.children[parent] = left

    def split(self, upper: Node) -> None:
        """A node that it holds was cut in two, of which `upper` is the new one."""
        self.nodes += 1
        self.children[upper] = 1

    def touch(self, node: Node, tick: int) -> None:
        """`node` is the end of what was used last."""
        self.recent[node] = tick
        self.recent.move_to_end(node)

    def oldest_tick(self) -> int | None:
        """Tick of the least recently used leaf, which is at the front then."""
        recent, below = self.recent, self.children
        while recent:
            node = next(iter(recent))
            if node not in below:
                return recent[node]
            del recent[node]
        return None

    def evict(self, tick: int) -> Node:
        """Drop the leaf at the front, whose `tick` is the oldest, and answer it."""
        leaf, _ = self.recent.popitem(last=False)
        self.remove(leaf)
        parent = leaf.parent
        assert parent is not None
        if parent.end and parent not in self.recent and parent not in self.children:
            self.recent[parent] = tick
            self.recent.move_to_end(parent, last=False)
        return leaf

    def remove_below(self, top: Node) -> list[Node]:
        """Drop `top` and all below it that the replica holds; answers them, leaves first."""
        going = [top]
        for node in going:
            if node in self.children:
                going.extend(child for child in node.children.values() if child.residents & self.bit)
        going.reverse()
        for node in going:
            self.recent.pop(node, None)
            self.remove(node)
        return going

    def confirmed_prefix(self, path: list[Node]) -> ConfirmedPrefix:
        """What it has shown to hold of a path from the root."""
        for node in reversed(path):
            if node.confirmed & self.bit:
                return ConfirmedPrefix(node.end, self._last_confirmed(node))
        return NO_PREFIX

    def check(self, nodes: list[Node], below: dict[Node, int]) -> None:
        """Assert every invariant, given the nodes that it holds and their children that it holds too."""
        assert self.children == below
        assert self.nodes == len(nodes)
        assert self.blocks == sum(len(node.edge) for node in nodes) // BLOCK_HASH_BYTES
        assert self.recent.keys() <= set(nodes), "only what is held is in the order of use"
        assert self.recent.keys() >= {node for node in nodes if node not in below}, "every leaf can be evicted"
        ticks = list(self.recent.values())
        assert ticks == sorted(set(ticks)), "oldest first"

    def _last_confirmed(self, node: Node | None) -> int:
        """A tick at which the replica showed to hold `node`, the last one as far as a single way down tells."""
        latest = 0
        while node is not None:
            tick = self.recent.get(node, 0)
            latest = max(latest, tick) if tick % 2 else latest
            newest = islice(reversed(node.children.values()), _FEW_CHILDREN)
            node = None
            for child in newest:
                if child.confirmed & self.bit:
                    node = child
                    break
        return latest
