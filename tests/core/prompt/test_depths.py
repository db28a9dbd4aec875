from __future__ import annotations

import pytest

from gorgo.core.prompt.depths import depths_of
from gorgo.core.prompt.fingerprint import MAX_BLOCKS


@pytest.mark.parametrize(
    ("full_blocks", "block_tokens", "depths"),
    [(1, 64.0, ()), (2, 64.0, (2,)), (5, 64.0, (2, 4)), (3, 512.0, (1, 2, 3)), (16, 16.0, (8, 16)), (4, 69.0, (2, 4))],
)
def test_depths_are_128_tokens_apart_in_whole_blocks(
    full_blocks: int, block_tokens: float, depths: tuple[int, ...]
) -> None:
    assert depths_of(full_blocks, block_tokens) == depths


def test_a_longer_prompt_has_all_depths_of_a_shorter_one() -> None:
    longest = depths_of(MAX_BLOCKS, 64.0)
    assert all(
        depths_of(blocks, 64.0) == longest[: len(depths_of(blocks, 64.0))] for blocks in range(0, MAX_BLOCKS, 97)
    )


def test_the_distance_doubles_after_each_64_depths_of_it() -> None:
    longest = depths_of(MAX_BLOCKS, 64.0)
    assert longest[62:67] == (126, 128, 132, 136, 140)
    assert longest[-1] == MAX_BLOCKS
    assert len(longest) < 300
