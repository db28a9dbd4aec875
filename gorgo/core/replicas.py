"""What a Router learns of its replicas: the fleet and its changes, probes, scrapes, connections and models.

Owns what each of them sets off in the Router's parts. Their caches are `caches`, the reports of peers `peers.group`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gorgo.core.admission import AdmissionController
from gorgo.core.dispatch.in_flight import InFlightTable
from gorgo.core.dispatch.poison import PoisonPrompts
from gorgo.core.dispatch.prefix_updates import PrefixUpdater
from gorgo.core.fleet.columns import record_connection
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.region_outage import RegionOutages
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.messages.actions import Action, ReplicaRestarted
from gorgo.core.messages.request import EngineSample, OpenConnection
from gorgo.core.peers.group import PeerGroup
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds


class RouterReplicas:
    """Events of a Router's replicas. A report of a replica that has left is ignored.

    Parameters
    ----------
    fleet, table, request_filter, regions, admission, peers:
        The Router's.
    index, feeds, prefix_updater:
        What is known of the replicas' caches: a replica that has restarted has none of it.
    poison:
        Takes replicas that were found down.
    drain_queue:
        Dispatches or rejects queued requests, for which a replica may have capacity now, and returns the actions.
    """

    def __init__(
        self,
        fleet: Fleet,
        table: InFlightTable,
        request_filter: RequestFilter,
        regions: RegionOutages,
        admission: AdmissionController,
        peers: PeerGroup,
        *,
        index: PrefixIndex,
        feeds: KvFeeds,
        prefix_updater: PrefixUpdater,
        poison: PoisonPrompts,
        drain_queue: Callable[[float], list[Action]],
    ) -> None:
        self._fleet = fleet
        self._table = table
        self._filter = request_filter
        self._regions = regions
        self._admission = admission
        self._peers = peers
        self._index = index
        self._feeds = feeds
        self._prefix_updater = prefix_updater
        self._poison = poison
        self._drain_queue = drain_queue

    # -- the fleet

    def set_fleet(self, replicas: Sequence[ReplicaSpec], *, now: float) -> None:
        """Replace the fleet. A replica that stays keeps load, health and index; one that leaves may finish attempts.

        Raises `ConfigError` if two have one name.
        """
        was_empty = not self._fleet.replicas
        change = self._fleet.replace(replicas)
        self._prefix_updater.on_fleet_change(change)
        self._table.on_fleet_change(change)
        self._peers.on_fleet_change(change)
        self._regions.on_fleet_change()
        self._poison.forget_left()
        self._filter.on_fleet_change(() if was_empty else change.joined, now=now)
        self._admission.needs_drain = True

    def drain(self, replica: str, draining: bool = True, *, now: float) -> None:
        """Dispatch no new request to a replica, or allow it again. Raises `UnknownReplica`."""
        self._fleet.drain(replica, draining, now=now)
        self._admission.needs_drain = True

    # -- reports of one

    def on_probe(self, replica: str, rtt_s: float | None, *, now: float, refusal: int | None = None) -> list[Action]:
        """Record a probe's round trip, s, `None` if it failed; `refusal` is the 4xx of a failed one."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            member.probe_refusal = refusal
            self._fleet.probed(member, rtt_s, now=now)
            if rtt_s is None:
                if refusal is None:
                    self._poison.on_down(member, now=now)
                self._regions.probe_failed(member, now=now)
            else:
                self._regions.probe_succeeded(member, now=now)
        return self._drain_queue(now)

    def on_connection(self, replica: str, connection: OpenConnection | None, *, now: float) -> list[Action]:
        """Record the connection of the next request to a replica, `None` if it has to open one.

        Where a shell never reports, every request counts as one round trip.
        """
        member = self._fleet.replicas.get(replica)
        if member is not None:
            record_connection(self._fleet.columns, member.slot, connection)
        return []

    def on_engine_sample(self, replica: str, sample: EngineSample | None, *, now: float) -> list[Action]:
        """Record a scrape, `None` if it failed: the last values then count until they are stale."""
        member = self._fleet.replicas.get(replica)
        if member is not None and sample is not None:
            self._fleet.scraped(member, sample, now=now)
            if member.restarts.observe(sample):
                self._poison.on_down(member, now=now)
                self._index.flush(member.slot)
                self._peers.flush(member.slot)
                self._feeds.restarted(member.slot)
                self._fleet.events.append(ReplicaRestarted(replica, member.spec.region))
            self._feeds.scraped(member.slot)
            self._prefix_updater.resize(member)
        return []

    def on_models(self, replica: str, models: tuple[str, ...], *, now: float) -> list[Action]:
        """Record the models that an engine lists."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._fleet.list_models(member, models)
            self._admission.needs_drain = True
        return self._drain_queue(now)
