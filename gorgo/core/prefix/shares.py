"""Shares of clients: what each client stored in the prefix index, and which of it was used least recently.

Owns the sums and the orders by client; the index evicts. A node belongs to the client whose prompt stored it first. A
request without a client's name belongs to no share.

Theory of operation. While the index is full, a client beyond its share replaces its own blocks, and any other the
oldest of all. So one client's prompts evict those of others until it has its share, and no further. An order has each
leaf of its client; an entry with children is obsolete, and dropped at the front. A parent that becomes a leaf is used
as long ago as the leaf that was evicted below it, so it comes to the front.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gorgo.core.prefix.residency import BLOCK_HASH_BYTES, Node

#: Of the index. One client alone may use half of it; two that flood it leave no room to a third, whatever the share.
CLIENT_SHARE = 0.5


class _ClientBlocks:
    """Blocks of one client, the pairs of a node and a resident replica, and its leaves by their last use."""

    __slots__ = ("blocks", "order", "pairs")

    def __init__(self) -> None:
        self.blocks = 0
        self.pairs = 0
        self.order: OrderedDict[Node, None] = OrderedDict()


class ClientShares:
    """Nodes by the client that stored them."""

    def __init__(self) -> None:
        self._shares: dict[str, _ClientBlocks] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def store(self, node: Node, client: str) -> None:
        """Give a new leaf to `client`."""
        node.owner = client
        share = self._shares.setdefault(client, _ClientBlocks())
        share.blocks += len(node.edge) // BLOCK_HASH_BYTES
        share.order[node] = None

    def count_pairs(self, node: Node, pairs: int) -> None:
        """Add pairs of the node and a resident replica."""
        if node.owner is not None:
            self._shares[node.owner].pairs += pairs

    def use(self, node: Node) -> None:
        """Record `node` as the end of the latest use."""
        if node.owner is not None:
            order = self._shares[node.owner].order
            order[node] = None
            order.move_to_end(node)

    def remove(self, node: Node) -> None:
        """Forget a leaf that left the tree."""
        if node.owner is not None:
            share = self._shares[node.owner]
            share.blocks -= len(node.edge) // BLOCK_HASH_BYTES
            share.order.pop(node, None)
            if not share.blocks:
                del self._shares[node.owner]
        parent = node.parent
        if parent is not None and parent.owner is not None and not parent.children:
            order = self._shares[parent.owner].order
            if parent not in order:
                order[parent] = None
                order.move_to_end(parent, last=False)

    def oldest_beyond(self, client: str | None, limit: float) -> Node | None:
        """Return the least recently used leaf of a client with more than `limit` blocks or pairs; `None` for others."""
        share = None if client is None else self._shares.get(client)
        if share is None or max(share.blocks, share.pairs) <= limit:
            return None
        while share.order:
            node = next(iter(share.order))
            if not node.children:
                return node
            del share.order[node]
        return None  # others' prompts continue all of its own

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert every invariant, given all nodes of the tree."""
        blocks: dict[str, int] = {}
        pairs: dict[str, int] = {}
        leaves: dict[str, set[Node]] = {}
        owned: dict[str, set[Node]] = {}
        for node in nodes:
            if node.owner is not None:
                blocks[node.owner] = blocks.get(node.owner, 0) + len(node.edge) // BLOCK_HASH_BYTES
                pairs[node.owner] = pairs.get(node.owner, 0) + node.residents.bit_count()
                owned.setdefault(node.owner, set()).add(node)
                if not node.children:
                    leaves.setdefault(node.owner, set()).add(node)
        assert blocks == {client: share.blocks for client, share in self._shares.items()}
        assert pairs == {client: share.pairs for client, share in self._shares.items()}
        for client, share in self._shares.items():
            assert leaves.get(client, set()) <= share.order.keys() <= owned[client], "every leaf can be evicted"
