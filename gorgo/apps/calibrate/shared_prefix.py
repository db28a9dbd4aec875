"""What an engine finds of a cached beginning: which share, and in which steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from statistics import median

#: A smaller share is no rounding by the tokenizer.
WHOLE_SHARE = 0.97
#: No engine has smaller pages; a smaller common divisor of a few lengths is chance.
LEAST_STEP = 8


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The found share of a cached beginning, and the step in tokens (a page, a checkpoint) in which it is found.

    The share is 0 if nothing was found of any beginning: an engine without a prefix cache.
    """

    found_share: float
    step_tokens: int

    @property
    def is_cached(self) -> bool:
        """Whether the engine has a prefix cache."""
        return self.found_share > 0


def shared_prefix(found: Sequence[tuple[int, int]]) -> SharedPrefix | None:
    """Return the share and the step from pairs of (tokens of the beginning, tokens found of it).

    >>> shared_prefix([(1100, 1024), (1790, 1536), (2330, 2048), (5390, 5120)])
    SharedPrefix(found_share=1.0, step_tokens=512)
    >>> shared_prefix([(1000, 601), (2000, 1199), (4000, 2402)])
    SharedPrefix(found_share=0.6, step_tokens=1)
    >>> shared_prefix([(1000, 0), (2000, 0)]).is_cached
    False
    """
    if not found:
        return None
    if not any(cached for _, cached in found):
        return SharedPrefix(0.0, 1)
    divisor = gcd(*(cached for _, cached in found))
    step = divisor if divisor >= LEAST_STEP else 1
    # The expected loss to rounding is half a step.
    shares = [min(1.0, (cached + (step - 1) / 2) / tokens) if cached else 0.0 for tokens, cached in found]
    share = round(median(shares), 2)
    return SharedPrefix(1.0 if share >= WHOLE_SHARE else share, step)
