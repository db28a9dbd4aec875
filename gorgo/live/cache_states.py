"""What the proxy knows of each replica's cache, how right it was, and by which reports: for metrics, status and page.

Owns the composition. The Router has the source in use and its errors, `kv_events` the state of the feed of KV events,
`cache_push` the pushes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gorgo.core.messages.cache_source import CacheSourceStats
from gorgo.live.cache_push.source import PushStats
from gorgo.live.kv_feed_stats import KvFeedStats


@dataclass(frozen=True, slots=True)
class CacheState:
    """The cache of one replica; `feed` is `None` where no KV events are configured."""

    region: str
    stats: CacheSourceStats
    pushes: PushStats
    feed: KvFeedStats | None = None

    def as_dict(self) -> dict[str, Any]:
        feed = None
        if self.feed is not None:
            feed = asdict(self.feed) | {"state": self.feed.state.value, "endpoints": list(self.feed.endpoints)}
        return asdict(self.stats) | {"feed": feed, "pushes": asdict(self.pushes)}

    def reports(self) -> Iterator[tuple[str, int]]:
        """Yield the number of reports by what became of them."""
        feed = self.feed or KvFeedStats()
        yield "messages", feed.messages
        yield "rejected", feed.rejected_messages + feed.rejected_events
        yield "gaps", feed.gaps
        yield "restarts", feed.restarts
        yield "replays", feed.replays
        yield "failed_replays", feed.failed_replays
        pushes = self.pushes
        yield "snapshots", pushes.snapshots
        yield "evictions", pushes.evictions
        yield "stale", pushes.stale
        yield "lost", pushes.lost
        yield "limited", pushes.limited
        yield "silences", pushes.silences
