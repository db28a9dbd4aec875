"""Depths of a prompt in whole blocks: every 128 tokens for routes, ends of messages for marks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from gorgo.core.prompt.fingerprint import MAX_BLOCKS

#: Tokens between two depths.
STEP_TOKENS = 128
#: Depths after which the distance doubles: a prompt of a million tokens has some hundred routes, not 8,000.
_EVEN_DEPTHS = 64
#: Routes' depths from one mark to the next within a message.
_COARSE = 4
#: Grids in memory: the tokens of a block differ by model and change a little with the learned ratio.
_MAX_GRIDS = 16


def depths_of(full_blocks: int, block_tokens: float) -> tuple[int, ...]:
    """Return the depths of a prompt, ascending, in blocks.

    They do not depend on the prompt's length, so a longer prompt with the same beginning has all of them.

    Example
    -------
    >>> depths_of(9, block_tokens=64.0)
    (2, 4, 6, 8)
    """
    grid = _grid(max(1, round(STEP_TOKENS / block_tokens)))
    return grid[: bisect_right(grid, full_blocks)]


def marked_depths(full_blocks: int, block_tokens: float, boundaries: Sequence[int]) -> list[int]:
    """Return the depths that routers name to each other, ascending: ends of messages, every 512 tokens, the last block.

    Prompts mostly share whole messages; those that share the beginning of a long one lose less than 512 tokens of it.
    One without known messages has the depths of routes.

    Example
    -------
    >>> marked_depths(20, block_tokens=64.0, boundaries=(200, 1000))
    [3, 8, 15, 16, 20]
    """
    if boundaries:
        depths = {int(end / block_tokens) for end in boundaries}
        depths.update(_COARSE * depth for depth in depths_of(full_blocks // _COARSE, block_tokens))
    else:
        depths = set(depths_of(full_blocks, block_tokens))
    depths.add(full_blocks)
    return sorted(depth for depth in depths if 0 < depth <= full_blocks)


@lru_cache(maxsize=_MAX_GRIDS)
def _grid(step: int) -> tuple[int, ...]:
    depths: list[int] = []
    depth = 0
    while (depth := depth + step) <= MAX_BLOCKS:
        depths.append(depth)
        if depth >= _EVEN_DEPTHS * step:
            step *= 2
    return tuple(depths)
