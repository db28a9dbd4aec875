"""Depths of a prompt at which it has a route: every 128 tokens, in whole blocks."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from gorgo.core.prompt.fingerprint import MAX_BLOCKS

#: Tokens between two depths.
STEP_TOKENS = 128
#: Depths after which the distance doubles: a prompt of a million tokens has some hundred routes, not 8,000.
_EVEN_DEPTHS = 64
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


@lru_cache(maxsize=_MAX_GRIDS)
def _grid(step: int) -> tuple[int, ...]:
    depths: list[int] = []
    depth = 0
    while (depth := depth + step) <= MAX_BLOCKS:
        depths.append(depth)
        if depth >= _EVEN_DEPTHS * step:
            step *= 2
    return tuple(depths)
