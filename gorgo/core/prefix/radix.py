"""A path-compressed radix tree over strings of fixed-size items: the descent and the split, no residency.

Owns edges, children and depths. What a node *means* (its replicas, its locks) belongs to the subclasses
in `core.prefix.residency` (8-byte block hashes) and `sim.engine.kv_cache` (4-byte tokens).

Theory of operation: an edge is the concatenated items as `bytes`. A whole edge is compared with one
`bytes.startswith` (memcmp), about 60 ns whatever its length, against about 1 us for a numpy comparison; numpy is used
once per descent at most, to find where the last edge diverges. Children are keyed by the bytes of their first item.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Self, TypeVar

import numpy as np


class RadixNode:
    """A node and the edge that leads to it. `end` is the depth in items at the end of its edge."""

    __slots__ = ("children", "edge", "end", "parent")

    def __init__(self, edge: bytes, end: int, parent: Self | None) -> None:
        self.edge = edge
        self.end = end
        self.parent = parent
        self.children: dict[bytes, Self] = {}

    def path_items(self) -> bytes:
        """Return the items from the root to the end of the edge."""
        edges, node = [self.edge], self
        while (parent := node.parent) is not None:
            edges.append(parent.edge)
            node = parent
        return b"".join(reversed(edges))

    def inherit(self, lower: Self) -> None:
        """Called on the new upper node of a split: copy what is also true of a prefix of `lower`. Here: nothing."""


NodeT = TypeVar("NodeT", bound=RadixNode)


class RadixTree(Generic[NodeT]):
    """The tree. `root` has an empty edge and no meaning of its own."""

    def __init__(self, node_type: type[NodeT], *, item_bytes: int) -> None:
        self.node_type = node_type
        self.item_bytes = item_bytes
        self.root = node_type(b"", 0, None)
        #: The latest descent, until the tree changes: a key is matched to choose a replica and again to add it there.
        self._matched: tuple[bytes, list[NodeT], int] | None = None

    def match_path(self, key: bytes) -> tuple[list[NodeT], int]:
        """Return the nodes along `key` and the number of matching items.

        All nodes but the last match over their whole edge; the last one matches at least in its first item, so
        `matched < path[-1].end` says that the descent stopped inside its edge.
        """
        if self._matched is not None and self._matched[0] == key:
            return self._matched[1:]
        path, items = self.match_below(self.root, key)
        self._matched = key, path, items
        return path, items

    def match_below(self, node: NodeT, key: bytes) -> tuple[list[NodeT], int]:
        """Return the nodes along `key` below `node`, with whose prefix it begins, and the number of matching items."""
        size, position = self.item_bytes, node.end * self.item_bytes
        path: list[NodeT] = []
        while True:
            child = node.children.get(key[position : position + size])
            if child is None:
                return path, position // size
            path.append(child)
            if not key.startswith(child.edge, position):
                return path, position // size + _common_items(child.edge, key, position, size)
            position += len(child.edge)
            node = child

    def descendants(self) -> Iterator[NodeT]:
        """Every node but the root, parents before their children."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def split(self, node: NodeT, at: int) -> NodeT:
        """Cut `node`'s edge at depth `at` (items, strictly inside the edge); return the new upper node."""
        self._matched = None
        parent = node.parent
        assert parent is not None, "the root has no edge to cut"
        cut = len(node.edge) - (node.end - at) * self.item_bytes
        assert 0 < cut < len(node.edge), "a cut lies strictly inside the edge"
        size = self.item_bytes
        upper = self.node_type(node.edge[:cut], at, parent)
        parent.children[node.edge[:size]] = upper
        node.edge = node.edge[cut:]
        node.parent = upper
        upper.children[node.edge[:size]] = node
        upper.inherit(node)
        return upper

    def append(self, parent: NodeT, items: bytes) -> NodeT:
        """Add a new leaf with edge `items` (not empty) below `parent`."""
        self._matched = None
        child = self.node_type(items, parent.end + len(items) // self.item_bytes, parent)
        parent.children[items[: self.item_bytes]] = child
        return child

    def remove(self, node: NodeT) -> None:
        """Remove a leaf."""
        self._matched = None
        assert not node.children, "only a leaf can be removed"
        assert node.parent is not None, "the root stays"
        del node.parent.children[node.edge[: self.item_bytes]]


def _common_items(edge: bytes, key: bytes, position: int, size: int) -> int:
    """Items that `edge` shares with `key` from `position` on, when they are known to differ somewhere."""
    count = min(len(edge), len(key) - position) // size
    mine = np.frombuffer(edge, dtype=np.uint8, count=count * size)
    other = np.frombuffer(key, dtype=np.uint8, count=count * size, offset=position)
    differing = mine != other
    first = int(differing.argmax())
    return first // size if differing[first] else count
