from __future__ import annotations

import pytest

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.core.prefix.kv_chain import chain_hashes, chain_root, next_hash, token_bytes
from gorgo.core.prefix.kv_index import MAX_SOURCES, KvEventIndex

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
