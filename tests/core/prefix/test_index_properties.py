"""The prefix index against a naive twin, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.prefix.index import PrefixIndex, slots_of

# --- The prefix index written the slow and obvious way: every prefix of every prompt is an entry of its own.


Key = tuple[int, ...]


def as_blocks(key: Key) -> bytes:
    """A key of small numbers as 8-byte hashes."""
    return b"".join(number.to_bytes(8, "little") for number in key)


@dataclass
class TwinReplica:
    capacity: int | None
    #: Tick of the last use of each prefix held.
    ticks: dict[Key, int] = field(default_factory=dict)
    confirmed: set[Key] = field(default_factory=set)
    #: Tick at which the replica last showed to hold each prefix.
    shown: dict[Key, int] = field(default_factory=dict)


class PrefixTwin:
    """Same contract as `PrefixIndex`; each answer is found by looking at everything.

    `cuts` are the stored prefixes at which a prompt ended or two prompts parted: between two cuts lies what the index
    keeps as one node and evicts as a whole.
    """

    def __init__(self, *, max_blocks: int, bounded: bool) -> None:
        self.max_blocks = max_blocks
        self.bounded = bounded
        self.replicas: dict[int, TwinReplica] = {}
        self.cuts: set[Key] = set()
        self.tick = 0

    @property
    def stored(self) -> set[Key]:
        return {prefix for replica in self.replicas.values() for prefix in replica.ticks}

    @property
    def pairs(self) -> int:
        return sum(len(self.cuts & replica.ticks.keys()) for replica in self.replicas.values())

    def room(self, replica: TwinReplica) -> int:
        bounded = self.bounded and replica.capacity is not None
        return min(replica.capacity or 0, self.max_blocks) if bounded else self.max_blocks

    def match(self, key: Key, slot: int) -> int:
        return max((k for k in range(1, len(key) + 1) if key[:k] in self.replicas[slot].ticks), default=0)

    def worth_behind(self, key: Key, depth: int) -> float:
        """What copies of the matched blocks of `key` behind `depth` are worth to other prompts, block by block."""
        stored = self.stored
        matched = max((k for k in range(1, len(key) + 1) if key[:k] in stored), default=0)
        others = [len({p[k] for p in stored if len(p) > k and p[:k] == key[:k]}) for k in range(matched + 1)]
        others = [count - (k < matched) for k, count in enumerate(others)]
        worth = 0.0
        for k in range(depth + 1, matched + 1):
            most = max(others[k:])
            copies = sum(key[:k] in replica.ticks for replica in self.replicas.values())
            worth += most / (most + copies + 1)
        return worth

    def insert(self, key: Key, slot: int, *, shown: bool = False) -> Key:
        replica = self.replicas[slot]
        key = key[: self.room(replica) if replica.capacity is None else min(replica.capacity, self.max_blocks)]
        if not key:
            return key
        stored = self.stored
        self.cuts |= {key[: max((k for k in range(1, len(key) + 1) if key[:k] in stored), default=0)], key} - {()}
        self.touch(key, replica, shown=shown)
        self.fit()
        return key

    def touch(self, key: Key, replica: TwinReplica, *, shown: bool = False) -> None:
        """Even ticks are believed, odd ones shown."""
        self.tick += 2
        for k in range(1, len(key) + 1):
            replica.ticks[key[:k]] = self.tick + shown
            if shown:
                replica.shown[key[:k]] = self.tick + 1

    def confirm(self, key: Key, slot: int) -> None:
        key = self.insert(key, slot, shown=True)
        self.replicas[slot].confirmed |= {key[:k] for k in range(1, len(key) + 1)}

    def withdraw(self, key: Key, slot: int) -> None:
        replica = self.replicas[slot]
        for k in range(1, len(key) + 1):
            if key[:k] not in replica.ticks:
                return
            if key[:k] not in replica.confirmed:
                self.forget([held for held in replica.ticks if held[:k] == key[:k]], replica)
                if k > 1:
                    self.touch(key[: k - 1], replica)
                return

    def believed(self, key: Key, slot: int) -> Key:
        """The part of `key` that the replica has shown to hold."""
        replica = self.replicas[slot]
        key = key[: self.room(replica)]
        return next((key[:k] for k in range(len(key), 0, -1) if key[:k] in replica.confirmed), ())

    def correct(self, slot: int, before: int) -> None:
        replica = self.replicas[slot]
        while replica.ticks:
            tick, prefix, _ = oldest = min(self.leaves(replica))
            if tick >= before or prefix not in replica.confirmed:
                return
            self.evict(oldest)

    def flush(self, slot: int) -> None:
        self.forget(list(self.replicas[slot].ticks), self.replicas[slot])

    def remove(self, slot: int) -> None:
        self.flush(slot)
        del self.replicas[slot]

    def forget(self, prefixes: list[Key], replica: TwinReplica) -> None:
        for prefix in prefixes:
            del replica.ticks[prefix]
            replica.confirmed.discard(prefix)
            replica.shown.pop(prefix, None)
        self.cuts &= self.stored

    def fit(self) -> None:
        for replica in self.replicas.values():
            while len(replica.ticks) > self.room(replica):
                self.evict(min(self.leaves(replica)))
        while len(self.stored) > self.max_blocks or self.pairs > self.max_blocks:
            self.evict(min(leaf for replica in self.replicas.values() for leaf in self.leaves(replica)))

    def leaves(self, replica: TwinReplica) -> list[tuple[int, Key, int]]:
        """(tick, prefix, slot) of each cut below which the replica holds nothing."""
        slot = next(slot for slot, other in self.replicas.items() if other is replica)
        held = replica.ticks
        inner = {prefix[:k] for prefix in held for k in range(len(prefix))}
        return [(held[prefix], prefix, slot) for prefix in held if prefix not in inner]

    def evict(self, leaf: tuple[int, Key, int]) -> None:
        _, prefix, slot = leaf
        run = [prefix]
        while run[-1][:-1] and run[-1][:-1] not in self.cuts:
            run.append(run[-1][:-1])
        self.forget(run, self.replicas[slot])


# --- The prefix index against its naive twin, step by step.


SLOTS = st.integers(0, 3)
CAPACITIES = st.none() | st.integers(0, 14)
#: Few symbols and a common start, so that prompts share, part and nest.
KEYS = st.one_of(
    st.lists(st.integers(0, 1), max_size=6).map(tuple),
    st.lists(st.integers(0, 2), max_size=4).map(lambda tail: (0, 0, 0, *tail)),
)


class IndexAndTwin(RuleBasedStateMachine):
    """Does the same to both and compares all that can be seen."""

    @initialize(max_blocks=st.integers(1, 25), bounded=st.booleans())
    def start(self, max_blocks: int, bounded: bool) -> None:
        self.index = PrefixIndex(max_blocks=max_blocks, bounded=bounded)
        self.twin = PrefixTwin(max_blocks=max_blocks, bounded=bounded)
        #: Of earlier beliefs.
        self.ticks = [0]
        #: By slot, as a reader has them who reads those that have changed alone.
        self.fills: dict[int, float] = {}
        for slot in range(4):
            self._add(slot, None)

    def _add(self, slot: int, capacity: int | None) -> None:
        self.index.add_replica(slot, capacity_blocks=capacity)
        self.twin.replicas[slot] = TwinReplica(capacity)

    @rule(key=KEYS, slot=SLOTS)
    def insert(self, key: Key, slot: int) -> None:
        believed = self.twin.believed(key, slot)
        shown = self.twin.replicas[slot].shown.get(believed, 0)
        belief = self.index.insert(as_blocks(key), slot)
        self.twin.insert(key, slot)
        if self.twin.bounded:
            assert belief.blocks == len(believed)
            assert belief.tick == 0 or (belief.tick % 2 and belief.tick <= shown), "never later than it was shown"
            self.ticks.append(belief.tick)

    @rule(key=KEYS, slot=SLOTS)
    def confirm(self, key: Key, slot: int) -> None:
        self.index.confirm(as_blocks(key), slot)
        self.twin.confirm(key, slot)

    @rule(key=KEYS, slot=SLOTS)
    def withdraw(self, key: Key, slot: int) -> None:
        self.index.retract(as_blocks(key), slot)
        self.twin.withdraw(key, slot)

    @rule(key=KEYS, tail=KEYS, slot=SLOTS)
    def fail_next_turn(self, key: Key, tail: Key, slot: int) -> None:
        """The usual way of a withdrawal: a confirmed prompt grows by a turn, and that request fails."""
        self.confirm(key, slot)
        self.insert(key + tail, slot)
        self.withdraw(key + tail, slot)

    @rule(slot=SLOTS, data=st.data())
    def correct(self, slot: int, data: st.DataObject) -> None:
        before = data.draw(st.sampled_from(self.ticks) | st.integers(0, self.twin.tick + 2))
        self.index.evict_older(slot, before=before)
        self.twin.correct(slot, before)

    @rule(slot=SLOTS)
    def flush(self, slot: int) -> None:
        self.index.flush(slot)
        self.twin.flush(slot)

    @rule(slot=SLOTS, capacity=CAPACITIES)
    def replace_replica(self, slot: int, capacity: int | None) -> None:
        self.index.remove_replica(slot)
        self.fills.pop(slot, None)  # as the fleet empties the cells of a slot
        self.twin.remove(slot)
        self._add(slot, capacity)

    @rule(slot=SLOTS, capacity=CAPACITIES)
    def set_capacity(self, slot: int, capacity: int | None) -> None:
        self.index.set_capacity(slot, capacity)
        self.twin.replicas[slot].capacity = capacity
        self.twin.fit()

    @rule(bounded=st.booleans())
    def set_bounded(self, bounded: bool) -> None:
        self.index.bounded = bounded
        self.twin.bounded = bounded
        self.twin.fit()

    @rule(key=KEYS)
    def match(self, key: Key) -> None:
        matched, shared = self.index.match_runs(as_blocks(key), 4)
        assert matched.tolist() == [self.twin.match(key, slot) for slot in range(4)]
        worths = [self.twin.worth_behind(key, depth) for depth in range(len(key) + 1)]
        if shared is None:
            assert not any(worths)
            return
        discounts = shared.discounts_of_rows([float(depth) for depth in range(len(key) + 1)], 1000)
        owed = [-worth / (1000 - depth) for depth, worth in enumerate(worths)]
        assert discounts == pytest.approx(owed, abs=1e-9)
        assert shared.discounts(np.arange(len(key) + 1.0), 1000) == pytest.approx(owed, abs=1e-9)

    @invariant()
    def every_change_of_a_fill_is_announced(self) -> None:
        changed, self.index.changed = self.index.changed, 0
        self.fills |= {slot: self.index.fill(slot) for slot in slots_of(changed)}
        for slot, replica in self.twin.replicas.items():
            expected = min(1.0, len(replica.ticks) / replica.capacity) if replica.capacity else 0.0
            assert self.fills.get(slot, 0.0) == expected

    @invariant()
    def agree(self) -> None:
        self.index.check()
        assert self.index.stored_blocks == len(self.twin.stored)
        assert self.index.nodes == len(self.twin.cuts)
        for slot, replica in self.twin.replicas.items():
            assert self.index.resident_blocks(slot) == len(replica.ticks)
        for key in self.twin.stored:
            assert self.index.match(as_blocks(key), 4).tolist() == [self.twin.match(key, slot) for slot in range(4)]


IndexAndTwin.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestIndexAndTwin = IndexAndTwin.TestCase
