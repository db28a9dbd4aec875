"""One feed: what a replica reports of its cache for one model, and the replicas of an index as columns.

Owns the records. See `kv_feeds` for the feeds of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.cache_source import CacheSource
from gorgo.core.prefix.kv_index import KvEventIndex

#: Codes of sources in arrays by slot.
SOURCES: tuple[CacheSource, ...] = ("history", "events", "push")
HISTORY = 0

FeedKey = tuple[str | None, int]


@dataclass(slots=True)
class Feed:
    """What one replica reports of one model.

    `number`: another one for each feed. `cleared`: it reported an empty cache since the last scrape. `flushed`: the
    operator emptied it, so that it lacks blocks until the cache is cleared.
    """

    source: CacheSource
    model: str | None
    index: KvEventIndex
    complete: bool
    newest_s: float
    number: int
    cleared: bool = False
    flushed: bool = False

    @property
    def index_key(self) -> FeedKey:
        return self.model, self.index.block_tokens

    def serves(self, model: str | None) -> bool:
        """Return whether a request for `model` may find its blocks here."""
        return serves(self.model, model)


class FeedRows(NamedTuple):
    """The replicas with a feed in one index, as columns: slot, source, and whether the feed is partial."""

    slots: NDArray[np.intp]
    sources: NDArray[np.int8]
    partial: NDArray[np.bool_]

    @classmethod
    def of(cls, feeds: Sequence[tuple[int, Feed]]) -> FeedRows:
        """Return the rows of feeds with their slots."""
        return cls(
            np.array([slot for slot, _ in feeds], dtype=np.intp),
            np.array([SOURCES.index(feed.source) for _, feed in feeds], dtype=np.int8),
            np.array([not feed.complete for _, feed in feeds], dtype=np.bool_),
        )


def serves(feed_model: str | None, model: str | None) -> bool:
    """Return whether a request for `model` may find its blocks in the index of `feed_model`."""
    return feed_model is None or model is None or feed_model == model
