"""An unbounded set of prefixes, without eviction.

Owns the match of a key with earlier ones. `lower_bound` uses it for the trace so far, `engine.prediction` for the
prefixes that queued requests will add to a cache.
"""

from __future__ import annotations

from gorgo.core.prefix.radix import RadixNode, RadixTree


class PrefixSet:
    """A radix tree of keys; bounded by what its caller puts in (a trace, or one engine's line).

    Example
    -------
    >>> seen = PrefixSet(item_bytes=1)
    >>> seen.add(b"abcd")
    >>> seen.items(b"abce"), seen.items(b"x")
    (3, 0)
    """

    def __init__(self, *, item_bytes: int) -> None:
        self._tree: RadixTree[RadixNode] = RadixTree(RadixNode, item_bytes=item_bytes)

    def items(self, key: bytes) -> int:
        """Leading items of `key` that were seen as a prefix before."""
        return self._tree.match_path(key)[1]

    def add(self, key: bytes) -> None:
        """See `key`, a whole number of items, with all its prefixes."""
        tree = self._tree
        path, items = tree.match_path(key)
        if len(key) == items * tree.item_bytes:
            return
        node = path[-1] if path else tree.root
        if items < node.end:
            node = tree.split(node, items)
        tree.append(node, key[items * tree.item_bytes :])
