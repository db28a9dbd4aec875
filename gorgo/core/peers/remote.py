"""Prefixes that other routers had confirmed: marks at some depths of a prompt, without the blocks between them.

Owns the marks, their order of use and their bounds. The prefix index has what went through this Router.

Theory of operation. A mark is the hash of a whole prefix, so a prompt that has it at some depth shares all before it.
Marks are estimates: the index never proves or corrects anything by them, and they never take space from it. An own
first token confirms a prompt in the index, where its blocks then count on their own.

Per replica, marks are in order of their last report. A mark stands for the blocks since the mark before it in its
prompt; marks beyond a replica's KV capacity are evicted, oldest first. A report that an engine no longer has a prefix
evicts all marks that were not reported since that prefix: an engine evicts the least recently used blocks first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES
from gorgo.core.prefix.slots import slots_of

Floats = NDArray[np.float64]

#: Marks in all: some 200 bytes each.
MAX_MARKS = 200_000


class RemotePrefixes:
    """Marks of all replicas.

    Example
    -------
    >>> marks = RemotePrefixes()
    >>> marks.add(1, (1, 2), b"block--1block--2")
    >>> request = RouteRequest("r", 0.0, 200, blocks=b"block--1block--2block--3", block_tokens=64.0, prefix_hash=0)
    >>> marks.raise_matches(np.array([0.0, 0.0]), request).tolist()
    [0.0, 128.0]
    """

    def __init__(self, max_marks: int = MAX_MARKS) -> None:
        self._max_marks = max_marks
        self._marks = 0
        #: Replicas of each mark, one bit per slot.
        self._residents: dict[int, int] = {}
        #: Per slot: blocks of each mark, and their sum; the mark reported last comes last.
        self._orders: dict[int, OrderedDict[int, int]] = {}
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

    def add(self, slot: int, depths: Sequence[int], hashes: bytes, *, capacity_blocks: int | None = None) -> None:
        """Add the marks of a prompt to `slot`, used last, and evict what exceeds the bounds."""
        words = np.frombuffer(hashes, dtype="<u8").tolist()
        order = self._orders.setdefault(slot, OrderedDict())
        bit, before, marks = 1 << slot, 0, []
        for depth, word in zip(depths, words, strict=True):
            marks.append((word, depth - before))
            before = depth
        for word, blocks in reversed(marks):  # the shallowest is the last to be evicted
            known = order.pop(word, None)
            if known is None:
                self._residents[word] = self._residents.get(word, 0) | bit
                self._marks += 1
            order[word] = blocks
            self._blocks[slot] = self._blocks.get(slot, 0) + blocks - (known or 0)
        self._all_slots |= bit
        while order and capacity_blocks is not None and self._blocks[slot] > capacity_blocks:
            self._evict_oldest(slot)
        while self._marks > self._max_marks:
            # Of this replica, unless it has less than its share.
            small = len(order) * len(self._orders) < self._marks
            self._evict_oldest(max(self._orders, key=self.marks_of) if small else slot)

    def evict(self, slot: int, hashes: bytes) -> None:
        """Remove the marks of `slot` that an engine no longer has, and all that are older than the newest of them."""
        order = self._orders.get(slot)
        if order is None:
            return
        evicted = {word for word in np.frombuffer(hashes, dtype="<u8").tolist() if word in order}
        while evicted:
            evicted.discard(self._evict_oldest(slot))

    def flush(self, slot: int | None = None) -> None:
        """Remove the marks of one replica or of all."""
        for each in list(self._orders) if slot is None else (slot,):
            while self._orders.get(each):
                self._evict_oldest(each)
            self._orders.pop(each, None)
            self._blocks.pop(each, None)
            self._all_slots &= ~(1 << each)

    def marks_of(self, slot: int) -> int:
        """Return the marks of a replica."""
        return len(self._orders.get(slot, ()))

    def check(self) -> None:
        """Assert every invariant; visits all marks."""
        assert self._marks == sum(map(len, self._orders.values())) <= self._max_marks
        assert sum(residents.bit_count() for residents in self._residents.values()) == self._marks
        for slot, order in self._orders.items():
            assert self._blocks.get(slot, 0) == sum(order.values())
            assert all(self._residents[word] & 1 << slot for word in order)

    def _evict_oldest(self, slot: int) -> int:
        word, blocks = self._orders[slot].popitem(last=False)
        self._blocks[slot] -= blocks
        self._marks -= 1
        residents = self._residents[word] & ~(1 << slot)
        if residents:
            self._residents[word] = residents
        else:
            del self._residents[word]
        return int(word)


def marks_of_prompt(blocks: bytes, depths: Sequence[int]) -> bytes:
    """Return the hash at each depth of a prompt, which has them all."""
    return b"".join([blocks[(depth - 1) * BLOCK_HASH_BYTES : depth * BLOCK_HASH_BYTES] for depth in depths])
