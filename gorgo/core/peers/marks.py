"""Prefixes that routers of the group had confirmed on replicas: marks at some depths, in the order of their last use.

Owns the marks and their bounds. The prefix index has what went through this Router, with all blocks.

Theory of operation. A mark is the hash of a whole prefix, so a prompt that has it at some depth shares all before it.
It stands for the blocks since the mark before it, so the marks of a replica add up to the blocks of all routers there,
each counted once. An engine evicts the least recently used blocks first, whoever used them. So marks beyond a replica's
KV capacity are evicted, oldest first, and what this Router's index has not used since is evicted with them: each Router
alone would count on a whole cache of its own.

A mark's use has the tick of the index at that time. Marks are estimates: nothing is proved by them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES, NO_PREFIX, ConfirmedPrefix
from gorgo.core.prefix.slots import slots_of

Floats = NDArray[np.float64]

#: Marks in all: some 250 bytes each.
MAX_MARKS = 400_000


class _Mark(NamedTuple):
    blocks: int
    tick: int
    used_s: float


class GroupPrefixes:
    """Marks of all replicas.

    Example
    -------
    >>> marks = GroupPrefixes()
    >>> marks.use(1, (1, 2), b"block--1block--2", tick=2, now=0.0, capacity_blocks=None)
    0
    >>> request = RouteRequest("r", 0.0, 200, blocks=b"block--1block--2block--3", block_tokens=64.0, prefix_hash=0)
    >>> marks.raise_matches(np.array([0.0, 0.0]), request).tolist()
    [0.0, 128.0]
    """

    def __init__(self, max_marks: int = MAX_MARKS) -> None:
        self._max_marks = max_marks
        self._marks = 0
        #: Replicas of each mark, one bit per slot.
        self._residents: dict[int, int] = {}
        #: Per slot: blocks and tick of each mark, the one used last at the end; and the sum of the blocks.
        self._orders: dict[int, OrderedDict[int, _Mark]] = {}
        self._blocks: dict[int, int] = {}
        self._all_slots = 0

    def __len__(self) -> int:
        return self._marks

    def raise_matches(self, matched: Floats, request: RouteRequest) -> Floats:
        """Return `matched` tokens per slot, or more where a mark of the prompt is deeper."""
        if not self._marks:
            return matched
        residents, left, raised = self._residents, self._all_slots & ((1 << len(matched)) - 1), matched
        words = np.frombuffer(request.blocks, dtype="<u8").tolist()
        for depth in range(len(words), 0, -1):
            found = residents.get(words[depth - 1], 0) & left
            if not found:
                continue
            if raised is matched:
                raised = matched.copy()
            for slot in slots_of(found):
                raised[slot] = max(raised[slot], depth * request.block_tokens)
            left &= ~found
            if not left:
                break
        return raised

    def last_used(self, slot: int, blocks: bytes, *, before_s: float) -> ConfirmedPrefix:
        """Return the deepest mark of a prompt on `slot` that was last used before a time."""
        order = self._orders.get(slot)
        if order:
            words = np.frombuffer(blocks, dtype="<u8").tolist()
            for depth in range(len(words), 0, -1):
                known = order.get(words[depth - 1])
                if known is not None and known.used_s < before_s:
                    return ConfirmedPrefix(depth, known.tick)
        return NO_PREFIX

    def use(
        self, slot: int, depths: Sequence[int], hashes: bytes, *, tick: int, now: float, capacity_blocks: int | None
    ) -> int:
        """Add the marks of a prompt to `slot`, used last, and evict what exceeds the bounds.

        Return the tick before which nothing that was used on the replica is left; 0 if nothing was evicted for its
        capacity.
        """
        order = self._orders.setdefault(slot, OrderedDict())
        bit, before, marks = 1 << slot, 0, []
        for depth, word in zip(depths, np.frombuffer(hashes, dtype="<u8").tolist(), strict=True):
            marks.append((word, depth - before))
            before = depth
        for word, blocks in reversed(marks):  # the shallowest is the last to be evicted
            known = order.pop(word, None)
            if known is None:
                self._residents[word] = self._residents.get(word, 0) | bit
                self._marks += 1
            order[word] = _Mark(blocks, tick, now)
            self._blocks[slot] = self._blocks.get(slot, 0) + blocks - (known.blocks if known else 0)
        self._all_slots |= bit
        oldest = 0
        while order and capacity_blocks is not None and self._blocks[slot] > capacity_blocks:
            self._evict_oldest(slot)
            oldest = next(iter(order.values())).tick if order else tick + 2
        while self._marks > self._max_marks:
            # Of this replica, unless it has less than its share.
            small = len(order) * len(self._orders) < self._marks
            self._evict_oldest(max(self._orders, key=self.marks_of) if small else slot)
        return oldest

    def evict_older(self, slot: int, *, before: int) -> list[int]:
        """Remove and return the marks of `slot` last used before tick `before`, oldest first."""
        order, evicted = self._orders.get(slot), list[int]()
        while order and next(iter(order.values())).tick < before:
            evicted.append(self._evict_oldest(slot))
        return evicted

    def median_tick(self, slot: int, hashes: bytes) -> int:
        """Return the median tick of the marks of `slot` that it has of these; 0 without one.

        A peer names marks of about one age that are evicted. Some may have been used again since.
        """
        order: Mapping[int, _Mark] = self._orders.get(slot, {})
        ticks = sorted(order[word].tick for word in np.frombuffer(hashes, dtype="<u8").tolist() if word in order)
        return ticks[len(ticks) // 2] if ticks else 0

    def flush(self, slot: int | None = None) -> None:
        """Remove the marks of one replica or of all."""
        for each in list(self._orders) if slot is None else (slot,):
            while self._orders.get(each):
                self._evict_oldest(each)
            self._orders.pop(each, None)
            self._blocks.pop(each, None)
            self._all_slots &= ~(1 << each)

    def marks_of(self, slot: int) -> int:
        """Return the number of marks of a replica."""
        return len(self._orders.get(slot, ()))

    def check(self) -> None:
        """Assert every invariant; visits all marks."""
        assert self._marks == sum(map(len, self._orders.values())) <= self._max_marks
        assert sum(residents.bit_count() for residents in self._residents.values()) == self._marks
        for slot, order in self._orders.items():
            assert self._blocks.get(slot, 0) == sum(mark.blocks for mark in order.values())
            assert all(self._residents[word] & 1 << slot for word in order)

    def _evict_oldest(self, slot: int) -> int:
        word, mark = self._orders[slot].popitem(last=False)
        self._blocks[slot] -= mark.blocks
        self._marks -= 1
        residents = self._residents[word] & ~(1 << slot)
        if residents:
            self._residents[word] = residents
        else:
            del self._residents[word]
        return word


def marks_of_prompt(blocks: bytes, depths: Sequence[int]) -> bytes:
    """Return the hash at each depth of a prompt, which has them all."""
    return b"".join([blocks[(depth - 1) * BLOCK_HASH_BYTES : depth * BLOCK_HASH_BYTES] for depth in depths])
