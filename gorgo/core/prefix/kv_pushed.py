"""Blocks that engines without events push: a set of own hashes per replica.

Owns the sets. See `kv_index`, which matches them together with the blocks of events.

A block that a first token has confirmed counts beside those of the snapshot until the next one, which shows whether the
engine has retained it.
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
        #: Those of them that no snapshot has shown, with the time of their confirmation, oldest first.
        self._confirmed: dict[int, dict[int, float]] = {}

    def blocks_of(self, slot: int) -> int:
        """Return the blocks of a replica."""
        own = self._own.get(slot)
        return 0 if own is None else len(own)

    def reported(self, slot: int) -> int:
        """Return the blocks of a replica that its snapshot has."""
        return self.blocks_of(slot) - len(self._confirmed.get(slot, ()))

    def replace(self, slot: int, hashes: Sequence[int], *, limit: int) -> int:
        """Replace the reported blocks of a replica; return how many exceeded `limit` and were left out."""
        wanted, confirmed = dict.fromkeys(hashes), self._confirmed.get(slot, {})
        known = self._own.get(slot, ())
        self.remove(slot, [own for own in known if own not in wanted and own not in confirmed])
        return self.add(slot, wanted, limit=limit)

    def add(self, slot: int, hashes: Iterable[int], *, limit: int) -> int:
        """Add reported blocks to a replica; return how many exceeded `limit` and were left out."""
        known, bit, excess = self._own.setdefault(slot, {}), 1 << slot, 0
        confirmed = self._confirmed.get(slot)
        for own in hashes:
            if own in known:
                if confirmed:
                    confirmed.pop(own, None)
                continue
            if len(known) < limit:
                known[own] = None
                self._tier.add(own, bit)
            else:
                excess += 1
        self._drop_empty(slot)
        return excess

    def confirm(self, slot: int, hashes: Iterable[int], *, limit: int, now: float) -> None:
        """Add blocks that a first token has confirmed; those beyond `limit` are left out."""
        known, bit = self._own.setdefault(slot, {}), 1 << slot
        confirmed = self._confirmed.setdefault(slot, {})
        for own in hashes:
            if own not in known:
                if len(known) >= limit:
                    continue
                known[own] = None
                self._tier.add(own, bit)
            elif confirmed.pop(own, None) is None:
                continue
            confirmed[own] = now
        self._drop_empty(slot)

    def expire_confirmed(self, slot: int, *, before_s: float) -> None:
        """Remove blocks confirmed before `before_s` that no snapshot has shown."""
        confirmed = self._confirmed.get(slot, {})
        self.remove(slot, [own for own, since_s in confirmed.items() if since_s < before_s])

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """Remove blocks of a replica; those that it does not have are ignored."""
        known, bit = self._own.get(slot, {}), 1 << slot
        confirmed = self._confirmed.get(slot)
        for own in hashes:
            if own in known:
                del known[own]
                self._tier.remove(own, bit)
                if confirmed:
                    confirmed.pop(own, None)
        self._drop_empty(slot)

    def set_max_blocks(self, limit: int) -> None:
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
        for slot, confirmed in self._confirmed.items():
            assert confirmed
            assert confirmed.keys() <= self._own[slot].keys()

    def _drop_empty(self, slot: int) -> None:
        for sets in (self._own, self._confirmed):
            if slot in sets and not sets[slot]:
                del sets[slot]
