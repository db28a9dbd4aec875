"""Prefixes that routers of the group had confirmed on replicas: marks at some depths, in the order of their last use.

Owns where a prompt has marks (`MarkedPrompt`), the marks of one replica by origin (`ReplicaMarks`), and those of all
replicas with their bounds (`GroupPrefixes`). The prefix index has what went through this Router, with all blocks.

Theory of operation. A mark is the hash of a whole prefix, so a prompt that has it at some depth shares all before it.
It stands for the blocks since the mark before it, so the marks of a replica add up to the blocks of all routers there,
each counted once. Marks that were always used together are one run, so a use of a prompt steps through the places where
others part from it, and not through its marks. A prompt that comes again is its deepest known mark, found from its end;
a report names that one and the new ones behind it, since all routers have heard of those before it. One that has not,
as a router that has just joined, knows the named ones alone.

An engine evicts the least recently used blocks first, whoever used them, and the deepest of a prompt before those that
lead to it. So marks beyond a replica's KV capacity are evicted, oldest leaf first, and what this Router's index has not
used since is evicted with them: each Router alone would count on a whole cache of its own. A full table is no engine's:
there those of other routers go first.

A mark's use has the tick of the index at that time. If a first token had confirmed it, here or at a peer, what the
engine reports of it counts like a report on an own prefix (`InFlightTable`'s `Attempt.longest_confirmed`). A peer's
prompt that waits for its first token is expected there, as an own one is, and proves nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Literal, TypeVar

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.peers.records import MAX_MARKS as MAX_MARKS_OF_A_PROMPT
from gorgo.core.prefix.index import Origin, slots_of
from gorgo.core.prefix.residency import NO_PREFIX, ConfirmedPrefix
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
    """Where a prompt may have marks: `every` has the hashes of all depths. The rest is as in its request."""

    every: Sequence[int]
    block_tokens: float
    boundaries: Sequence[int]

    @classmethod
    def of(cls, request: RouteRequest) -> MarkedPrompt:
        """Return the marks of a prompt; none without a full block."""
        return cls(memoryview(request.blocks).cast("Q"), request.block_tokens, request.boundaries)

    def deepest(self, by_word: Mapping[int, _Found]) -> tuple[int, _Found | None]:
        """Return the deepest mark of any prompt in `by_word`: its depth, 0 without one, and what is known of it.

        The last block of another prompt is a mark too, at any depth.
        """
        depth = len(self.every)
        for word in reversed(self.every):
            if word in by_word:
                return depth, by_word[word]
            depth -= 1
        return 0, None

    def marks_from(self, depth: int) -> tuple[list[int], list[int]]:
        """Return depths and hashes of the known mark at `depth`, 0 without one, and of those behind it."""
        depths = [depth, *self.depths_behind(depth)] if depth else self.depths_behind(0)
        return depths, self.words_at(depths)

    def depths_behind(self, depth: int) -> list[int]:
        """Return the depths of the marks behind `depth`, ascending: of too many the shallowest and the deepest."""
        if depth == len(self.every):
            return []
        depths = marked_depths(len(self.every), self.block_tokens, self.boundaries, behind=depth)
        most = MAX_MARKS_OF_A_PROMPT - 1  # beside the one at `depth`
        return depths if len(depths) <= most else depths[:_SHALLOW_MARKS] + depths[_SHALLOW_MARKS - most :]

    def words_at(self, depths: Iterable[int]) -> list[int]:
        """Return the hashes at some depths."""
        every = self.every
        return [every[depth - 1] for depth in depths]


# The marks of one replica, by origin, each origin in the order of use.


#: Origins of marks, the first one evicted first.
ORIGINS = (Origin.REMOTE, Origin.LOCAL)


class MarkRun:
    """Marks of one replica that were always used together: each begins with the one before it, the first with `parent`.

    `tick` and `used_s` are those of the last use; the time is infinite if no first token has confirmed it. All parents
    of a `local` run are local.
    """

    __slots__ = ("children", "depths", "local", "parent", "tick", "used_s", "words")

    def __init__(
        self, depths: list[int], words: list[int], parent: MarkRun | None, *, local: bool, tick: int, used_s: float
    ) -> None:
        #: Of each mark the depth in blocks, ascending, and the hash.
        self.depths = depths
        self.words = words
        self.parent = parent
        self.children = 0
        self.local = local
        self.tick = tick
        self.used_s = used_s

    @property
    def start(self) -> int:
        """Return the depth of the mark before the first one."""
        return 0 if self.parent is None else self.parent.depths[-1]


class ReplicaMarks:
    """Marks by hash. One that this router confirmed is local, whoever uses it afterwards.

    Every leaf is in the order of its origin; a run with children is there where a prompt ended, and is dropped at the
    front.
    """

    __slots__ = ("blocks", "local", "locals", "remote", "runs")

    def __init__(self) -> None:
        #: By the hash of each of its marks.
        self.runs: dict[int, MarkRun] = {}
        self.remote: OrderedDict[MarkRun, int] = OrderedDict()
        self.local: OrderedDict[MarkRun, int] = OrderedDict()
        #: Local marks, and the sum of blocks over all marks.
        self.locals = 0
        self.blocks = 0

    def __len__(self) -> int:
        return len(self.runs)

    def of_origin(self, origin: Origin) -> int:
        """Return the number of marks of an origin."""
        return self.locals if origin is Origin.LOCAL else len(self.runs) - self.locals

    def use(
        self, depths: Sequence[int], words: Sequence[int], origin: Origin, *, tick: int, now: float
    ) -> Sequence[int]:
        """Add the marks of a prompt, the last one used last; return those that are new."""
        runs, local, run, count = self.runs, origin is Origin.LOCAL, None, len(words)
        while count and (run := runs.get(words[count - 1])) is None:
            count -= 1
        if run is not None and run.words[-1] != words[count - 1]:
            run = self._split(run, words[count - 1])
        self._touch(run, tick, now, local=local)
        last, new = run, words[count:]
        if new:
            last = self._append(run, list(depths[count:]), list(new), local=local, tick=tick, now=now)
        if last is not None:
            order = self.local if last.local else self.remote
            order[last] = tick
            order.move_to_end(last)
        return new

    def oldest(self) -> tuple[Origin, int] | None:
        """Return the origin and tick of the leaf that was used before all others."""
        leaf = None
        for origin in ORIGINS:
            tick = self._oldest_of(origin)
            if tick is not None and (leaf is None or tick < leaf[1]):
                leaf = origin, tick
        return leaf

    def evict(self, origin: Origin) -> int:
        """Remove and return the oldest leaf of an origin."""
        tick = self._oldest_of(origin)
        assert tick is not None, "where there are marks, one is a leaf"
        run = next(iter(self._order(origin)))
        word = run.words[-1]
        self._remove_last(run, tick)
        return word

    def withdraw(self, word: int) -> bool:
        """Remove a leaf of other routers that no first token confirmed; return whether there was one."""
        run = self.runs.get(word)
        if run is None or run.local or run.children or run.used_s < inf or run.words[-1] != word:
            return False
        self._remove_last(run, run.tick)
        return True

    def check(self) -> None:
        """Assert the sums, the parents, and the order of use."""
        runs = set(self.runs.values())
        children = Counter(run.parent for run in runs)
        assert self.blocks == sum(run.depths[-1] - run.start for run in runs)
        assert self.locals == sum(len(run.words) for run in runs if run.local)
        assert len(self.runs) == sum(len(run.words) for run in runs)
        for run in runs:
            assert all(self.runs[word] is run for word in run.words)
            assert [run.start, *run.depths] == sorted({run.start, *run.depths}), "depths ascend"
            assert run.children == children[run]
            assert run.parent is None or run.parent in runs, "a mark has all before it"
            assert not run.local or run.parent is None or run.parent.local
            assert run.children or run in self._order_of(run), "every leaf can be evicted"
        for order, local in ((self.remote, False), (self.local, True)):
            assert all(run in runs and run.local is local for run in order)
            assert list(order.values()) == sorted(order.values()), "marks are in order of use"

    def _touch(self, run: MarkRun | None, tick: int, now: float, *, local: bool) -> None:
        """Use a run and all before it."""
        while run is not None:
            run.tick = tick
            if now < inf:  # One that is only sent proves nothing, and takes no proof away.
                run.used_s = now
            if local and not run.local:
                run.local = True
                self.locals += len(run.words)
                self.remote.pop(run, None)
            run = run.parent

    def _append(
        self, parent: MarkRun | None, depths: list[int], words: list[int], *, local: bool, tick: int, now: float
    ) -> MarkRun:
        """Add marks behind a run, or without one; return the run that has them."""
        start = 0 if parent is None else parent.depths[-1]
        if parent is None or parent.children or parent.local is not local or parent.used_s != now:
            run = MarkRun(depths, words, parent, local=local, tick=tick, used_s=now)
            if parent is not None:
                parent.children += 1
        else:
            run = parent
            run.depths += depths
            run.words += words
        for word in words:
            self.runs[word] = run
        self.blocks += depths[-1] - start
        if local:
            self.locals += len(words)
        return run

    def _split(self, run: MarkRun, word: int) -> MarkRun:
        """Part a run behind one of its marks; return the new run up to it."""
        count = run.words.index(word) + 1
        upper = MarkRun(
            run.depths[:count], run.words[:count], run.parent, local=run.local, tick=run.tick, used_s=run.used_s
        )
        upper.children, run.parent = 1, upper
        del run.depths[:count], run.words[:count]
        for each in upper.words:
            self.runs[each] = upper
        return upper

    def _order(self, origin: Origin) -> OrderedDict[MarkRun, int]:
        return self.local if origin is Origin.LOCAL else self.remote

    def _order_of(self, run: MarkRun) -> OrderedDict[MarkRun, int]:
        return self.local if run.local else self.remote

    def _oldest_of(self, origin: Origin) -> int | None:
        """Return the tick of the oldest leaf of an origin, and bring it to the front."""
        order = self._order(origin)
        while order:
            run = next(iter(order))
            if not run.children:
                return order[run]
            del order[run]
        return None

    def _remove_last(self, run: MarkRun, tick: int) -> None:
        """Remove the last mark of a run without children. A parent that has none then was used with it, at `tick`."""
        del self.runs[run.words.pop()]
        self.locals -= run.local
        depth = run.depths.pop()
        self.blocks -= depth - (run.depths[-1] if run.depths else run.start)
        if run.depths:
            return
        del self._order_of(run)[run]
        parent = run.parent
        if parent is None:
            return
        parent.children -= 1
        order = self._order_of(parent)
        if parent.children or order.get(parent, -1) >= tick:
            return
        order.pop(parent, None)
        first = next(iter(order.values()), tick)
        if tick <= first:
            order[parent] = tick
            order.move_to_end(parent, last=False)
        else:  # it was no leaf of its order's age: it counts as used last
            order[parent] = max(tick, order[next(reversed(order))])


def used_before(depth: int, run: MarkRun | None, time_s: float) -> ConfirmedPrefix:
    """Return the deepest prefix up to a mark of `run` at `depth` that was last used before a time."""
    while run is not None and run.used_s >= time_s:
        depth, run = run.start, run.parent
    return NO_PREFIX if run is None else ConfirmedPrefix(depth, run.tick)


#: Why marks are evicted: the replica's KV capacity, the bound of all marks, or an engine that no longer had one.
Cause = Literal["capacity", "table", "report"]

#: Marks in all: some 400 bytes each.
MAX_MARKS = 400_000


class GroupPrefixes:
    """Marks of all replicas.

    Example
    -------
    >>> import numpy as np
    >>> marks = GroupPrefixes()
    >>> words = memoryview(b"block--1block--2").cast("Q")
    >>> marks.use(1, (1, 2), words, Origin.REMOTE, tick=2, now=0.0, capacity_blocks=None)
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

    def __len__(self) -> int:
        return self.marks.total()

    def raise_matches(self, matched: Floats, request: RouteRequest) -> Floats:
        """Return `matched` tokens per slot, or more where a mark of the prompt is deeper.

        Of the deepest one those before it are the prompt's too, and another replica has the first ones of them.
        """
        residents, left = self._residents, self._all_slots & ((1 << len(matched)) - 1)
        if not residents or not left or request.prompt_tokens < LEAST_TOKENS:
            return matched
        prompt, raised = MarkedPrompt.of(request), matched
        depth, mask = prompt.deepest(residents)
        depths, words, count = list[int](), list[int](), 0
        while mask:
            for slot in slots_of(mask & left):
                tokens = depth * request.block_tokens
                if raised.item(slot) < tokens:
                    if raised is matched:
                        raised = matched.copy()
                    raised[slot] = tokens
            if not (left := left & ~mask):
                break
            if not words:
                depths, words = self._marks_up_to(prompt.every[depth - 1], mask)
                count = len(words)
            count = bisect_left(words, 1, 0, count, key=lambda word: not residents[word] & left)
            if not count:
                break
            depth, mask = depths[count - 1], residents[words[count - 1]]
        return raised

    def deepest(self, slot: int, prompt: MarkedPrompt) -> tuple[int, MarkRun | None]:
        """Return the depth of the deepest mark of a prompt on `slot`, 0 without one, and its run."""
        replica = self._replicas.get(slot)
        return (0, None) if replica is None else prompt.deepest(replica.runs)

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
        replica = self._replicas.get(slot)
        if replica is None:
            replica = self._replicas[slot] = ReplicaMarks()
        bit, residents, local = 1 << slot, self._residents, replica.locals
        new = replica.use(depths, words, origin, tick=tick, now=now)
        for word in new:
            residents[word] = residents.get(word, 0) | bit
        more_local = replica.locals - local
        if new or more_local:
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
        ticks = sorted(run.tick for word in words if replica and (run := replica.runs.get(word)))
        return ticks[len(ticks) // 2] if ticks else 0

    def flush(self, slot: int | None = None) -> None:
        """Remove the marks of one replica or of all."""
        for each in list(self._replicas) if slot is None else (slot,):
            replica = self._replicas.pop(each, ReplicaMarks())
            for origin in ORIGINS:
                self.marks[origin] -= replica.of_origin(origin)
            for word in replica.runs:
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
            assert all(self._residents[word] & 1 << slot for word in replica.runs)

    def _marks_up_to(self, word: int, residents: int) -> tuple[list[int], list[int]]:
        """Return depths and hashes of a mark and of those before it, as one of its replicas has them."""
        run = self._replicas[residents.bit_length() - 1].runs[word]
        count = run.words.index(word) + 1
        depths, words = run.depths[:count], run.words[:count]
        while (parent := run.parent) is not None:
            run = parent
            depths[:0], words[:0] = run.depths, run.words
        return depths, words

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
