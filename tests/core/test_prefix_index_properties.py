"""The prefix index against its naive twin, step by step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.prefix.index import PrefixIndex
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
        assert self.index.match(as_blocks(key), 4).tolist() == [self.twin.match(key, slot) for slot in range(4)]

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
