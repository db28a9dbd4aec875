"""What an engine's own count of cached tokens says about the belief under which the request was sent there.

Owns when a report contradicts the prefix index, and the KV capacity of an engine that does not tell it. The index does
the forgetting, the Router asks.

Theory of operation. Engines evict what was used longest ago. A block that a replica had shown to hold and then did not
find proves that all it used before that block is gone as well. What is left was used since, and did not all fit: an
upper bound on the capacity. Nothing proves that it is more, so an index that is full and agrees with the report grows a
little, until the next contradiction. Blocks that were never confirmed prove nothing: their prefill may not have begun.
"""

from __future__ import annotations

from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.core.prefix.residency import ConfirmedPrefix

#: A report may fall short of the belief by so much without a contradiction: an engine's page (half a thousand tokens
#: for some hybrid models), and the error of lengths that are estimated from bytes.
SLACK_TOKENS = 512
SLACK_BLOCKS = 2
SLACK_SHARE = 0.1
#: Per report that agrees while the index is full: doubles in 140 requests, and stays within some percent of the
#: capacity while every twentieth request comes from its edge.
GROWTH = 1.005


def is_contradicted(request: RouteRequest, belief: ConfirmedPrefix, outcome: Outcome) -> bool | None:
    """Whether the engine had clearly less than it had shown before; `None` where there is no telling."""
    if outcome.cached_tokens is None or not belief.tick or not request.prompt_tokens:
        return None
    # The belief counts in estimated tokens: the report is brought to the same scale.
    scale = request.prompt_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 1.0
    believed = belief.blocks * request.block_tokens
    slack = max(SLACK_TOKENS, SLACK_BLOCKS * request.block_tokens, SLACK_SHARE * believed)
    return outcome.cached_tokens * scale + slack < believed


class LearnedCapacity:
    """Blocks that fit into one replica's cache, as far as reports have shown.

    Example
    -------
    >>> capacity = LearnedCapacity()
    >>> capacity.blocks is None, capacity.learn(contradicted=True, resident_blocks=1000), capacity.blocks
    (True, True, 1000)
    >>> capacity.learn(contradicted=False, resident_blocks=998), capacity.blocks
    (True, 1004)
    """

    __slots__ = ("_bound",)

    def __init__(self) -> None:
        self._bound: float | None = None

    @property
    def blocks(self) -> int | None:
        """`None` until a report has contradicted a belief: until then all that was sent there may fit."""
        return None if self._bound is None else int(self._bound)

    def learn(self, *, contradicted: bool, resident_blocks: int) -> bool:
        """A report; `resident_blocks` is what the index holds after its correction. Whether the bound changed."""
        if contradicted:
            self._bound = max(1.0, float(resident_blocks))
            return True
        if self._bound is None or resident_blocks < self._bound / GROWTH - SLACK_BLOCKS:
            return False
        self._bound *= GROWTH
        return True
