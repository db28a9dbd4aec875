"""A Router among others of one fleet: joining them, its own reports, and those of the others.

Owns how the Router's parts are connected to the exchange (`peers.exchange`). A Router that has not joined decides as if
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.in_flight import InFlightTable
from gorgo.core.dispatch.prefix_updates import PrefixUpdater
from gorgo.core.fleet.fleet import Fleet, FleetChange
from gorgo.core.messages.actions import Action
from gorgo.core.peers.exchange import PeerExchange
from gorgo.core.peers.records import PeerReport, PeerStatus
from gorgo.core.prefix.index import Origin, PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.prefix.residency import FoundShares


class PeerGroup:
    """A Router's membership in a group of peers.

    Parameters
    ----------
    fleet, table, found_shares, index, feeds, prefix_updater, dispatcher:
        The Router's.
    status:
        The status of now.
    record_time:
        Takes the time of an event that changes nothing.
    drain_queue:
        Dispatches or rejects queued requests, for which a replica may have capacity now, and returns the actions.
    """

    def __init__(
        self,
        fleet: Fleet,
        table: InFlightTable,
        found_shares: FoundShares,
        index: PrefixIndex,
        feeds: KvFeeds,
        prefix_updater: PrefixUpdater,
        dispatcher: Dispatcher,
        *,
        status: Callable[[], PeerStatus],
        record_time: Callable[[float], None],
        drain_queue: Callable[[float], list[Action]],
    ) -> None:
        self._fleet = fleet
        self._table = table
        self._found_shares = found_shares
        self._index = index
        self._feeds = feeds
        self._prefix_updater = prefix_updater
        self._dispatcher = dispatcher
        self._status = status
        self._record_time = record_time
        self._drain_queue = drain_queue
        #: `None` until the Router has joined.
        self.exchange: PeerExchange | None = None

    def join(self, name: str, *, key_id: str) -> PeerExchange:
        """Count what other routers of the fleet report from now on, and collect what this one reports.

        `name` is unique in the group and for this run; `key_id` names the group's fingerprint key.
        """
        assert self.exchange is None, "a Router joins its peers once"
        updater, dispatcher = self._prefix_updater, self._dispatcher
        self.exchange = exchange = PeerExchange(
            name,
            key_id=key_id,
            fleet=self._fleet,
            table=self._table,
            found_shares=self._found_shares,
            answers=updater.answers,
            index=self._index,
            capacity_of=updater.capacity_blocks,
            policy=lambda: dispatcher.policy,
            status=self._status,
        )
        self._fleet.peers, updater.observer = exchange.loads, exchange.observer
        updater.group_blocks = exchange.prefixes.blocks_of
        dispatcher.raise_matches, dispatcher.on_sent = exchange.prefixes.raise_matches, exchange.observer.on_sent
        return exchange

    def report(self, *, now: float) -> PeerReport:
        """Return what peers need to know: the present load, and what happened since the last report."""
        assert self.exchange is not None, "a Router without peers reports to none"
        return self.exchange.report(now=now)

    def on_report(self, report: PeerReport, *, now: float, age_s: float = 0.0) -> list[Action]:
        """Take in another router's report, written `age_s` ago; an old one is a source of prefixes alone.

        Replicas that it has ejected are in `exchange.probe_hints`. A report that is not newer changes nothing.
        """
        assert self.exchange is not None, "a Router without peers hears of none"
        if not self.exchange.on_report(report, now=now, age_s=age_s):
            self._record_time(now)
            return []
        return self._drain_queue(now)

    def evicted_prefixes(self) -> Mapping[Origin, int]:
        """Return what was evicted so far of what is known of caches, by origin.

        Of engines (`PUSH`) these are reported blocks, of routers marks of prefixes and routes of the policy.
        """
        counts: Counter[Origin] = Counter() if self.exchange is None else self.exchange.evicted()
        counts[Origin.PUSH] += self._feeds.evicted
        return counts

    def on_fleet_change(self, change: FleetChange) -> None:
        """Forget replicas that have left."""
        if self.exchange is not None:
            self.exchange.on_fleet_change(change)

    def flush(self, slot: int) -> None:
        """Forget the marks of a replica whose cache is empty."""
        if self.exchange is not None:
            self.exchange.prefixes.flush(slot)

    def check(self) -> None:
        """Assert every invariant; visits all marks."""
        if self.exchange is not None:
            self.exchange.check()
