"""Prefixes that routers of the group had confirmed on replicas: marks at some depths, in the order of their last use.

Owns the marks of one replica by origin (`ReplicaMarks`), and those of all replicas with their bounds (`GroupPrefixes`).
The prefix index has what went through this Router, with all blocks.

Theory of operation. A mark is the hash of a whole prefix, so a prompt that has it at some depth shares all before it.
It stands for the blocks since the mark before it, so the marks of a replica add up to the blocks of all routers there,
each counted once. An engine evicts the least recently used blocks first, whoever used them. So marks beyond a replica's
KV capacity are evicted, oldest first, and what this Router's index has not used since is evicted with them: each Router
alone would count on a whole cache of its own. A full table is no engine's: there those of other routers go first.

A mark's use has the tick of the index at that time. If a first token had confirmed it, here or at a peer, what the
engine reports of it counts like a report on an own prefix (`InFlightTable`'s `Attempt.longest_confirmed`). A peer's
prompt that waits for its first token is expected there, as an own one is, and proves nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.peers.records import PrefixMarks
from gorgo.core.prefix.index import Origin, slots_of
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES, NO_PREFIX, ConfirmedPrefix

# The marks of one replica, by origin, each origin in the order of use.


#: Blocks since the mark before it, tick and time of the last use; infinite if no first token has confirmed it.
Mark = tuple[int, int, float]
#: Origins of marks, the first one evicted first.
ORIGINS = (Origin.REMOTE, Origin.LOCAL)


class ReplicaMarks:
    """Marks by hash. One that this router confirmed is local, whoever uses it afterwards."""

    __slots__ = ("blocks", "local", "remote")

    def __init__(self) -> None:
        self.remote: OrderedDict[int, Mark] = OrderedDict()
        self.local: OrderedDict[int, Mark] = OrderedDict()
        #: Sum over all marks.
        self.blocks = 0

    def __len__(self) -> int:
        return len(self.remote) + len(self.local)

    def __bool__(self) -> bool:
        return bool(self.remote or self.local)

    def __iter__(self) -> Iterator[int]:
        yield from self.remote
        yield from self.local

    def of(self, origin: Origin) -> OrderedDict[int, Mark]:
        """Return the marks of an origin, the one used last at the end."""
        return self.local if origin is Origin.LOCAL else self.remote

    def get(self, word: int) -> Mark | None:
        """Return a mark."""
        return self.local.get(word) or self.remote.get(word)

    def use(self, spans: Sequence[tuple[int, int]], origin: Origin, *, tick: int, now: float) -> list[int]:
        """Add the marks of a prompt, the last one used last; return those that are new."""
        own, other = (self.local, self.remote) if origin is Origin.LOCAL else (self.remote, self.local)
        new = []
        for word, blocks in spans:
            target, known = own, own.pop(word, None)
            if known is None:
                known = other.pop(word, None)
                if known is None:
                    new.append(word)
                elif other is self.local:
                    target = other
            # One that is only sent proves nothing, and takes no proof away.
            target[word] = blocks, tick, now if known is None or now < inf else known[2]
            self.blocks += blocks if known is None else blocks - known[0]
        return new

    def oldest(self) -> tuple[Origin, int] | None:
        """Return the origin and tick of the mark that was used before all others."""
        found = None
        for origin in ORIGINS:
            for _, tick, _ in self.of(origin).values():
                if found is None or tick < found[1]:
                    found = origin, tick
                break
        return found

    def evict(self, origin: Origin) -> int:
        """Remove and return the oldest mark of an origin."""
        word, (blocks, _, _) = self.of(origin).popitem(last=False)
        self.blocks -= blocks
        return word

    def withdraw(self, word: int) -> bool:
        """Remove a mark of other routers that no first token confirmed; return whether there was one."""
        known = self.remote.get(word)
        if known is None or known[2] < inf:
            return False
        del self.remote[word]
        self.blocks -= known[0]
        return True

    def check(self) -> None:
        """Assert the sum, one origin per mark, and the order of use."""
        assert self.blocks == sum(blocks for order in (self.remote, self.local) for blocks, _, _ in order.values())
        assert not self.remote.keys() & self.local.keys()
        for order in (self.remote, self.local):
            ticks = [tick for _, tick, _ in order.values()]
            assert ticks == sorted(ticks), "marks are in order of use"


#: Why marks are evicted: the replica's KV capacity, the bound of all marks, or an engine that no longer had one.
Cause = Literal["capacity", "table", "report"]

#: Marks in all: some 250 bytes each.
MAX_MARKS = 400_000


class GroupPrefixes:
    """Marks of all replicas.

    Example
    -------
    >>> marks = GroupPrefixes()
    >>> prompt = PrefixMarks("a", None, (1, 2), b"block--1block--2")
    >>> marks.use(1, prompt, Origin.REMOTE, tick=2, now=0.0, capacity_blocks=None)
    0
    >>> request = RouteRequest("r", 0.0, 200, blocks=b"block--1block--2block--3", block_tokens=64.0, prefix_hash=0)
    >>> marks.raise_matches(np.array([0.0, 0.0]), request).tolist()
    [0.0, 128.0]
    """

    def __init__(self, max_marks: int = MAX_MARKS) -> None:
        self._max_marks = max_marks
        #: Marks in all, by origin.
        self.marks: Counter[Origin] = Counter()
        #: Marks evicted so far; not those of replicas that left or were flushed.
        self.evicted: Counter[tuple[Origin, Cause]] = Counter()
        #: Replicas of each mark, one bit per slot.
        self._residents: dict[int, int] = {}
        self._replicas: dict[int, ReplicaMarks] = {}
        self._all_slots = 0

    def __len__(self) -> int:
        return self.marks.total()

    def raise_matches(self, matched: Floats, request: RouteRequest) -> Floats:
        """Return `matched` tokens per slot, or more where a mark of the prompt is deeper."""
        if not self._residents:
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
        replica = self._replicas.get(slot)
        if replica:
            words = np.frombuffer(blocks, dtype="<u8").tolist()
            for depth in range(len(words), 0, -1):
                known = replica.get(words[depth - 1])
                if known is not None and known[2] < before_s:
                    return ConfirmedPrefix(depth, known[1])
        return NO_PREFIX

    def use(
        self, slot: int, marks: PrefixMarks, origin: Origin, *, tick: int, now: float, capacity_blocks: int | None
    ) -> int:
        """Add the marks of a prompt to `slot`, used last, and evict what exceeds the bounds.

        Return the tick before which nothing that was used on the replica is left; 0 if nothing was evicted for its
        capacity.
        """
        replica = self._replicas.setdefault(slot, ReplicaMarks())
        bit, residents, local = 1 << slot, self._residents, len(replica.local)
        new = replica.use(marks.spans, origin, tick=tick, now=now)
        for word in new:
            residents[word] = residents.get(word, 0) | bit
        more_local = len(replica.local) - local
        self.marks[Origin.LOCAL] += more_local
        self.marks[Origin.REMOTE] += len(new) - more_local
        self._all_slots |= bit
        oldest = 0
        while capacity_blocks is not None and replica.blocks > capacity_blocks:
            first = replica.oldest()
            assert first is not None, "a sum of no blocks exceeds no capacity"
            self._evict(slot, first[0], "capacity")
            left = replica.oldest()
            oldest = tick + 2 if left is None else left[1]
        while new and len(self) > self._max_marks:
            self._evict_for_table(slot)
        return oldest

    def evict_older(self, slot: int, *, before: int) -> list[int]:
        """Remove and return the marks of `slot` last used before tick `before`, oldest first."""
        replica, evicted = self._replicas.get(slot), list[int]()
        while replica and (first := replica.oldest()) and first[1] < before:
            evicted.append(self._evict(slot, first[0], "report"))
        return evicted

    def withdraw(self, slot: int, words: Sequence[int]) -> None:
        """Remove those marks of `slot` that no first token has confirmed."""
        replica = self._replicas.get(slot)
        for word in words:
            if replica is not None and replica.withdraw(word):
                self.marks[Origin.REMOTE] -= 1
                self._leave(word, slot)

    def median_tick(self, slot: int, words: Sequence[int]) -> int:
        """Return the median tick of the marks of `slot` that it has of these; 0 without one.

        A peer names marks of about one age that are evicted. Some may have been used again since.
        """
        replica = self._replicas.get(slot)
        ticks = sorted(known[1] for word in words if replica and (known := replica.get(word)))
        return ticks[len(ticks) // 2] if ticks else 0

    def flush(self, slot: int | None = None) -> None:
        """Remove the marks of one replica or of all."""
        for each in list(self._replicas) if slot is None else (slot,):
            replica = self._replicas.pop(each, ReplicaMarks())
            for origin in ORIGINS:
                self.marks[origin] -= len(replica.of(origin))
            for word in replica:
                self._leave(word, each)
            self._all_slots &= ~(1 << each)

    def blocks_of(self, slot: int) -> int:
        """Return the blocks that the marks of a replica stand for."""
        replica = self._replicas.get(slot)
        return 0 if replica is None else replica.blocks

    def marks_of(self, slot: int, origin: Origin) -> int:
        """Return the number of marks of a replica."""
        return len(self._replicas[slot].of(origin))

    def check(self) -> None:
        """Assert every invariant; visits all marks."""
        assert len(self) == sum(map(len, self._replicas.values())) <= self._max_marks
        assert sum(residents.bit_count() for residents in self._residents.values()) == len(self)
        for origin in ORIGINS:
            assert self.marks[origin] == sum(self.marks_of(slot, origin) for slot in self._replicas)
        for slot, replica in self._replicas.items():
            replica.check()
            assert all(self._residents[word] & 1 << slot for word in replica)

    def _evict_for_table(self, slot: int) -> None:
        """Evict a mark of another router if there is one: of `slot`, unless it has less than its share."""
        origin = Origin.REMOTE if self.marks[Origin.REMOTE] else Origin.LOCAL
        if self.marks_of(slot, origin) * len(self._replicas) < self.marks[origin]:
            slot = max(self._replicas, key=lambda each: self.marks_of(each, origin))
        self._evict(slot, origin, "table")

    def _evict(self, slot: int, origin: Origin, cause: Cause) -> int:
        word = self._replicas[slot].evict(origin)
        self.marks[origin] -= 1
        self.evicted[origin, cause] += 1
        self._leave(word, slot)
        return word

    def _leave(self, word: int, slot: int) -> None:
        residents = self._residents[word] & ~(1 << slot)
        if residents:
            self._residents[word] = residents
        else:
            del self._residents[word]


def marks_of_prompt(blocks: bytes, depths: Sequence[int]) -> bytes:
    """Return the hash at each depth of a prompt, which has them all."""
    return b"".join([blocks[(depth - 1) * BLOCK_HASH_BYTES : depth * BLOCK_HASH_BYTES] for depth in depths])
