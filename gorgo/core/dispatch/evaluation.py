"""An evaluation: the policy's choice for a request, with what it was made from. Nothing is reserved by it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.replica import Replica
from gorgo.core.messages.cache_source import CacheSource
from gorgo.core.messages.decision import ShadowScore
from gorgo.core.policy.choice import Choice
from gorgo.core.prefix.answers import Behind
from gorgo.core.prefix.kv_feed import SOURCES, FeedMatch
from gorgo.core.record import record


@record
class Evaluation:
    """The policy's choice for a request now. Nothing is reserved."""

    eligible: CandidateSet
    choice: Choice
    #: Cached tokens by the best source, per slot; of a bounded history those that the engine is likely to find.
    matched: NDArray[np.float64]
    #: The longest match on any replica, a candidate or not.
    most_matched: float
    shadow: ShadowScore | None
    #: The replica chosen.
    replica: Replica
    #: The learner's table of the candidates; `None` without a learner.
    features: NDArray[np.float32] | None = None
    #: The table of the log of outcomes; `None` without one.
    recorded: NDArray[np.float32] | None = None
    #: What feeds say of the prompt; `None` where the history counts for all.
    reported: FeedMatch | None = None
    #: Answers that may be cached behind the match, by slot.
    behind: dict[int, Behind] | None = None

    @property
    def cache_source(self) -> CacheSource:
        """Return the source of the cached tokens of the replica chosen."""
        return "history" if self.reported is None else SOURCES[self.reported.sources.item(self.replica.slot)]

    def next_best(self, count: int, in_flight: NDArray[np.float64]) -> tuple[str, ...]:
        """Return at most `count` candidates behind the one chosen, least cost first; equal ones in slot order.

        Where the policy has no cost, those with the fewest requests by `in_flight`, a column per slot, are first.
        """
        cost = self.choice.cost
        left = in_flight[self.eligible.slots] if cost is None else cost.copy()
        left[self.choice.row] = np.inf
        names: list[str] = []
        for _ in range(min(count, len(left) - 1)):
            row = int(left.argmin())
            names.append(self.eligible.names[row])
            left[row] = np.inf
        return tuple(names)

    @property
    def best_cached_tokens(self) -> int:
        """Return the longest match on any candidate."""
        if self.eligible.is_all:
            return int(self.most_matched)
        matched = self.matched[self.eligible.slots]
        return int(matched.item(matched.argmax()))
