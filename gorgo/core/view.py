"""What operators, metrics and handlers read of a Router: replicas, models, health, and the newest decisions."""

from __future__ import annotations

from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.poison import PoisonPrompt, PoisonPrompts
from gorgo.core.dispatch.prefix_updates import PrefixUpdater
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.region_outage import RegionOutages
from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.request_filter import SlowStart
from gorgo.core.fleet.snapshot import ReplicaSnapshot, snapshot_replica
from gorgo.core.messages.decision import Decision
from gorgo.core.prefix.found_share import FoundShares
from gorgo.core.prefix.index import PrefixIndex


class RouterView:
    """Reads of a Router; none of them changes anything.

    Parameters
    ----------
    fleet, slow_start, regions:
        The Router's replicas, with their ramps and the regions that are cut off.
    index, found_shares, prefix_updater:
        What is known of their caches.
    dispatcher:
        Has the retained decisions.
    poison:
        Has the prompts that replicas went down under.
    """

    def __init__(
        self,
        fleet: Fleet,
        slow_start: SlowStart,
        regions: RegionOutages,
        index: PrefixIndex,
        found_shares: FoundShares,
        prefix_updater: PrefixUpdater,
        dispatcher: Dispatcher,
        poison: PoisonPrompts,
    ) -> None:
        self._fleet = fleet
        self._slow_start = slow_start
        self._regions = regions
        self._index = index
        self._found_shares = found_shares
        self._prefix_updater = prefix_updater
        self._dispatcher = dispatcher
        self._poison = poison

    def snapshots(self, *, now: float) -> list[ReplicaSnapshot]:
        """Return a row per replica, in the order in which they joined."""
        return [self._snapshot(replica, now) for replica in self._fleet.replicas.values()]

    def health_states(self) -> dict[str, str]:
        """Return `healthy`, `ejected` or `half_open` per replica; cheaper than the whole view."""
        return {name: replica.health.state.value for name, replica in self._fleet.replicas.items()}

    def draining(self) -> frozenset[str]:
        """Return the names of the draining replicas; cheaper than the whole view."""
        return frozenset(name for name, replica in self._fleet.replicas.items() if replica.draining)

    @property
    def unreachable_regions(self) -> frozenset[str]:
        """Regions in which no replica answers a probe."""
        return self._regions.unreachable

    def lists(self, model: str | None) -> bool:
        """Return whether some replica serves `model` by name."""
        return self._fleet.eligibility.lists(model)

    def models(self) -> dict[str, frozenset[str]]:
        """Return the models that replicas list, and the regions in which each is served."""
        return self._fleet.eligibility.regions_of_models()

    def poison_prompts(self, *, now: float) -> list[PoisonPrompt]:
        """Return the prompts that no replica is sent, because replicas went down under them."""
        return self._poison.all(now=now)

    def decisions(self, request_id: str) -> list[Decision]:
        """Return the retained decisions for a request, first attempt first."""
        return self._dispatcher.decisions(request_id)

    def newest_decisions(self, limit: int) -> list[Decision]:
        """Return the last decisions, newest first."""
        return self._dispatcher.newest_decisions(limit)

    def _snapshot(self, replica: Replica, now: float) -> ReplicaSnapshot:
        return snapshot_replica(
            self._fleet,
            self._slow_start,
            replica,
            index_blocks=self._index.resident_blocks(replica.slot),
            block_tokens=self._prefix_updater.block_tokens,
            found_share=self._found_shares.recent(replica.slot),
            now=now,
        )
