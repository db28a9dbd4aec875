"""What the engines of a run report of their caches to the Router, by the kind chosen.

Owns the feeds of all replicas and the own hashes of requests. `events` and `push` have one replica's feed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from gorgo.core.messages.actions import Action
from gorgo.core.messages.kv_events import CacheEvictions, CacheSnapshot, KvEventBatch
from gorgo.core.messages.request import Outcome
from gorgo.core.router import Router
from gorgo.sim.event_queue import EventQueue
from gorgo.sim.kv_events.events import EventFeed
from gorgo.sim.kv_events.path import ReportPath
from gorgo.sim.kv_events.push import SNAPSHOT_S, PushFeed
from gorgo.sim.kv_events.tokens import BlockTokens
from gorgo.sim.network.links import RandomTable, TripDelays
from gorgo.sim.remote_replica import RemoteReplica

#: `none`: nothing. `usage`: the cached tokens of each completed request. The others add to that: `push` full sets and
#: evictions, `events` KV events, `exact` KV events without any delay.
CacheReports = Literal["none", "usage", "push", "events", "exact"]
#: First row of the random table for reports; those of requests and probes are below.
_REPORTS_KEY = 1 << 41
_ITEM_BYTES = 8


class KvFeed(Protocol):
    """Reports of one replica."""

    path: ReportPath

    def rejoin(self) -> None:
        """Report to a router that has started again."""


class CacheReporting:
    """The feeds of a run.

    Parameters
    ----------
    kind:
        What is reported.
    kernel, router, carry_out:
        Event queue, receiver, and what does the Router's actions.
    sites:
        The replicas; their engines have not started.
    draws, item_tokens:
        As in `RemoteReplica`.
    """

    def __init__(
        self,
        kind: CacheReports,
        kernel: EventQueue,
        router: Router,
        carry_out: Callable[[Sequence[Action]], None],
        sites: Sequence[RemoteReplica],
        *,
        draws: RandomTable,
        item_tokens: int,
    ) -> None:
        self._kind = kind
        self._kernel = kernel
        self._router = router
        self._carry_out = carry_out
        self.feeds: dict[str, KvFeed] = {}
        self._tokens: dict[int, BlockTokens] = {}
        for number, site in enumerate(sites if kind in ("push", "events", "exact") else ()):
            block_tokens = site.model.cache.event_tokens
            tokens = self._tokens.setdefault(
                block_tokens, BlockTokens(item_bytes=_ITEM_BYTES, item_tokens=item_tokens, block_tokens=block_tokens)
            )
            path = ReportPath(kernel, site, TripDelays(draws, _REPORTS_KEY + number), instant=kind == "exact")
            feed: EventFeed | PushFeed
            if kind == "push":
                # Reporters start apart from one another.
                feed = PushFeed(site.name, path, tokens, self, first_s=SNAPSHOT_S * number / len(sites))
            else:
                feed = EventFeed(site.name, path, tokens, self)
            site.report_to(feed)
            self.feeds[site.name] = feed

    def hashes(self, blocks: bytes) -> Mapping[int, Sequence[int]]:
        """Return the own hashes of a prompt by the block sizes in use; none without events and pushes."""
        return {size: tokens.hashes(blocks) for size, tokens in self._tokens.items()}

    def reported(self, outcome: Outcome) -> Outcome:
        """Return an outcome as the Router receives it."""
        return replace(outcome, cached_tokens=None) if self._kind == "none" else outcome

    def restart_router(self) -> None:
        """Empty the Router's index of every replica, as after a restart; requests go on."""
        self._router.caches.flush(now=self._kernel.now)
        for feed in self.feeds.values():
            feed.rejoin()

    # -- what arrives

    def on_kv_events(self, replica: str, batch: KvEventBatch, *, block_tokens: int, complete: bool) -> None:
        self._carry_out(
            self._router.caches.on_kv_events(
                replica, batch, model=None, block_tokens=block_tokens, complete=complete, now=self._kernel.now
            )
        )

    def on_kv_lost(self, replica: str) -> None:
        self._carry_out(self._router.caches.on_kv_lost(replica, now=self._kernel.now))

    def on_cache_snapshot(self, replica: str, snapshot: CacheSnapshot) -> None:
        self._carry_out(self._router.caches.on_snapshot(replica, snapshot, now=self._kernel.now))

    def on_cache_evictions(self, replica: str, evictions: CacheEvictions) -> None:
        self._carry_out(self._router.caches.on_evictions(replica, evictions, now=self._kernel.now))
