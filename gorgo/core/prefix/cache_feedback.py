"""Cache feedback: an engine's report of cached tokens, compared with the confirmed prefix at dispatch.

Owns when a report contradicts the prefix index, and the KV capacity of an engine that does not report it.

Theory of operation. Engines evict least recently used blocks. A block that was confirmed on a replica and then not
cached proves that all it used before that block is evicted as well. The rest was used since, and did not all fit: an
upper bound on the capacity. Nothing proves that the capacity is more, so an index that is full and agrees with the
report grows a little, until the next contradiction. Unconfirmed blocks prove nothing: their prefill may not have begun.

Some engines find a part of every prefix (`found_share`). For them a report is a contradiction only where it is clearly
below the learned share, and a bound from reports before that share was known is dropped.
"""

from __future__ import annotations

from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.core.prefix.found_share import ALL_FOUND, USUAL_DEVIATIONS, FoundShare
from gorgo.core.prefix.residency import ConfirmedPrefix
from gorgo.core.record import record

#: A report may fall short of the confirmed prefix by so much: an engine's page (half a thousand tokens
#: for some hybrid models), and the error of lengths that are estimated from bytes.
SLACK_TOKENS = 512
SLACK_BLOCKS = 2
SLACK_SHARE = 0.1
#: Per report that agrees while the index is full: doubles in 140 requests, and stays within some percent of the
#: capacity while every twentieth request comes from its edge.
GROWTH = 1.005


@record
class CacheReport:
    """An engine's cached tokens beside the confirmed prefix, both in the index's estimated tokens."""

    confirmed_tokens: float
    found_tokens: float
    slack_tokens: float

    @classmethod
    def of(cls, request: RouteRequest, confirmed: ConfirmedPrefix, outcome: Outcome) -> CacheReport | None:
        """Return the comparison; `None` where either is unknown."""
        if outcome.cached_tokens is None or not confirmed.tick or not request.prompt_tokens:
            return None
        # The index counts estimated tokens: the report is converted to them.
        scale = request.prompt_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 1.0
        expected = confirmed.blocks * request.block_tokens
        slack = max(SLACK_TOKENS, SLACK_BLOCKS * request.block_tokens, SLACK_SHARE * expected)
        return cls(expected, outcome.cached_tokens * scale, slack)

    def is_contradiction(self, usual: FoundShare = ALL_FOUND) -> bool:
        """Return whether the engine had clearly less than the share of the prefix that it usually finds."""
        share = usual.share - USUAL_DEVIATIONS * usual.deviation
        return self.found_tokens + self.slack_tokens < self.confirmed_tokens * share


class LearnedCapacity:
    """Blocks that fit into one replica's cache, learned from reports.

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
        """`None` until a report has contradicted the index: until then all may fit."""
        return None if self._bound is None else int(self._bound)

    def learn(self, *, contradicted: bool, resident_blocks: int) -> bool:
        """Apply a report, with the replica's blocks after the correction; return whether the bound changed."""
        if contradicted:
            self._bound = max(1.0, float(resident_blocks))
            return True
        if self._bound is None or resident_blocks < self._bound / GROWTH - SLACK_BLOCKS:
            return False
        self._bound *= GROWTH
        return True

    def reset(self) -> bool:
        """Drop the bound; return whether there was one."""
        had_bound, self._bound = self._bound is not None, None
        return had_bound
