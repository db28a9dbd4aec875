"""Blocks that engines without events push: a set of own hashes per replica.

Owns the sets. See `kv_index`, which matches them together with the blocks of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from gorgo.core.prefix.kv_source import TierBlocks


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
        #: Own hashes of each slot, oldest first; none of them is empty.
        self._own: dict[int, dict[int, None]] = {}

    def count(self, slot: int) -> int:
        """Return the blocks of a replica."""
        own = self._own.get(slot)
        return 0 if own is None else len(own)

    def replace(self, slot: int, hashes: Sequence[int], *, limit: int) -> int:
        """Replace the blocks of a replica; return how many exceeded `limit` and were left out."""
        wanted = dict.fromkeys(hashes)
        self.remove(slot, [own for own in self._own.get(slot, ()) if own not in wanted])
        return self.add(slot, wanted, limit=limit)

    def add(self, slot: int, hashes: Iterable[int], *, limit: int) -> int:
        """Add blocks to a replica; return how many exceeded `limit` and were left out."""
        known, bit, excess = self._own.setdefault(slot, {}), 1 << slot, 0
        for own in hashes:
            if own in known:
                continue
            if len(known) < limit:
                known[own] = None
                self._tier.add(own, bit)
            else:
                excess += 1
        if not known:
            del self._own[slot]
        return excess

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """Remove blocks of a replica; those that it does not have are ignored."""
        known, bit = self._own.get(slot, {}), 1 << slot
        for own in hashes:
            if own in known:
                del known[own]
                self._tier.remove(own, bit)
        if not known:
            self._own.pop(slot, None)

    def resize(self, limit: int) -> None:
        """Remove the oldest blocks of each replica beyond `limit`."""
        for slot, known in list(self._own.items()):
            self.remove(slot, list(islice(known, max(0, len(known) - limit))))

    def clear_replica(self, slot: int) -> None:
        """Remove all blocks of a replica."""
        self.remove(slot, list(self._own.get(slot, ())))

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each own hash with the bit of its slot."""
        for slot, known in self._own.items():
            for own in known:
                yield own, 1 << slot

    def check(self, limit: int) -> None:
        """Assert every invariant."""
        assert all(0 < len(known) <= limit for known in self._own.values())
