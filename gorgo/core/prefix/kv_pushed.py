"""Blocks that engines without events push: a set of own hashes per replica.

Owns the sets. See `kv_index`, which matches them together with the blocks of events.

A block that a first token has confirmed counts beside those of the snapshot until the next one, which shows whether the
engine has retained it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest

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
        #: Blocks of each slot; none of them is empty.
        self._own: dict[int, _HashSet] = {}
        #: Those of them that no snapshot has shown, with the time of their confirmation, oldest first.
        self._confirmed: dict[int, dict[int, float]] = {}

    def blocks_of(self, slot: int) -> int:
        """Return the blocks of a replica."""
        return len(self._own.get(slot, ()))

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
        known, bit, excess = self._own.setdefault(slot, _HashSet()), 1 << slot, 0
        confirmed = self._confirmed.get(slot)
        for own in hashes:
            if own in known:
                if confirmed:
                    confirmed.pop(own, None)
                continue
            if len(known) < limit:
                known.add(own)
                self._tier.add(own, bit)
            else:
                excess += 1
        self._drop_empty(slot)
        return excess

    def confirm(self, slot: int, hashes: Iterable[int], *, limit: int, now: float) -> None:
        """Add blocks that a first token has confirmed; those beyond `limit` are left out."""
        known, bit = self._own.setdefault(slot, _HashSet()), 1 << slot
        confirmed = self._confirmed.setdefault(slot, {})
        for own in hashes:
            if own not in known:
                if len(known) >= limit:
                    continue
                known.add(own)
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
        known, bit = self._own.get(slot), 1 << slot
        if known is None:
            return
        confirmed = self._confirmed.get(slot)
        for own in hashes:
            if own in known:
                known.remove(own)
                self._tier.remove(own, bit)
                if confirmed:
                    confirmed.pop(own, None)
        self._drop_empty(slot)

    def set_max_blocks(self, limit: int) -> None:
        """Remove about the oldest blocks of each replica beyond `limit`."""
        for slot, known in list(self._own.items()):
            self.remove(slot, list(islice(known, max(0, len(known) - limit))))

    def remove_some(self, slot: int, count: int) -> int:
        """Remove up to `count` blocks of a replica; return how many."""
        newest = list(islice(self._own[slot].newest(), count)) if slot in self._own else []
        self.remove(slot, newest)
        return len(newest)

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
            assert confirmed.keys() <= set(self._own[slot])

    def _drop_empty(self, slot: int) -> None:
        if slot in self._own and not len(self._own[slot]):
            del self._own[slot]
        if slot in self._confirmed and not self._confirmed[slot]:
            del self._confirmed[slot]


class _HashSet:
    """Own hashes in parts, as those of `TierBlocks`."""

    #: With few blocks each takes 15 KB: there is one of these per replica.
    PARTS = 64
    SHIFT = 58

    def __init__(self) -> None:
        #: Oldest first.
        self._parts: list[dict[int, None]] = [{} for _ in range(self.PARTS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, own: int) -> bool:
        return own in self._parts[own >> self.SHIFT]

    def __iter__(self) -> Iterator[int]:
        """Yield the oldest of each part, then the next ones."""
        rows = zip_longest(*self._parts)
        return (own for own in chain.from_iterable(rows) if own is not None)

    def newest(self) -> Iterator[int]:
        """Yield the blocks, the newest of a part first: after removals the oldest of a dict are slow to find."""
        return chain.from_iterable(map(reversed, self._parts))

    def add(self, own: int) -> None:
        """Add a block that is not there."""
        self._parts[own >> self.SHIFT][own] = None
        self._count += 1

    def remove(self, own: int) -> None:
        """Remove a block that is there."""
        del self._parts[own >> self.SHIFT][own]
        self._count -= 1
