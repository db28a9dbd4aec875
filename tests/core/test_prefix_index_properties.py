"""The prefix index against its naive twin, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.prefix.index import PrefixIndex, slots_of
from tests.core.prefix_twin import Key, PrefixTwin, TwinReplica, as_blocks

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
