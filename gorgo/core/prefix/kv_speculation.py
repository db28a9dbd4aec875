"""Speculated blocks: prompts that were dispatched to a replica with a feed, until the feed reports them.

Owns the blocks of one index, and the order in which prompts expire. See `kv_feeds` for when they begin and end.

Theory of operation. A report is late by the prefill and by one way, so a burst of siblings would find nothing. Each
block that a prompt adds counts at once. A report of a block ends it. A block of two prompts belongs to the later one.
A prompt that expires was lost on its way, or its report was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from gorgo.core.prefix.kv_source import TierBlocks

#: Blocks of all speculated prompts, about 75 MB: two seconds of 100 prompts a second with 2,500 new blocks each. The
#: prompts that expire first make room.
MAX_BLOCKS = 500_000


class SpeculatedBlocks:
    """Speculated blocks of all replicas, for one model and block size.

    Parameters
    ----------
    tier:
        Blocks of the GPU on all replicas.
    """

    def __init__(self, tier: TierBlocks) -> None:
        self._tier = tier
        #: Own hash -> its prompt, by slot; none of them is empty.
        self._prompts: dict[int, dict[int, Speculation]] = {}

    def of(self, slot: int) -> dict[int, Speculation] | None:
        """Return the blocks of a replica; `None` without any. Not to be changed."""
        return self._prompts.get(slot)

    def blocks_of(self, slot: int) -> int:
        """Return the blocks of a replica."""
        return len(self._prompts.get(slot, ()))

    def add(self, prompt: Speculation) -> None:
        """Count the blocks of a prompt on its replica."""
        blocks, bit = self._prompts.setdefault(prompt.slot, {}), 1 << prompt.slot
        for own in prompt.hashes:
            if own not in blocks:
                self._tier.add(own, bit)
            blocks[own] = prompt
        if not blocks:
            del self._prompts[prompt.slot]

    def remove(self, prompt: Speculation) -> None:
        """Remove what is left of a prompt."""
        blocks = self._prompts.get(prompt.slot, {})
        for own in prompt.hashes:
            if blocks.get(own) is prompt:
                self.confirm(prompt.slot, own)

    def confirm(self, slot: int, own: int) -> None:
        """End a block that is speculated: it was reported."""
        blocks = self._prompts[slot]
        del blocks[own]
        self._tier.remove(own, 1 << slot)
        if not blocks:
            del self._prompts[slot]

    def confirm_all(self, slot: int, hashes: Iterable[int]) -> None:
        """End those of some blocks that are speculated."""
        blocks = self._prompts.get(slot)
        if blocks:
            for own in blocks.keys() & set(hashes):
                self.confirm(slot, own)

    def clear_replica(self, slot: int) -> None:
        """Remove all blocks of a replica."""
        for own in list(self._prompts.get(slot, ())):
            self.confirm(slot, own)

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield each own hash with the bit of its slot."""
        for slot, blocks in self._prompts.items():
            assert blocks, "a replica without blocks is removed"
            for own in blocks:
                yield own, 1 << slot


@dataclass(slots=True, eq=False)
class Speculation:
    """Blocks that one prompt adds to a replica, until `expires_s`."""

    blocks: SpeculatedBlocks
    slot: int
    hashes: Sequence[int]
    expires_s: float


class SpeculationQueue:
    """Speculated prompts of all indexes, by the time at which they expire.

    Example
    -------
    >>> blocks, prompts = SpeculatedBlocks(TierBlocks()), SpeculationQueue()
    >>> prompts.add(Speculation(blocks, 0, [7, 8], expires_s=2.0))
    >>> prompts.add(Speculation(blocks, 0, [8, 9], expires_s=3.0))
    >>> prompts.expire(now=2.0)
    >>> blocks.blocks_of(0)
    2
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._order: list[tuple[float, int, Speculation]] = []
        self._numbers = count()

    def add(self, prompt: Speculation) -> None:
        """Begin a prompt; those that expire first end where it exceeds the bound."""
        prompt.hashes = prompt.hashes[:MAX_BLOCKS]
        self.blocks += len(prompt.hashes)
        while self.blocks > MAX_BLOCKS:
            self._end(heappop(self._order)[2])
        prompt.blocks.add(prompt)
        heappush(self._order, (prompt.expires_s, next(self._numbers), prompt))

    def withdraw(self, prompt: Speculation) -> None:
        """End a prompt before its time."""
        self._end(prompt)

    def expire(self, *, now: float) -> None:
        """End the prompts that are due."""
        while self._order and self._order[0][0] <= now:
            self._end(heappop(self._order)[2])

    def check(self) -> None:
        """Assert the bound and its count."""
        assert self.blocks == sum(len(prompt.hashes) for _, _, prompt in self._order) <= MAX_BLOCKS

    def _end(self, prompt: Speculation) -> None:
        prompt.blocks.remove(prompt)
        self.blocks -= len(prompt.hashes)
        prompt.hashes = ()
