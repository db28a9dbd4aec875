"""Events of a Router that are no request's: probes, scrapes, connections and models of replicas, and reports of peers.

Owns what each of them sets off, and the dispatch of queued requests after it.
"""

from __future__ import annotations

from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.fleet.network import record_connection
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, Reject
from gorgo.core.messages.events import ReplicaRestarted
from gorgo.core.messages.request import EngineSample, OpenConnection
from gorgo.core.peers.records import PeerReport
from gorgo.core.router_peers import RouterPeers
from gorgo.core.wiring import RouterParts


class RouterReplicas(RouterPeers):
    """A Router's events of replicas and peers. Parameters as in `RouterState`."""

    def __init__(self, parts: RouterParts, *, boot_id: str, limits: RouterLimits) -> None:
        super().__init__(parts, boot_id=boot_id, limits=limits)
        self._queued = parts.admission.queue.requests
        #: Time of the last event.
        self._now = float("-inf")

    def on_probe(self, replica: str, rtt_s: float | None, *, now: float, refusal: int | None = None) -> list[Action]:
        """Record a probe's round trip, `None` if it failed; `refusal` is the 4xx of a failed one.

        A replica that has left is ignored.
        """
        self._now = now
        member = self._fleet.replicas.get(replica)
        if member is not None:
            member.probe_refusal = refusal
            self._fleet.probed(member, rtt_s, now=now)
            if rtt_s is None:
                self._parts.regions.probe_failed(member, now=now)
            else:
                self._parts.regions.probe_succeeded(member, now=now)
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
                self._flush_slot(member.slot)
                self._parts.feeds.restarted(member.slot)
                self.fleet_events.append(ReplicaRestarted(replica, member.spec.region))
            self._parts.feeds.scraped(member.slot)
            self._parts.prefix_updater.resize(member)
        return []

    def on_models(self, replica: str, models: tuple[str, ...], *, now: float) -> list[Action]:
        """Record the models that an engine lists. A replica that has left is ignored."""
        self._now = now
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._fleet.list_models(member, models)
            self._admission.needs_drain = True
        return self._drain_queue(now)

    def on_peer(self, report: PeerReport, *, now: float, age_s: float = 0.0) -> list[Action]:
        """Take in another router's report, written `age_s` ago; an old one is a source of prefixes alone.

        Replicas that it has ejected are in `PeerExchange.probe_hints`. A report that is not newer changes nothing.
        """
        assert self.peers is not None, "a Router without peers hears of none"
        self._now = now
        return self._drain_queue(now) if self.peers.on_report(report, now=now, age_s=age_s) else []

    # -- helpers

    def _drain_queue(self, now: float) -> list[Action]:
        """Dispatch or reject queued requests: a replica may have capacity again."""
        if not self._queued:
            return []
        actions: list[Action] = []
        for state, action in self._admission.drain_queue(now=now):
            if isinstance(action, Reject):
                self._release_quota(state)
            actions.append(action)
        return actions

    def _release_quota(self, state: RequestState) -> None:
        """Release the client's quota of a request that was not dispatched."""
        if state.has_quota:
            self._quotas.release(state.request.client, tokens=state.request.prompt_tokens)
