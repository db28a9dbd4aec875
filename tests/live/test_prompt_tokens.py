from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.prefix.kv_source import TOKEN_BYTES, chain_hashes, token_bytes
from gorgo.live.encoded_prompt import PAGE_BYTES, EncodedPrompt
from gorgo.live.prompt_tokens import STEP_BLOCKS, BlockHashes

PAGE_TOKENS = PAGE_BYTES // TOKEN_BYTES


def ids(start: int, length: int) -> EncodedPrompt:
    return EncodedPrompt.of_ids(token_bytes(range(start, start + length)))


def segments(*lengths: int, origin: bytes = b"a") -> EncodedPrompt:
    """Return segments of a tokenizer, as a conversation of messages with these numbers of tokens has them."""
    parts = [token_bytes(range(length)) for length in lengths]
    return EncodedPrompt(parts, [f"{length:032}".encode() for length in lengths], origin)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2500)), min_size=1, max_size=5),
    st.sampled_from([1, 16, 48, 64, 512, 700]),
    st.integers(0, 2**64 - 1),
)
def test_hashes_of_ids_are_those_of_the_chain_whatever_is_cached(
    prompts: list[tuple[int, int]], block_tokens: int, root: int
) -> None:
    cache = BlockHashes(max_bytes=5_000)
    for start, length in prompts:
        expected = chain_hashes(token_bytes(range(start, start + length)), block_tokens=block_tokens, root=root)
        assert cache.get(ids(start, length), block_tokens=block_tokens, root=root) == expected
        cache.check()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 5, 15, 16, 17, 300]), max_size=9), min_size=1, max_size=6),
    st.sampled_from([1, 16, 48]),
)
def test_hashes_of_segments_are_those_of_the_chain_whatever_is_cached(
    conversations: list[list[int]], block_tokens: int
) -> None:
    cache = BlockHashes(max_bytes=5_000)
    for lengths in conversations:
        prompt = segments(*lengths)
        expected = chain_hashes(b"".join(prompt.parts), block_tokens=block_tokens)
        assert cache.get(prompt, block_tokens=block_tokens) == expected
        cache.check()


def test_a_longer_prompt_of_ids_hashes_only_its_new_pages() -> None:
    cache = BlockHashes()
    assert sum(cache.steps(ids(0, 48 * PAGE_TOKENS), block_tokens=16)) == 48 * PAGE_TOKENS // 16
    assert sum(cache.steps(ids(0, 49 * PAGE_TOKENS), block_tokens=16)) == PAGE_TOKENS // 16


def test_the_next_turn_of_a_conversation_hashes_only_its_new_segments() -> None:
    cache, turns = BlockHashes(), [100, 250] * 40
    assert sum(cache.steps(segments(*turns), block_tokens=16)) == sum(turns) // 16
    turns += [48, 32]
    assert sum(cache.steps(segments(*turns), block_tokens=16)) == 5
    assert sum(cache.steps(segments(*turns), block_tokens=16)) == 0


def test_a_long_segment_is_hashed_in_steps() -> None:
    steps = list(BlockHashes().steps(segments(16 * STEP_BLOCKS * 3 + 20), block_tokens=16))
    assert steps == [STEP_BLOCKS, STEP_BLOCKS, STEP_BLOCKS, 1]


@pytest.mark.parametrize(("block_tokens", "root", "origin"), [(32, 0, b"a"), (16, 1, b"a"), (16, 0, b"b")])
def test_another_block_size_root_or_tokenizer_shares_no_section(block_tokens: int, root: int, origin: bytes) -> None:
    cache = BlockHashes()
    cache.get(segments(500, 500), block_tokens=16)
    cache.get(segments(500, 500, origin=origin), block_tokens=block_tokens, root=root)
    assert len(cache) == 6
