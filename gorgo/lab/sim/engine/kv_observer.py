"""The observer of an engine's KV cache: which blocks it stores and removes, as real engines publish it.

Owns the interface and the blocks of a radix cache. Publishers of events and reporters of pushes implement it; a cache
without an observer computes none of it.

A block is named by a chained hash, as in a real engine: valid within one cache and one process, and signed. A cache of
the SGLang kind stores the blocks of a prompt after its whole prefill, one of the vLLM kind each block as soon as its
last token is scheduled. The latter can have several copies of a block, each of which is stored and removed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class KvObserver(Protocol):
    """Receiver of the changes of one cache, in their order. It must not call the cache."""

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        """Store consecutive blocks behind `parent`, `None` at the start of a prompt; `items` are their key items."""

    def removed(self, hashes: Sequence[int]) -> None:
        """Remove one copy of each of these blocks."""

    def cleared(self) -> None:
        """Empty the cache."""


class KvObservers(KvObserver):
    """Several observers of one cache, each with every change.

    Parameters
    ----------
    observers:
        In the order in which they receive a change.
    """

    def __init__(self, observers: Sequence[KvObserver]) -> None:
        self._observers = tuple(observers)

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        for observer in self._observers:
            observer.stored(hashes, parent, items)

    def removed(self, hashes: Sequence[int]) -> None:
        for observer in self._observers:
            observer.removed(hashes)

    def cleared(self) -> None:
        for observer in self._observers:
            observer.cleared()


class TreeBlocks:
    """The blocks of a cache whose prefixes are a tree: a block is cached while its last item is in the tree.

    Parameters
    ----------
    observer:
        Receives them.
    block_bytes:
        Bytes of a block's items.

    Example
    -------
    >>> class Printed:
    ...     def stored(self, hashes, parent, items):
    ...         print(len(hashes), parent is None, items)
    ...     def removed(self, hashes):
    ...         print(len(hashes))
    >>> blocks = TreeBlocks(Printed(), block_bytes=2)
    >>> blocks.report_stored(b"abcde", start=0)
    2 True b'abcd'
    >>> blocks.report_stored(b"abcdef", start=5)  # The block began with an item that was cached before.
    1 False b'ef'
    """

    def __init__(self, observer: KvObserver, *, block_bytes: int) -> None:
        self._observer = observer
        self._block_bytes = block_bytes

    def report_stored(self, key: bytes, *, start: int) -> None:
        """Report what `key` adds behind its first `start` bytes."""
        first, hashes = start // self._block_bytes, self._hashes(key)
        if added := hashes[first:]:
            parent = hashes[first - 1] if first else None
            items = key[first * self._block_bytes : len(hashes) * self._block_bytes]
            self._observer.stored(added, parent, items)

    def report_removed(self, key: bytes, *, start: int) -> None:
        """Report that `key` is cut to its first `start` bytes."""
        if removed := self._hashes(key)[start // self._block_bytes :]:
            self._observer.removed(removed)

    def report_cleared(self) -> None:
        """Report an empty cache."""
        self._observer.cleared()

    def _hashes(self, key: bytes) -> list[int]:
        """Return the hash of each whole block."""
        size, parent, hashes = self._block_bytes, 0, []
        for end in range(size, len(key) + 1, size):
            parent = hash((parent, key[end - size : end]))
            hashes.append(parent)
        return hashes
