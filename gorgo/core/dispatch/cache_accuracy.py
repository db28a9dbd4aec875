"""How right the estimate of cached tokens was: sums of estimated and reported tokens per replica.

Owns the sums. `cache_feedback` decides what a report corrects.
"""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.messages.cache_source import CacheSourceStats
from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.core.prefix.kv_feeds import KvFeeds


@dataclass(slots=True)
class _Sums:
    """What of a `CacheSourceStats` is summed request by request; the rest of it is read from the feed at that time."""

    requests: int = 0
    estimated_tokens: int = 0
    reported_tokens: int = 0
    phantom_tokens: int = 0
    missed_tokens: int = 0


class CacheAccuracy:
    """Sums of all replicas since they joined."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def remove_replica(self, slot: int) -> None:
        """Drop the sums of a replica that has left."""
        self._sums.pop(slot, None)

    def add(self, slot: int, request: RouteRequest, outcome: Outcome, *, estimated_tokens: int) -> None:
        """Add a completed request, if the engine reported its cached tokens.

        A prompt whose length was estimated wrong is compared in the engine's tokens.
        """
        reported = outcome.cached_tokens
        if reported is None:
            return
        if outcome.prompt_tokens and request.prompt_tokens:
            estimated_tokens = round(estimated_tokens * outcome.prompt_tokens / request.prompt_tokens)
        sums = self._sums.get(slot)
        if sums is None:
            sums = self._sums[slot] = _Sums()
        sums.requests += 1
        sums.estimated_tokens += estimated_tokens
        sums.reported_tokens += reported
        if estimated_tokens > reported:
            sums.phantom_tokens += estimated_tokens - reported
        else:
            sums.missed_tokens += reported - estimated_tokens

    def stats(self, slot: int, feeds: KvFeeds, *, now: float) -> CacheSourceStats:
        """Return the sums beside the state of the replica's feed."""
        feed, sums = feeds.newest(slot), self._sums.get(slot, _Sums())
        return CacheSourceStats(
            source="history" if feed is None else feed.source,
            complete=feed is not None and feed.complete,
            block_tokens=None if feed is None else feed.index.block_tokens,
            blocks=feeds.blocks(slot),
            speculated_blocks=feeds.speculated_blocks(slot, now=now),
            age_s=None if feed is None else now - feed.newest_s,
            requests=sums.requests,
            estimated_tokens=sums.estimated_tokens,
            reported_tokens=sums.reported_tokens,
            phantom_tokens=sums.phantom_tokens,
            missed_tokens=sums.missed_tokens,
            events=feeds.event_stats(slot),
        )
