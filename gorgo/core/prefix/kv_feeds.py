"""Feeds: what replicas report of their caches by KV events or pushes, and what of a prompt each of them has.

Owns the step from a dispatched prompt to the indexes (`kv_feed`, `kv_index`); `kv_reports` owns that from a report.
Replicas without a feed for a request are left to the history of requests (`index`).

Theory of operation. A complete feed alone counts; of a partial one, joined while the cache had blocks already or cut at
the bound, the better of it and the history. A dispatched prompt counts before any report (speculation).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.prefix.kv_feed import HISTORY, Feed, FeedMatch, serves
from gorgo.core.prefix.kv_reports import KvReports
from gorgo.core.prefix.kv_speculation import Speculation, SpeculationQueue


class KvFeeds(KvReports):
    """Feeds of all replicas.

    Parameters
    ----------
    max_blocks:
        Bound on memory: blocks of each index, in equal shares of the replicas.
    used:
        Whether decisions use feeds; may be replaced. Reports are applied in any case.

    Example
    -------
    >>> from gorgo.core.messages.kv_events import CacheSnapshot
    >>> feeds = KvFeeds(max_blocks=1000)
    >>> feeds.set_replicas([0, 1])
    >>> feeds.replace(1, CacheSnapshot("m", 16, [7, 8]), now=0.0)
    >>> request = RouteRequest("r", 0.0, 48, b"", 64.0, 0, model="m", kv_hashes={16: [7, 8, 9]})
    >>> matched = np.array([10.0, 0.0])  # by the history
    >>> feeds.match(request, matched, now=1.0)
    FeedMatch(sources=array([0, 2], dtype=int8), blocks=array([0., 2.]))
    >>> matched
    array([10., 32.])
    """

    def __init__(self, *, max_blocks: int, used: bool = True) -> None:
        super().__init__(max_blocks=max_blocks)
        self.used = used
        self._speculations = SpeculationQueue()

    @property
    def counted(self) -> bool:
        """Return whether decisions depend on a feed."""
        return self.used and bool(self._table)

    # -- prompts

    def match(self, request: RouteRequest, matched: NDArray[np.float64], *, now: float) -> FeedMatch | None:
        """Replace the cached tokens by the history with those of feeds, where a replica has one for this request.

        Return `None` where the history counts for all.
        """
        self._speculations.expire(now=now)
        match = None
        tokens = complete = np.zeros(0)
        for key, index in self._table.indexes.items():
            hashes = request.kv_hashes.get(index.block_tokens)
            if hashes is None or not serves(key[0], request.model):
                continue
            if match is None:
                match = FeedMatch(np.full(len(matched), HISTORY, dtype=np.int8), np.zeros(len(matched)))
                tokens, complete = np.full(len(matched), -1.0), np.zeros(len(matched))
            rows, found = self._table.rows_of(key), index.match_blocks(hashes, len(matched))
            complete[rows.slots] += rows.complete
            better = found.tokens[rows.slots] > tokens[rows.slots]
            slots = rows.slots[better]
            tokens[slots], match.blocks[slots] = found.tokens[slots], found.blocks[slots]
            match.sources[slots] = rows.sources[better]
        if match is not None:
            reported = tokens >= np.where(complete, 0.0, matched)
            np.copyto(matched, tokens, where=reported)
            match.sources[~reported] = HISTORY
        return match

    def speculate(self, slot: int, request: RouteRequest, *, found_blocks: int, expires_s: float) -> Speculation | None:
        """Count a dispatched prompt on its replica until it is reported; `None` without a feed for it.

        `found_blocks` are its leading blocks there. They are reported, or speculated for an earlier prompt.
        """
        feed = self._feed_for(slot, request)
        if feed is None:
            return None
        hashes = request.kv_hashes[feed.index.block_tokens][found_blocks:]
        prompt = Speculation(feed.index.speculated, slot, hashes, expires_s)
        self._speculations.add(prompt)
        return prompt

    def withdraw(self, prompt: Speculation) -> None:
        """Stop counting a dispatched prompt: its attempt ended without a first token."""
        self._speculations.withdraw(prompt)

    def confirm(self, slot: int, request: RouteRequest, *, now: float) -> None:
        """Record that a replica has prefilled a prompt: it counts until the next snapshot. Events say so themselves."""
        feed = self._feed_for(slot, request)
        if feed is not None and feed.source == "push":
            index, hashes = feed.index, request.kv_hashes[feed.index.block_tokens]
            index.pushed.confirm(slot, hashes, limit=index.max_blocks_per_replica, now=now)
            index.speculated.confirm_all(slot, hashes)

    # -- reads

    def block_sizes(self, slots: Iterable[int], model: str | None) -> frozenset[int]:
        """Return the block sizes of the feeds of some replicas for a model."""
        return frozenset(
            feed.index.block_tokens
            for slot in slots
            for feed in self._table.of(slot).values()
            if serves(feed.model, model)
        )

    def newest(self, slot: int) -> Feed | None:
        """Return the feed of a replica with the newest report."""
        return max(self._table.of(slot).values(), key=lambda feed: feed.newest_s, default=None)

    def blocks(self, slot: int) -> int:
        """Return the blocks that a replica reports, of all its models."""
        return sum(feed.index.blocks(slot) for feed in self._table.of(slot).values())

    def speculated_blocks(self, slot: int, *, now: float) -> int:
        """Return the blocks that count on a replica and have not been reported."""
        self._speculations.expire(now=now)
        return sum(feed.index.speculated.blocks_of(slot) for feed in self._table.of(slot).values())

    def check(self) -> None:
        """Assert every invariant; visits every block."""
        self._table.check()
        self._speculations.check()

    # -- helpers

    def _feed_for(self, slot: int, request: RouteRequest) -> Feed | None:
        """Return the feed of a replica that a request's blocks come under: that of its own model, else of all."""
        feeds = self._table.of(slot)
        feed = feeds.get(request.model) or feeds.get(None)
        return feed if feed is not None and feed.index.block_tokens in request.kv_hashes else None
