"""A Router among others of one fleet: joining them, and the report of this one.

Owns how its parts are connected to the exchange (`core.peers`). A Router that has not joined decides as if alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gorgo.core.fleet.outlier import HealthState
from gorgo.core.peers.exchange import PeerExchange
from gorgo.core.peers.records import PeerReport, PeerStatus
from gorgo.core.prefix.origin import Origin
from gorgo.core.router_caches import RouterCaches


class RouterPeers(RouterCaches):
    """A Router's side of the exchange with its peers. Parameters as in `RouterState`."""

    def join_peers(self, name: str, *, key_id: str) -> PeerExchange:
        """Count what other routers of the fleet report from now on, and collect what this one reports.

        `name` is unique in the group and for this run; `key_id` names the group's fingerprint key.
        """
        assert self.peers is None, "a Router joins its peers once"
        updater = self._parts.prefix_updater
        self.peers = peers = PeerExchange(
            name,
            key_id=key_id,
            fleet=self._fleet,
            table=self._table,
            found_shares=self._parts.found_shares,
            answers=updater.answers,
            index=self.index,
            capacity_of=updater.capacity_blocks,
            policy=lambda: self.policy,
            status=self._peer_status,
        )
        self._fleet.peers, updater.observer = peers.loads, peers.observer
        self._dispatcher.raise_matches, self._dispatcher.on_sent = peers.prefixes.raise_matches, peers.observer.on_sent
        return peers

    def report(self, *, now: float) -> PeerReport:
        """Return what peers need to know: the present load, and what happened since the last report."""
        assert self.peers is not None, "a Router without peers reports to none"
        return self.peers.report(now=now)

    def evicted_prefixes(self) -> Mapping[Origin, int]:
        """Return what was evicted so far of what is known of caches, by origin.

        Of engines (`PUSH`) these are reported blocks, of routers marks of prefixes and routes of the policy.
        """
        counts: Counter[Origin] = Counter() if self.peers is None else self.peers.evicted()
        counts[Origin.PUSH] += self._parts.feeds.evicted
        return counts

    def _peer_status(self) -> PeerStatus:
        replicas = self._fleet.replicas.items()
        return PeerStatus(
            self.policy.name,
            self.weights.version,
            self.frozen,
            self.model_digest,
            tuple(name for name, replica in replicas if replica.draining),
            tuple(name for name, replica in replicas if replica.health.state is HealthState.EJECTED),
        )
