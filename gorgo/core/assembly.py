"""What a Router is made of: the parts, how they know each other, and what is set and read from outside.

Owns the wiring, and what a change of fleet, policy, weights or bounds means for each part. What an event of a request,
a probe or time means, and in which order, is `router`'s, which builds on this; what each part does is its own.

Theory of operation: the parts share one fleet, one ledger and one prefix index, and whoever has to know who may serve
a request asks `_eligible`. A change counts from the next event on and moves no request that is in flight; what may have
opened a replica stirs the front door, so that the next event looks at those who wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gorgo.core.admission.controller import AdmissionController
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.hedging import Hedger
from gorgo.core.dispatch.in_flight import InFlightTable, RequestState
from gorgo.core.dispatch.lifecycle import RequestLifecycle
from gorgo.core.dispatch.prefix_updates import PrefixUpdater
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.region_outage import RegionOutages
from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.slow_start import SlowStart
from gorgo.core.fleet.snapshot import ReplicaSnapshot, snapshot_replica
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import RouteRequest
from gorgo.core.messages.samples import SampleRing
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.shadow import required_index, validate_shadow
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.quotas import ClientQuotas, QuotaExceeded

_DEFAULTS = RouterLimits()


class Assembly:
    """The Router without its events. Parameters as there."""

    def __init__(
        self,
        replicas: Sequence[ReplicaSpec],
        policy: Policy,
        *,
        rng: np.random.Generator,
        boot_id: str,
        weights: Weights | None = None,
        limits: RouterLimits = _DEFAULTS,
        shadow: Policy | None = None,
    ) -> None:
        if shadow is not None:
            validate_shadow(policy, shadow)
        self.limits = limits
        self.boot_id = boot_id
        self.index = PrefixIndex(
            max_blocks=limits.max_index_blocks, bounded=required_index(policy, shadow) == "bounded"
        )
        self.samples = SampleRing(boot_id, limits.max_samples)
        self._fleet = Fleet(
            stale_after_s=limits.stale_after_s,
            rtt_ewma_alpha=limits.rtt_ewma_alpha,
            panic_threshold=limits.panic_threshold,
            ejection=limits.outlier,
        )
        self._in_flight_table = InFlightTable(self._fleet)
        self._prefix_updater = PrefixUpdater(self.index, self._fleet, block_tokens=limits.block_tokens)
        self._dispatcher = Dispatcher(
            self._fleet,
            self._in_flight_table,
            self.index,
            policy=policy,
            weights=Weights.of(policy.weight_specs, version=1) if weights is None else weights,
            rng=rng,
            shadow=shadow,
            decisions_kept=limits.max_decisions,
        )
        self._admission = AdmissionController(self._fleet, self._dispatcher, self._eligible, limits.overload)
        self._hedger = Hedger(
            self._dispatcher,
            self._admission.saturation,
            self._eligible,
            limits.hedging,
            max_attempts=limits.max_attempts,
        )
        self._slow_start = SlowStart(self._fleet, ramp_s=limits.slow_start_s)
        self._regions = RegionOutages(self._fleet, window_s=limits.region_window_s)
        self._quotas = ClientQuotas(limits.clients)
        self._lifecycle = RequestLifecycle(
            self._fleet,
            self._dispatcher,
            self._prefix_updater,
            self._slow_start,
            self._quotas,
            self.samples,
            self._elsewhere,
            limits,
        )
        self._prefix_updater.on_fleet_change(self._fleet.replace(replicas))

    # -- what an operator or a tuner sets

    def set_weights(self, weights: Weights, *, now: float) -> None:
        """Use `weights` from the next decision on. The caller has checked and versioned them (`Weights.changed`)."""
        assert set(weights) == {spec.name for spec in self.policy.weight_specs}
        self._dispatcher.weights = weights

    def set_policy(self, policy: Policy, weights: Weights, *, now: float) -> None:
        """Route by another policy from the next decision on; requests in flight are not moved.

        Raises `ConfigError` if it and the shadow policy read different prefix indexes, and changes nothing.
        """
        bounded = required_index(policy, self.shadow) == "bounded"
        self._dispatcher.policy = policy
        self.set_weights(weights, now=now)
        self.index.bounded = bounded
        self._admission.needs_drain = True

    def set_shadow(self, policy: Policy | None, *, now: float) -> None:
        """Have another policy score decisions from the next one on, or none. Raises as the constructor does."""
        if policy is not None:
            validate_shadow(self.policy, policy)
        self._dispatcher.set_shadow(policy)
        self.index.bounded = required_index(self.policy, policy) == "bounded"

    def set_fleet(self, replicas: Sequence[ReplicaSpec], *, now: float) -> None:
        """Who stays keeps load, health and index; who leaves loses its entries, and its open attempts may finish."""
        cold = bool(self._fleet.replicas)
        change = self._fleet.replace(replicas)
        self._prefix_updater.on_fleet_change(change)
        self._regions.on_fleet_change()
        for member in change.joined if cold else ():
            self._slow_start.begin(member, now=now)
        self._admission.needs_drain = True

    def set_limits(self, limits: RouterLimits, *, now: float) -> None:
        """Other bounds from the next event on; how many decisions and samples are kept stays as it was."""
        self.limits = limits
        self._fleet.set_limits(
            stale_after_s=limits.stale_after_s,
            rtt_ewma_alpha=limits.rtt_ewma_alpha,
            panic_threshold=limits.panic_threshold,
            ejection=limits.outlier,
        )
        self._admission.set_limits(limits.overload)
        self._hedger.set_limits(limits.hedging, max_attempts=limits.max_attempts)
        self._lifecycle.set_limits(limits)
        self._slow_start.ramp_s = limits.slow_start_s
        self._regions.window_s = limits.region_window_s
        self._quotas.set_rules(limits.clients)
        self.index.resize(limits.max_index_blocks)
        self._prefix_updater.block_tokens = limits.block_tokens
        self._prefix_updater.resize_all()

    def drain(self, replica: str, draining: bool = True, *, now: float) -> None:
        """Send nothing new there (or again). Raises `UnknownReplica`."""
        self._fleet.drain(replica, draining, now=now)
        self._admission.needs_drain = True

    def flush(self, replica: str | None = None, *, now: float) -> None:
        """Forget what is believed cached, on one replica or all. Raises `UnknownReplica`."""
        self.index.flush(None if replica is None else self._fleet.member(replica).slot)

    # -- what can be read

    @property
    def policy(self) -> Policy:
        """What routes."""
        return self._dispatcher.policy

    @property
    def weights(self) -> Weights:
        """By which values."""
        return self._dispatcher.weights

    @property
    def shadow(self) -> Policy | None:
        """The policy that scores without a say, if there is one."""
        return self._dispatcher.shadow

    def fleet_view(self, *, now: float) -> list[ReplicaSnapshot]:
        """A row per replica, in the order in which they joined."""
        return [self._view(member, now) for member in self._fleet.replicas.values()]

    def quota_error(self, client: str, *, coming: int) -> QuotaExceeded | None:
        """Why `client` may not ask for one more at a time; `coming` are on their way and have not been submitted."""
        return self._quotas.check(client, coming=coming)

    def health_states(self) -> dict[str, str]:
        """`healthy`, `ejected` or `half_open` per replica; cheaper than the whole view."""
        return {name: member.health.state.value for name, member in self._fleet.replicas.items()}

    def restarts_of(self, replica: str) -> int:
        """How often its engine was seen to have started again; 0 for one that is not in the fleet."""
        member = self._fleet.replicas.get(replica)
        return 0 if member is None else member.restarts.count

    @property
    def unreachable_regions(self) -> frozenset[str]:
        """Regions of which no replica answers a probe."""
        return self._regions.unreachable

    def decisions(self, request_id: str) -> list[Decision]:
        """Decisions made for a request, first attempt first; empty when they are no longer kept."""
        return self._dispatcher.decisions(request_id)

    def newest_decisions(self, limit: int) -> list[Decision]:
        """The last decisions, whatever for, newest first."""
        return self._dispatcher.newest_decisions(limit)

    def check(self) -> None:
        """Assert every invariant of index, ledger and clocks; visits all of them."""
        self.index.check()
        self._in_flight_table.check()

    # -- helpers

    def _eligible(self, request: RouteRequest, now: float) -> CandidateSet:
        """Who may serve it now; nobody for one whose replica has left, or is where it may not be served."""
        everyone = self._fleet.eligibility
        if request.pinned_replica is None:
            return self._slow_start.exclude_full(everyone.for_model(request.model, request.regions), now=now)
        pinned = self._fleet.replicas.get(request.pinned_replica)
        # It may have moved to another region while the request waited.
        if pinned is None or (request.regions is not None and pinned.spec.region not in request.regions):
            return everyone.none
        return everyone.pinned(pinned)

    def _elsewhere(self, state: RequestState, now: float) -> CandidateSet:
        """Who may serve a request now that has not had it yet; for a pinned one nobody else can."""
        everyone, request = self._fleet.eligibility, state.request
        if request.pinned_replica is not None:
            return everyone.none
        # Eased last: who is at its bound is left out beside others that can take the request, not beside those tried.
        return self._slow_start.exclude_full(
            everyone.for_model(request.model, request.regions).excluding(state.tried_replicas), now=now
        )

    def _view(self, member: Replica, now: float) -> ReplicaSnapshot:
        blocks = self.index.resident_blocks(member.slot)
        return snapshot_replica(
            self._fleet,
            self._slow_start,
            member,
            index_blocks=blocks,
            block_tokens=self.limits.block_tokens,
            now=now,
        )
