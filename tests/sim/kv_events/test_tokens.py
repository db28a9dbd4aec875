from __future__ import annotations

import pytest

from gorgo.core.prefix.kv_chain import chain_hashes
from gorgo.sim.kv_events.tokens import BlockTokens

ITEMS = b"item---1item---2item---3item---4item---5"


@pytest.mark.parametrize(("item_tokens", "block_tokens"), [(512, 512), (8, 16), (64, 64), (3, 6)])
def test_own_hashes_are_those_of_the_tokens(item_tokens: int, block_tokens: int) -> None:
    tokens = BlockTokens(item_bytes=8, item_tokens=item_tokens, block_tokens=block_tokens)
    assert len(tokens.expand(ITEMS)) == 5 * item_tokens * 4
    expected = chain_hashes(tokens.expand(ITEMS), block_tokens=block_tokens)
    assert tokens.hashes(ITEMS) == expected
    assert tokens.hashes(ITEMS) == expected, "as before"
    per_block = block_tokens // item_tokens * 8
    assert tokens.hashes(ITEMS[per_block:], expected[0]) == expected[1:], "behind a block"


def test_a_served_token_is_its_four_bytes() -> None:
    tokens = BlockTokens(item_bytes=4, item_tokens=1, block_tokens=16)
    assert tokens.expand(b"oneAtwoB") == b"oneAtwoB"


def test_prompts_that_differ_share_no_block_from_there_on() -> None:
    tokens = BlockTokens(item_bytes=8, item_tokens=64, block_tokens=64)
    one, other = tokens.hashes(b"a" * 8 + b"b" * 8 + b"c" * 8), tokens.hashes(b"a" * 8 + b"x" * 8 + b"c" * 8)
    assert [one[place] == other[place] for place in range(3)] == [True, False, False]
