from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.prefix.kv_chain import chain_hashes, token_bytes
from gorgo.live.tokens.block_hashes import PAGE_TOKENS, BlockHashes


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2500)), min_size=1, max_size=5),
    st.sampled_from([1, 16, 48, 64, 512, 700]),
    st.integers(0, 2**64 - 1),
)
def test_hashes_are_those_of_the_chain_whatever_is_cached(
    prompts: list[tuple[int, int]], block_tokens: int, root: int
) -> None:
    cache = BlockHashes(max_pages=3)
    for start, length in prompts:
        tokens = token_bytes(range(start, start + length))
        expected = chain_hashes(tokens, block_tokens=block_tokens, root=root)
        assert cache.get(tokens, block_tokens=block_tokens, root=root) == expected
        assert len(cache) <= 3


def test_a_longer_prompt_hashes_only_its_new_pages() -> None:
    cache = BlockHashes()
    short, long = token_bytes(range(48 * PAGE_TOKENS)), token_bytes(range(49 * PAGE_TOKENS))
    assert len(list(cache.steps(short, block_tokens=16))) == 48
    assert len(list(cache.steps(long, block_tokens=16))) == 1


@pytest.mark.parametrize("change", [{"block_tokens": 32}, {"root": 1}])
def test_another_block_size_or_root_shares_no_page(change: dict[str, int]) -> None:
    cache, tokens = BlockHashes(), token_bytes(range(2 * PAGE_TOKENS))
    first = cache.get(tokens, block_tokens=16)
    other = cache.get(tokens, **({"block_tokens": 16} | change))
    assert len(cache) == 4
    assert not set(first) & set(other)
