"""Residency: the blocks that one replica is estimated to have in the prefix tree, and their order of eviction.

Owns, for one replica, the order of use and the sums over its nodes. See `index` for the tree and the bounds.

Theory of operation. Eviction is least recently used, leaves first: every use gets the next tick, recorded only at the
last node of its path in `recent` (ordered by tick). A node's true last use is the latest of its own tick and those of
all that was ever below it. So when a leaf is evicted its parent takes its tick, and since the leaf was the oldest of
all, that is the front of the order. An entry at the front with a resident node below it is obsolete and dropped. So
each step is O(1), nothing is searched or sorted, and the order never has more entries than the replica has nodes.

A tick is odd when a first token confirmed the use, and even when the use is estimated. So a leaf's tick, and the one
that its parent takes, say whether an engine really had the blocks then: a report that they are not cached is compared
with it (`ConfirmedPrefix`).
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from gorgo.core.prefix.radix import RadixNode

#: Bytes of one block hash.
BLOCK_HASH_BYTES = 8
#: Children searched for a resident one; thousands may branch off a shared start.
_FEW_CHILDREN = 64


class ConfirmedPrefix(NamedTuple):
    """The prefix of a prompt that was confirmed on a replica when the prompt was dispatched there.

    The last of `blocks` was used at `tick` or later; 0 is unknown.
    """

    blocks: int = 0
    tick: int = 0


NO_PREFIX = ConfirmedPrefix()


class Node(RadixNode):
    """A run of blocks with the same replicas. Bit `slot` of `residents` and `confirmed` stands for a replica."""

    __slots__ = ("confirmed", "owner", "residents")

    def __init__(self, edge: bytes, end: int, parent: Node | None) -> None:
        super().__init__(edge, end, parent)
        self.residents = 0
        self.confirmed = 0
        #: The client that stored it.
        self.owner: str | None = None

    def inherit(self, lower: Node) -> None:
        self.residents = lower.residents
        self.confirmed = lower.confirmed
        self.owner = lower.owner


class Residency:
    """Nodes of one replica.

    Parameters
    ----------
    slot:
        The replica's bit in the nodes.
    capacity:
        Most blocks, `None` if unknown. May be replaced.
    """

    __slots__ = ("bit", "blocks", "capacity", "children", "nodes", "recent")

    def __init__(self, slot: int, capacity: int | None) -> None:
        self.bit = 1 << slot
        self.capacity = capacity
        self.blocks = 0
        self.nodes = 0
        #: Last ticks, oldest first. Every leaf is here; an inner node is where a prompt ended there.
        self.recent: OrderedDict[Node, int] = OrderedDict()
        #: Resident children of each inner node; leaves and the root are absent.
        self.children: dict[Node, int] = {}

    def add(self, node: Node) -> None:
        """Add `node`; its parent is resident or is added next."""
        # Nodes with this resident alone share one integer: 28 to 96 bytes less each.
        node.residents = node.residents | self.bit if node.residents else self.bit
        self.blocks += len(node.edge) // BLOCK_HASH_BYTES
        self.nodes += 1
        parent = node.parent
        if parent is not None and parent.end:
            self.children[parent] = self.children.get(parent, 0) + 1

    def remove(self, node: Node) -> None:
        """Remove a leaf that is not in the order of use."""
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
        """Count the new `upper` half of a resident node that was split."""
        self.nodes += 1
        self.children[upper] = 1

    def touch(self, node: Node, tick: int) -> None:
        """Record `node` as the end of the latest use."""
        self.recent[node] = tick
        self.recent.move_to_end(node)

    def oldest_tick(self) -> int | None:
        """Return the tick of the least recently used leaf, and bring it to the front."""
        recent, below = self.recent, self.children
        while recent:
            node = next(iter(recent))
            if node not in below:
                return recent[node]
            del recent[node]
        return None

    def evict(self, tick: int) -> Node:
        """Remove and return the leaf at the front, whose `tick` is the oldest."""
        leaf, _ = self.recent.popitem(last=False)
        self.remove(leaf)
        parent = leaf.parent
        assert parent is not None
        if parent.end and parent not in self.recent and parent not in self.children:
            self.recent[parent] = tick
            self.recent.move_to_end(parent, last=False)
        return leaf

    def evict_early(self, leaf: Node, tick: int) -> None:
        """Remove a leaf that is not the oldest. A parent that becomes a leaf counts as used at `tick`, the latest."""
        del self.recent[leaf]
        self.remove(leaf)
        parent = leaf.parent
        if parent is not None and parent.end and parent not in self.recent and parent not in self.children:
            self.touch(parent, tick)

    def remove_below(self, top: Node) -> list[Node]:
        """Remove `top` and all resident nodes below it; return them, leaves first."""
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
        """Return the confirmed prefix of a path from the root."""
        for node in reversed(path):
            if node.confirmed & self.bit:
                return ConfirmedPrefix(node.end, self._last_confirmed(node))
        return NO_PREFIX

    def check(self, nodes: list[Node], below: dict[Node, int]) -> None:
        """Assert every invariant, given the resident nodes and the number of their resident children."""
        assert self.children == below
        assert self.nodes == len(nodes)
        assert self.blocks == sum(len(node.edge) for node in nodes) // BLOCK_HASH_BYTES
        assert self.recent.keys() <= set(nodes), "only resident nodes are in the order of use"
        assert self.recent.keys() >= {node for node in nodes if node not in below}, "every leaf can be evicted"
        ticks = list(self.recent.values())
        assert ticks == sorted(set(ticks)), "oldest first"

    def _last_confirmed(self, node: Node | None) -> int:
        """Return a tick at which the replica confirmed `node`: the last one on a single path down."""
        latest = 0
        while node is not None:
            tick = self.recent.get(node, 0)
            if tick > latest and tick % 2:
                latest = tick
            if not node.children:
                break
            newest = islice(reversed(node.children.values()), _FEW_CHILDREN)
            node = None
            for child in newest:
                if child.confirmed & self.bit:
                    node = child
                    break
        return latest
