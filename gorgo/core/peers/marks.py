"""Prefixes that routers of the group had confirmed on replicas: marks at some depths, in the order of their last use.

Owns the marks of a prompt (`MarkedPrompt`), those of one replica by origin (`ReplicaMarks`), and those of all replicas
with their bounds (`GroupPrefixes`). The prefix index has what went through this Router, with all blocks.

Theory of operation. A mark is the hash of a whole prefix, so a prompt that has it at some depth shares all before it.
It stands for the blocks since the mark before it, its parent, so the marks of a replica add up to the blocks of all
routers there, each counted once. So a prompt that comes again is its deepest known mark, found from its end: a use
steps through its parents, and adds what is new behind it. An engine evicts the least recently used blocks first,
whoever used them, and the deepest of a prompt before those that lead to it. So marks beyond a replica's KV capacity are
evicted, oldest leaf first, and what this Router's index has not used since is evicted with them: each Router alone
would count on a whole cache of its own. A full table is no engine's: there those of other routers go first.

A mark's use has the tick of the index at that time. If a first token had confirmed it, here or at a peer, what the
engine reports of it counts like a report on an own prefix (`InFlightTable`'s `Attempt.longest_confirmed`). A peer's
prompt that waits for its first token is expected there, as an own one is, and proves nothing.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from math import inf
from typing import Literal, TypeVar

from gorgo.core.lru import Lru
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.peers.records import MAX_MARKS as MAX_MARKS_OF_A_PROMPT
from gorgo.core.peers.records import MarkKind, PrefixMarks
from gorgo.core.prefix.index import Origin, slots_of
from gorgo.core.prefix.residency import BLOCK_HASH_BYTES, NO_PREFIX, ConfirmedPrefix
from gorgo.core.prompt.fingerprint import marked_depths
from gorgo.core.record import record

# The marks of a prompt: which depths are marked, and which of them a report names.


#: Prompts of fewer tokens, with their answers, are reported to no peer: what it would save by them is prefilled in the
#: time between two reports of workers.
LEAST_TOKENS = 256
#: Marks near a prompt's beginning where it has more than a report may name; the others are its deepest.
_SHALLOW_MARKS = MAX_MARKS_OF_A_PROMPT // 3
_Found = TypeVar("_Found")


@record
class MarkedPrompt:
    """A prompt's marks: depths in blocks, ascending, and the hash at each; `every` has those of all depths.

    The rest is as in its request.
    """

    every: Sequence[int]
    block_tokens: float
    boundaries: Sequence[int]
    depths: list[int]
    words: list[int]

    @classmethod
    def of(cls, request: RouteRequest) -> MarkedPrompt:
        """Return the marks of a prompt; none without a full block."""
        blocks = request.blocks
        depths = marked_depths(len(blocks) // BLOCK_HASH_BYTES, request.block_tokens, request.boundaries)
        every = memoryview(blocks).cast("Q")
        words = [every[depth - 1] for depth in depths]
        return cls(every, request.block_tokens, request.boundaries, depths, words)

    def reported(self) -> MarkedPrompt:
        """Return what a report names: of too many marks the shallowest and the deepest."""
        if len(self.depths) <= MAX_MARKS_OF_A_PROMPT:
            return self
        deep = _SHALLOW_MARKS - MAX_MARKS_OF_A_PROMPT
        depths = self.depths[:_SHALLOW_MARKS] + self.depths[deep:]
        words = self.words[:_SHALLOW_MARKS] + self.words[deep:]
        return MarkedPrompt(self.every, self.block_tokens, self.boundaries, depths, words)

    def as_record(self, replica: str, model: str | None, kind: MarkKind) -> PrefixMarks:
        """Return the record of these marks for a report."""
        depths = () if kind == "withdrawn" else tuple(self.depths)
        return PrefixMarks(replica, model, depths, struct.pack(f"<{len(self.words)}Q", *self.words), kind)

    def deepest(self, known: Mapping[int, _Found]) -> tuple[int, _Found | None]:
        """Return the deepest mark of any prompt that is `known`: its depth, 0 without one, and what is known of it.

        The last block of another prompt is a mark too, at any depth.
        """
        depth = len(self.every)
        for word in reversed(self.every):
            if word in known:
                return depth, known[word]
            depth -= 1
        return 0, None


# The marks of one replica, by origin, each origin in the order of use.


#: Origins of marks, the first one evicted first.
ORIGINS = (Origin.REMOTE, Origin.LOCAL)


class Mark:
    """One mark of one replica.

    `tick` and `used_s` are those of the last use; the time is infinite if no first token has confirmed it. All parents
    of a `local` mark are local.
    """

    __slots__ = ("children", "depth", "local", "parent", "tick", "used_s", "word")

    def __init__(self, word: int, depth: int, parent: Mark | None, *, local: bool, tick: int, used_s: float) -> None:
        self.word = word
        self.depth = depth
        self.parent = parent
        self.children = 0
        self.local = local
        self.tick = tick
        self.used_s = used_s

    @property
    def blocks(self) -> int:
        """Return the blocks since the mark before it."""
        return self.depth - (0 if self.parent is None else self.parent.depth)


class ReplicaMarks:
    """Marks by hash. One that this router confirmed is local, whoever uses it afterwards.

    Every leaf is in the order of its origin; a mark with children is there where a prompt ended, and is dropped at the
    front.
    """

    __slots__ = ("blocks", "local", "locals", "nodes", "remote")

    def __init__(self) -> None:
        self.nodes: dict[int, Mark] = {}
        self.remote: OrderedDict[Mark, int] = OrderedDict()
        self.local: OrderedDict[Mark, int] = OrderedDict()
        #: Local marks, and the sum of blocks over all marks.
        self.locals = 0
        self.blocks = 0

    def __len__(self) -> int:
        return len(self.nodes)

    def of_origin(self, origin: Origin) -> int:
        """Return the number of marks of an origin."""
        return self.locals if origin is Origin.LOCAL else len(self.nodes) - self.locals

    def use(
        self, depths: Sequence[int], words: Sequence[int], origin: Origin, *, tick: int, now: float
    ) -> Sequence[int]:
        """Add the marks of a prompt, the last one used last; return those that are new."""
        nodes, local, known, count = self.nodes, origin is Origin.LOCAL, None, len(words)
        while count and (known := nodes.get(words[count - 1])) is None:
            count -= 1
        # A long prompt steps through a hundred parents: no step asks what is the same for all of them.
        mark = known
        if now < inf:
            while mark is not None:
                mark.tick = tick
                mark.used_s = now
                mark = mark.parent
        else:  # One that is only sent proves nothing, and takes no proof away.
            while mark is not None:
                mark.tick = tick
                mark = mark.parent
        mark = known
        while local and mark is not None and not mark.local:
            mark.local = True
            self.locals += 1
            self.remote.pop(mark, None)
            mark = mark.parent
        last, new = known, words[count:]
        for word, depth in zip(new, depths[count:], strict=True):
            nodes[word] = mark = Mark(word, depth, last, local=local, tick=tick, used_s=now)
            if last is not None:
                last.children += 1
            self.blocks += mark.blocks
            last = mark
        if local:
            self.locals += len(new)
        if last is not None:
            order = self.local if last.local else self.remote
            order[last] = tick
            order.move_to_end(last)
        return new

    def oldest(self) -> tuple[Origin, int] | None:
        """Return the origin and tick of the leaf that was used before all others."""
        found = None
        for origin in ORIGINS:
            tick = self._oldest_of(origin)
            if tick is not None and (found is None or tick < found[1]):
                found = origin, tick
        return found

    def evict(self, origin: Origin) -> int:
        """Remove and return the oldest leaf of an origin."""
        tick = self._oldest_of(origin)
        assert tick is not None, "where there are marks, one is a leaf"
        mark, _ = self._order(origin).popitem(last=False)
        self._remove(mark, tick)
        return mark.word

    def withdraw(self, word: int) -> bool:
        """Remove a leaf of other routers that no first token confirmed; return whether there was one."""
        mark = self.nodes.get(word)
        if mark is None or mark.children or mark.used_s < inf:
            return False
        self.remote.pop(mark, None)
        self._remove(mark, mark.tick)
        return True

    def check(self) -> None:
        """Assert the sums, the parents, and the order of use."""
        children = Counter(mark.parent for mark in self.nodes.values())
        assert self.blocks == sum(mark.blocks for mark in self.nodes.values())
        assert self.locals == sum(mark.local for mark in self.nodes.values())
        for word, mark in self.nodes.items():
            assert mark.word == word
            assert mark.children == children[mark]
            assert mark.parent is None or self.nodes[mark.parent.word] is mark.parent, "a mark has all before it"
            assert not mark.local or mark.parent is None or mark.parent.local
            assert mark.children or mark in (self.local if mark.local else self.remote), "every leaf can be evicted"
        for order, local in ((self.remote, False), (self.local, True)):
            assert all(self.nodes[mark.word] is mark and mark.local is local for mark in order)
            assert list(order.values()) == sorted(order.values()), "marks are in order of use"

    def _order(self, origin: Origin) -> OrderedDict[Mark, int]:
        return self.local if origin is Origin.LOCAL else self.remote

    def _oldest_of(self, origin: Origin) -> int | None:
        """Return the tick of the oldest leaf of an origin, and bring it to the front."""
        order = self._order(origin)
        while order:
            mark = next(iter(order))
            if not mark.children:
                return order[mark]
            del order[mark]
        return None

    def _remove(self, mark: Mark, tick: int) -> None:
        """Remove a leaf that is in no order. Its parent was used with it, at `tick`, if it is a leaf now."""
        del self.nodes[mark.word]
        self.blocks -= mark.blocks
        self.locals -= mark.local
        parent = mark.parent
        if parent is None:
            return
        parent.children -= 1
        order = self.local if parent.local else self.remote
        if parent.children or order.get(parent, -1) >= tick:
            return
        order.pop(parent, None)
        first = next(iter(order.values()), tick)
        if tick <= first:
            order[parent] = tick
            order.move_to_end(parent, last=False)
        else:  # it was no leaf of its order's age: it counts as used last
            order[parent] = max(tick, order[next(reversed(order))])


#: Why marks are evicted: the replica's KV capacity, the bound of all marks, or an engine that no longer had one.
Cause = Literal["capacity", "table", "report"]

#: Marks in all: some 400 bytes each.
MAX_MARKS = 400_000
#: Prompts whose marks are remembered from their decision to their first token.
_MAX_PROMPTS = 256


class GroupPrefixes:
    """Marks of all replicas.

    Example
    -------
    >>> import numpy as np
    >>> marks = GroupPrefixes()
    >>> peers = PrefixMarks("a", None, (1, 2), b"block--1block--2")
    >>> marks.use(1, peers.blocks, peers.words, Origin.REMOTE, tick=2, now=0.0, capacity_blocks=None)
    0
    >>> request = RouteRequest("r", 0.0, 800, blocks=b"block--1block--2block--3", block_tokens=256.0, prefix_hash=0)
    >>> marks.raise_matches(np.array([0.0, 0.0]), request).tolist()
    [0.0, 512.0]
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
        self._prompts = Lru[bytes, MarkedPrompt](_MAX_PROMPTS)

    def __len__(self) -> int:
        return self.marks.total()

    def prompt_of(self, request: RouteRequest) -> MarkedPrompt:
        """Return the marks of a prompt."""
        known = self._prompts.get(request.blocks)
        if known is None or known.block_tokens != request.block_tokens or known.boundaries != request.boundaries:
            known = MarkedPrompt.of(request)
            self._prompts.put(request.blocks, known)
        return known

    def raise_matches(self, matched: Floats, request: RouteRequest) -> Floats:
        """Return `matched` tokens per slot, or more where a mark of the prompt is deeper."""
        residents, left, raised = self._residents, self._all_slots & ((1 << len(matched)) - 1), matched
        if not residents or not left or request.prompt_tokens < LEAST_TOKENS:
            return matched
        prompt = self.prompt_of(request)
        depth, found = prompt.deepest(residents)
        count = bisect_left(prompt.depths, depth)
        while found is not None or count:
            found = (found or 0) & left
            if found:
                tokens = depth * request.block_tokens
                for slot in slots_of(found):
                    if raised.item(slot) < tokens:
                        if raised is matched:
                            raised = matched.copy()
                        raised[slot] = tokens
                left &= ~found
                if not left:
                    break
            if not count:
                break
            count -= 1
            depth, found = prompt.depths[count], residents.get(prompt.words[count])
        return raised

    def last_used(self, slot: int, prompt: MarkedPrompt, *, before_s: float) -> ConfirmedPrefix:
        """Return the deepest mark of a prompt on `slot` that was last used before a time."""
        replica = self._replicas.get(slot)
        mark = None if replica is None else prompt.deepest(replica.nodes)[1]
        while mark is not None and mark.used_s >= before_s:
            mark = mark.parent
        return NO_PREFIX if mark is None else ConfirmedPrefix(mark.depth, mark.tick)

    def use(
        self,
        slot: int,
        depths: Sequence[int],
        words: Sequence[int],
        origin: Origin,
        *,
        tick: int,
        now: float,
        capacity_blocks: int | None,
    ) -> int:
        """Add the marks of a prompt to `slot`, used last, and evict what exceeds the bounds.

        Return the tick before which nothing that was used on the replica is left; 0 if nothing was evicted for its
        capacity.
        """
        replica = self._replicas.setdefault(slot, ReplicaMarks())
        bit, residents, local = 1 << slot, self._residents, replica.locals
        new = replica.use(depths, words, origin, tick=tick, now=now)
        for word in new:
            residents[word] = residents.get(word, 0) | bit
        more_local = replica.locals - local
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
        for word in reversed(words):
            if replica is not None and replica.withdraw(word):
                self.marks[Origin.REMOTE] -= 1
                self._leave(word, slot)

    def median_tick(self, slot: int, words: Sequence[int]) -> int:
        """Return the median tick of the marks of `slot` that it has of these; 0 without one.

        A peer names marks of about one age that are evicted. Some may have been used again since.
        """
        replica = self._replicas.get(slot)
        ticks = sorted(mark.tick for word in words if replica and (mark := replica.nodes.get(word)))
        return ticks[len(ticks) // 2] if ticks else 0

    def flush(self, slot: int | None = None) -> None:
        """Remove the marks of one replica or of all."""
        for each in list(self._replicas) if slot is None else (slot,):
            replica = self._replicas.pop(each, ReplicaMarks())
            for origin in ORIGINS:
                self.marks[origin] -= replica.of_origin(origin)
            for word in replica.nodes:
                self._leave(word, each)
            self._all_slots &= ~(1 << each)

    def blocks_of(self, slot: int) -> int:
        """Return the blocks that the marks of a replica stand for."""
        replica = self._replicas.get(slot)
        return 0 if replica is None else replica.blocks

    def marks_of(self, slot: int, origin: Origin) -> int:
        """Return the number of marks of a replica."""
        return self._replicas[slot].of_origin(origin)

    def check(self) -> None:
        """Assert every invariant; visits all marks."""
        assert len(self) == sum(map(len, self._replicas.values())) <= self._max_marks
        assert sum(residents.bit_count() for residents in self._residents.values()) == len(self)
        for origin in ORIGINS:
            assert self.marks[origin] == sum(self.marks_of(slot, origin) for slot in self._replicas)
        for slot, replica in self._replicas.items():
            replica.check()
            assert all(self._residents[word] & 1 << slot for word in replica.nodes)

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
