"""The event index against its naive twin, event by event."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
from tests.core.prefix.kv_twin import KvTwin

SLOTS = st.integers(0, 2)
RANKS = st.integers(0, 1)
TIERS = st.sampled_from(KvTier)
GROUPS = st.integers(0, 1)
#: A prompt's blocks of one token each: few symbols, so that prompts share, part and nest.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def engine_hash(slot: int, path: tuple[int, ...]) -> int:
    """What an engine with a seed of its own would have: another number on each replica."""
    return hash((slot, path)) & (2**64 - 1)


class KvIndexAndTwin(RuleBasedStateMachine):
    """Does the same to both and compares all that can be seen."""

    @initialize()
    def start(self) -> None:
        self.index = KvEventIndex(block_tokens=1, max_blocks_per_replica=10_000)
        self.twin = KvTwin()

    def apply(self, slot: int, rank: int, event: KvEvent) -> None:
        self.index.apply(slot, KvEventBatch(sent_s=None, rank=rank, events=(event,)))
        match event:
            case BlocksStored():
                self.twin.store(slot, rank, event)
            case BlocksRemoved():
                self.twin.remove(slot, rank, event)
            case CacheCleared():
                self.twin.clear(slot, rank)

    @rule(prompt=PROMPTS, start=st.integers(0, 4), slot=SLOTS, rank=RANKS, tier=TIERS, group=GROUPS, bare=st.booleans())
    def store(
        self, prompt: tuple[int, ...], start: int, slot: int, rank: int, tier: KvTier, group: int, bare: bool
    ) -> None:
        """Any part of a prompt, its parent known or not; without tokens where `bare`."""
        start = min(start, len(prompt) - 1)
        hashes = tuple(engine_hash(slot, prompt[: place + 1]) for place in range(start, len(prompt)))
        parent = engine_hash(slot, prompt[:start]) if start else None
        tokens = b"" if bare else token_bytes(prompt[start:])
        self.apply(slot, rank, BlocksStored(hashes, parent, tokens, None if bare else 1, tier, group))

    @rule(prompt=PROMPTS, slot=SLOTS, rank=RANKS, tier=TIERS, group=GROUPS, whole=st.booleans())
    def remove(self, prompt: tuple[int, ...], slot: int, rank: int, tier: KvTier, group: int, whole: bool) -> None:
        """One block, wherever it is in a prompt, or all of a prompt."""
        lengths = range(1, len(prompt) + 1) if whole else (len(prompt),)
        hashes = tuple(engine_hash(slot, prompt[:length]) for length in lengths)
        self.apply(slot, rank, BlocksRemoved(hashes, tier, group))

    @rule(first=PROMPTS, second=PROMPTS, slot=SLOTS, rank=RANKS, tier=TIERS)
    def collide(self, first: tuple[int, ...], second: tuple[int, ...], slot: int, rank: int, tier: KvTier) -> None:
        """One engine hash for two blocks, one after the other: the second replaces the first."""
        for token in (first[0], second[0]):
            self.apply(slot, rank, BlocksStored((1,), None, token_bytes((token,)), 1, tier))
        self.apply(slot, rank, BlocksRemoved((1,) * 4, tier))

    @rule(slot=SLOTS, rank=RANKS)
    def clear_rank(self, slot: int, rank: int) -> None:
        self.apply(slot, rank, CacheCleared())

    @rule(slot=SLOTS)
    def restart(self, slot: int) -> None:
        self.index.clear_replica(slot)
        self.twin.clear(slot, None)

    @rule(prompt=PROMPTS)
    def match(self, prompt: tuple[int, ...]) -> None:
        found = self.index.match(chain_hashes(token_bytes(prompt), block_tokens=1), 3)
        assert found.tolist() == pytest.approx([self.twin.match(prompt, slot) for slot in range(3)])

    @invariant()
    def same_counts(self) -> None:
        self.index.check()
        assert [self.index.blocks(slot) for slot in range(3)] == [self.twin.blocks(slot) for slot in range(3)]
        assert (
            sum(each.unknown_parents + each.without_tokens for each in self.index.stats.values()) == self.twin.unknown
        )


TestKvIndexAndTwin = KvIndexAndTwin.TestCase
TestKvIndexAndTwin.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
