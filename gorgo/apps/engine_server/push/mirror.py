"""The blocks of an engine's cache by own hashes, and those that it has evicted since the last push.

Owns the translation of the engine's hashes. See `reporter` for the pushes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gorgo.core.prefix.kv_chain import chain_hashes
from gorgo.sim.engine.kv_observer import KvObserver


class CacheMirror(KvObserver):
    """An observer of one cache (`sim.engine`), whose items are token ids.

    Parameters
    ----------
    block_tokens:
        Tokens of a block.

    Example
    -------
    >>> mirror = CacheMirror(block_tokens=1)
    >>> mirror.stored([10, 11], None, b"aaaabbbb"), mirror.removed([11])
    (None, None)
    >>> mirror.blocks().tolist() == chain_hashes(b"aaaa", block_tokens=1)
    True
    >>> len(mirror.take_evicted()), len(mirror.take_evicted())
    (1, 0)
    """

    def __init__(self, *, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        #: Whether more has changed than evictions describe.
        self.was_cleared = False
        #: Engine's hash -> own hash.
        self._own: dict[int, int] = {}
        #: Engine's hash -> copies beyond the first.
        self._copies: dict[int, int] = {}
        self._evicted: dict[int, None] = {}

    def stored(self, hashes: Sequence[int], parent: int | None, items: bytes) -> None:
        root = 0 if parent is None else self._own.get(parent)
        if root is None:
            return  # Blocks behind an unknown one cannot be named; the router counts them as not cached.
        for engine_hash, own in zip(
            hashes, chain_hashes(items, block_tokens=self.block_tokens, root=root), strict=True
        ):
            if engine_hash in self._own:
                self._copies[engine_hash] = self._copies.get(engine_hash, 0) + 1
            self._own[engine_hash] = own
            self._evicted.pop(own, None)

    def removed(self, hashes: Sequence[int]) -> None:
        for engine_hash in hashes:
            more = self._copies.pop(engine_hash, 0)
            if more > 1:
                self._copies[engine_hash] = more - 1
            elif not more and engine_hash in self._own:
                self._evicted[self._own.pop(engine_hash)] = None

    def cleared(self) -> None:
        self._own.clear()
        self._copies.clear()
        self._evicted.clear()
        self.was_cleared = True

    def blocks(self) -> NDArray[np.uint64]:
        """Return the own hashes of all blocks."""
        return np.fromiter(self._own.values(), dtype=np.uint64, count=len(self._own))

    def take_evicted(self) -> NDArray[np.uint64]:
        """Return the own hashes evicted since the last call."""
        evicted = np.fromiter(self._evicted, dtype=np.uint64, count=len(self._evicted))
        self._evicted.clear()
        return evicted
