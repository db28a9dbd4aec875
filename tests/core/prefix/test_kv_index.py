""""""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.core.prefix.kv_index import MAX_SOURCES, KvEventIndex, PushedBlocks
from gorgo.core.prefix.kv_source import TierBlocks, chain_hashes, chain_root, next_hash, token_bytes

PROMPT = (11, 12, 13, 14, 15, 16)


def index_of(max_blocks: int = 1000) -> KvEventIndex:
    return KvEventIndex(block_tokens=2, max_blocks_per_replica=max_blocks)


def stored(
    *hashes: int,
    tokens: tuple[int, ...] = PROMPT,
    parent: int | None = None,
    tier: KvTier | None = KvTier.GPU,
    block_tokens: int = 2,
    group: int = 0,
    adapter: str | None = None,
    cache_salt: str | None = None,
    extra: dict[int, bytes] | None = None,
) -> BlocksStored:
    packed = token_bytes(tokens)
    return BlocksStored(hashes, parent, packed, block_tokens, tier, group, adapter, cache_salt, extra or {})


def removed(*hashes: int, tier: KvTier | None = KvTier.GPU) -> BlocksRemoved:
    return BlocksRemoved(hashes, tier)


def apply(index: KvEventIndex, slot: int, *events: KvEvent, rank: int = 0) -> None:
    index.apply(slot, KvEventBatch(sent_s=None, rank=rank, events=events))
    index.check()


def matched(index: KvEventIndex, n_slots: int = 2, *, root: int = 0) -> list[float]:
    hashes = chain_hashes(token_bytes(PROMPT), block_tokens=2, root=root)
    found: list[float] = index.match(hashes, n_slots).tolist()
    return found


def test_match_counts_leading_blocks_of_each_replica() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3))
    apply(index, 1, stored(77, tokens=PROMPT[:2]))
    assert matched(index) == [6, 2]


def test_blocks_of_two_engines_match_whatever_their_hashes() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3))
    apply(index, 1, stored(3, 1, 2))
    assert matched(index) == [6, 6]


def test_a_removed_first_block_hides_the_rest_until_it_returns() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3), removed(1))
    assert matched(index) == [0, 0]
    apply(index, 0, stored(1, tokens=PROMPT[:2]))
    assert matched(index) == [6, 0]


def test_a_block_with_two_copies_stays_until_both_are_evicted() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3), stored(1, 2, 3), removed(1, 2, 3))
    assert matched(index) == [6, 0]
    apply(index, 0, removed(1, 2, 3))
    assert matched(index) == [0, 0]
    assert index.blocks(0) == 0


def test_each_copy_is_evicted_once() -> None:
    index = index_of()
    apply(index, 0, *[stored(1, 2, 3)] * 4, *[removed(1, 2, 3)] * 3)
    assert matched(index) == [6, 0]
    apply(index, 0, removed(1, 2, 3))
    assert matched(index) == [0, 0]


def test_a_hash_of_another_block_replaces_all_copies_of_the_first() -> None:
    index = index_of()
    apply(index, 0, *[stored(1, tokens=(8, 9))] * 3, stored(1, tokens=PROMPT[:2]))
    assert matched(index) == [2, 0]
    apply(index, 0, removed(1))
    assert matched(index) == [0, 0]
    assert index.blocks(0) == 0


def test_a_block_in_cpu_memory_counts_less_and_one_in_both_counts_whole() -> None:
    index = index_of()
    apply(index, 0, stored(1, tokens=PROMPT[:2]), stored(1, 2, 3, tier=KvTier.CPU))
    assert matched(index) == pytest.approx([2 + 2 * 0.8 * 2, 0])
    apply(index, 0, removed(1))
    assert matched(index) == pytest.approx([3 * 0.8 * 2, 0])


def test_an_offloaded_block_without_tokens_is_known_by_its_hash() -> None:
    index = index_of()
    offloaded = BlocksStored((1, 2, 9), None, b"", None, KvTier.CPU)
    apply(index, 0, stored(1, 2, 3), offloaded, removed(1, 2, 3))
    assert matched(index) == pytest.approx([2 * 0.8 * 2, 0])
    assert index.stats[0].without_tokens == 1


def test_blocks_after_an_unknown_parent_are_counted_and_left_out() -> None:
    index = index_of()
    apply(index, 0, stored(2, 3, tokens=PROMPT[2:], parent=1))
    assert index.stats[0].unknown_parents == 2
    apply(index, 0, stored(1, tokens=PROMPT[:2]), stored(2, 3, tokens=PROMPT[2:], parent=1))
    assert matched(index) == [6, 0]


def test_a_parent_is_found_in_another_tier_or_rank_but_not_on_another_replica() -> None:
    index = index_of()
    apply(index, 0, stored(1, tokens=PROMPT[:2], tier=KvTier.CPU), rank=1)
    apply(index, 0, stored(2, tokens=PROMPT[2:4], parent=1))
    apply(index, 1, stored(2, tokens=PROMPT[2:4], parent=1))
    assert matched(index) == pytest.approx([2 * 0.8 + 2, 0])
    assert index.stats[1].unknown_parents == 1


def test_a_cleared_rank_leaves_the_others() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3), rank=0)
    apply(index, 0, stored(1, tokens=PROMPT[:2]), rank=1)
    apply(index, 0, CacheCleared(), rank=0)
    assert matched(index) == [2, 0]
    index.clear_replica(0)
    index.check()
    assert matched(index) == [0, 0]


def test_prompts_under_an_adapter_or_a_salt_share_nothing_with_others() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3, adapter="lora"))
    apply(index, 1, stored(4, 5, 6, cache_salt="lora"))
    assert matched(index) == [0, 0]
    assert matched(index, root=chain_root("lora")) == [6, 0]
    assert matched(index, root=chain_root(None, "lora")) == [0, 6]
    assert len({chain_root(), chain_root("a"), chain_root(None, "a"), chain_root("a", ""), chain_root("", "a")}) == 5


def test_an_image_in_a_block_is_part_of_it() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, 3, extra={1: b"image"}))
    assert matched(index) == [2, 0]
    first, _, _ = chain_hashes(token_bytes(PROMPT), block_tokens=2)
    second = next_hash(first, token_bytes(PROMPT[2:4]), b"image")
    assert index.match([first, second], 1).tolist() == [4]


def test_blocks_of_other_sizes_and_tiers_are_counted_and_left_out() -> None:
    index = index_of()
    apply(index, 0, stored(1, 2, block_tokens=3), stored(1, 2, 3, tier=None), removed(1, tier=None), removed(8))
    stats = index.stats[0]
    assert (stats.other_block_sizes, stats.other_tiers, stats.unknown_removals, stats.stored) == (2, 4, 1, 0)
    assert index.blocks(0) == 0


def test_a_full_replica_evicts_its_own_oldest_blocks_alone() -> None:
    index = index_of(max_blocks=3)
    apply(index, 1, stored(1, 2, 3))
    apply(index, 0, stored(1, 2, 3))
    for number in range(50):
        apply(index, 0, stored(100 + number, tokens=(number, number)), rank=number % 2)
    assert index.blocks(0) <= 3
    assert index.stats[0].evicted >= 50
    assert matched(index) == [0, 6]


def test_a_full_replica_evicts_from_its_largest_cache() -> None:
    index = index_of(max_blocks=3)
    apply(index, 0, *[stored(1, 2, 3)] * 2, rank=0)
    apply(index, 0, stored(9, tokens=(8, 9)), rank=1)
    assert index.match(chain_hashes(token_bytes((8, 9)), block_tokens=2), 1).tolist() == [2]
    assert (index.blocks(0), index.stats[0].evicted) == (3, 1)


def test_ranks_from_the_wire_are_bounded() -> None:
    index = index_of()
    for rank in range(MAX_SOURCES + 5):
        index.apply(0, KvEventBatch(sent_s=None, rank=rank, events=(stored(1, tokens=PROMPT[:2]),)))
    index.check()
    assert index.stats[0].excess_sources == 5
    assert index.blocks(0) == MAX_SOURCES


@pytest.mark.parametrize("n_slots", [0, 1, 3, 64, 200])
def test_match_answers_for_any_number_of_replicas(n_slots: int) -> None:
    index = index_of()
    for slot in range(n_slots):
        blocks = slot % 4
        if blocks:
            apply(index, slot, stored(*range(blocks), tokens=PROMPT[: 2 * blocks]))
    assert matched(index, n_slots) == [2 * (slot % 4) for slot in range(n_slots)]


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_of_more_than_32_bits_is_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token_id])


LIMIT = 6


@dataclass
class Twin:
    """One replica."""

    reported: set[int] = field(default_factory=set)
    confirmed: dict[int, float] = field(default_factory=dict)

    @property
    def blocks(self) -> set[int]:
        return self.reported | set(self.confirmed)

    def replace(self, hashes: list[int]) -> None:
        self.reported &= set(hashes)
        self.add(hashes)

    def add(self, hashes: list[int]) -> None:
        for own in dict.fromkeys(hashes):
            if own in self.confirmed or len(self.blocks | {own}) <= LIMIT:
                self.confirmed.pop(own, None)
                self.reported.add(own)

    def remove(self, hashes: list[int]) -> None:
        for own in hashes:
            self.reported.discard(own)
            self.confirmed.pop(own, None)

    def confirm(self, hashes: list[int], now: float) -> None:
        for own in hashes:
            if own not in self.reported and len(self.blocks | {own}) <= LIMIT:
                self.confirmed[own] = now

    def expire_confirmed(self, before_s: float) -> None:
        self.confirmed = {own: since_s for own, since_s in self.confirmed.items() if since_s >= before_s}


STEPS = st.tuples(
    st.sampled_from(["replace", "add", "remove", "confirm", "settle", "clear"]),
    st.integers(0, 1),
    st.lists(st.integers(0, 9), max_size=8),
)


@given(st.lists(STEPS, max_size=30))
def test_pushed_blocks_agree_with_a_naive_twin(steps: list[tuple[str, int, list[int]]]) -> None:
    tier = TierBlocks()
    pushed, twins = PushedBlocks(tier), {0: Twin(), 1: Twin()}
    for now, (step, slot, hashes) in enumerate(steps):
        twin = twins[slot]
        match step:
            case "replace":
                pushed.replace(slot, hashes, limit=LIMIT)
                twin.replace(hashes)
            case "add":
                pushed.add(slot, hashes, limit=LIMIT)
                twin.add(hashes)
            case "remove":
                pushed.remove(slot, hashes)
                twin.remove(hashes)
            case "confirm":
                pushed.confirm(slot, hashes, limit=LIMIT, now=float(now))
                twin.confirm(hashes, float(now))
            case "settle":
                pushed.expire_confirmed(slot, before_s=now - 2.0)
                twin.expire_confirmed(now - 2.0)
            case "clear":
                pushed.clear_replica(slot)
                twin.remove(list(twin.blocks))
        pushed.check(LIMIT)
        expected = {own: sum(1 << slot for slot in twins if own in twins[slot].blocks) for own in range(10)}
        assert tier.masks == {own: mask for own, mask in expected.items() if mask}
        for each in twins:
            assert (pushed.blocks_of(each), pushed.reported(each)) == (
                len(twins[each].blocks),
                len(twins[each].reported),
            )


def test_confirmed_block_that_the_next_snapshot_shows_is_reported() -> None:
    pushed = PushedBlocks(TierBlocks())
    pushed.confirm(0, [1, 2], limit=LIMIT, now=5.0)
    pushed.replace(0, [1], limit=LIMIT)
    assert (pushed.blocks_of(0), pushed.reported(0)) == (2, 1)
    pushed.expire_confirmed(0, before_s=5.5)
    assert (pushed.blocks_of(0), pushed.reported(0)) == (1, 1)


def test_many_blocks_are_in_parts_of_which_none_is_large() -> None:
    tier = TierBlocks()
    pushed, hashes = PushedBlocks(tier), chain_hashes(bytes(4 * 20_000), block_tokens=1)
    assert pushed.add(0, hashes, limit=20_000) == 0
    assert max(map(len, tier.parts)) < 2 * 20_000 / len(tier.parts)
    # A dict begins with the lowest bits: where they were equal in a part, each access met many other blocks.
    assert min(len({hash(own) % 64 for own in part}) for part in tier.parts) > 20
    assert len(tier.masks) == pushed.blocks_of(0) == 20_000
    pushed.set_max_blocks(10_000)
    assert pushed.blocks_of(0) == len(tier.masks) == 10_000
    assert len(tier.masks.keys() & set(hashes[:10_000])) < 1000
