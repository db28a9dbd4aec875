"""What of a Router is set and read from outside: weights, policy, shadow, fleet and limits; views, decisions, health.

Owns the parts that events work on. Leaves the events to `router`. A setting takes effect with the next event and moves
no request that is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.snapshot import ReplicaSnapshot, snapshot_replica
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.decision import Decision
from gorgo.core.peers.exchange import PeerExchange
from gorgo.core.policy.interface import IndexKind, Policy
from gorgo.core.policy.shadow import required_index, validate_shadow
from gorgo.core.policy.weights import Weights
from gorgo.core.prompt.token_ratio import BytesPerToken
from gorgo.core.quotas import QuotaExceeded
from gorgo.core.training.learner import Learner, find_learner
from gorgo.core.training.model import Model
from gorgo.core.training.outcomes import OutcomeRing
from gorgo.core.training.recorder import OutcomeRecorder
from gorgo.core.wiring import RouterParts


class RouterState:
    """The parts of a Router with their settings and views.

    Parameters
    ----------
    parts:
        Built by `wiring`.
    boot_id, limits:
        As in `Router`.
    """

    def __init__(self, parts: RouterParts, *, boot_id: str, limits: RouterLimits) -> None:
        self.limits = limits
        self.boot_id = boot_id
        self.index = parts.index
        self.samples = parts.samples
        self._parts = parts
        #: Changes of the fleet, for the shell to take after each event; bounded.
        self.fleet_events = parts.fleet.events
        self._fleet = parts.fleet
        self._table = parts.table
        self._admission = parts.admission
        self._dispatcher = parts.dispatcher
        self._quotas = parts.quotas
        self._learning = parts.learning
        #: Whether weights are frozen: no model is trained or adopted meanwhile.
        self.frozen = False
        self._count_progress()
        #: Exchange with other routers of the fleet; `None` until it has joined them.
        self.peers: PeerExchange | None = None
        #: Learned from the usage of responses; the shell estimates prompt tokens by it.
        self.token_ratios = BytesPerToken()

    # -- settings

    def set_weights(self, weights: Weights, *, now: float) -> None:
        """Use `weights` from the next decision on. The caller has checked and versioned them (`Weights.changed`)."""
        assert set(weights) == {spec.name for spec in self.policy.weight_specs}
        self._dispatcher.weights = weights

    def set_policy(self, policy: Policy, weights: Weights, *, now: float) -> None:
        """Route by another policy from the next decision on; requests in flight are not moved.

        Raises `ConfigError` if it and the shadow policy read different prefix indexes or both learn, and changes
        nothing. A policy that learns starts without a model.
        """
        kind = required_index(policy, self.shadow)
        self._learning.set_policies(policy, self.shadow)
        self._count_progress()
        self._dispatcher.policy = policy
        self.set_weights(weights, now=now)
        self._use_index(kind)
        self._admission.needs_drain = True

    def validate_policy(self, policy: Policy) -> None:
        """Raise `ConfigError` if `policy` cannot route beside the shadow policy in force."""
        required_index(policy, self.shadow)
        find_learner(policy, self.shadow)

    def set_shadow(self, policy: Policy | None, *, now: float) -> None:
        """Score decisions by another shadow policy, or by none. Raises as the constructor does."""
        if policy is not None:
            validate_shadow(self.policy, policy)
        self._learning.set_policies(self.policy, policy)
        self._count_progress()
        self._dispatcher.set_shadow(policy)
        self._use_index(required_index(self.policy, policy))

    def adopt(self, model: Model | None) -> None:
        """Let the policy or shadow that learns choose by `model` from the next decision on, or without one.

        Raises `ConfigError`, and changes nothing, if neither learns or the model has other features.
        """
        self._learning.adopt(model)

    def record_outcomes(self, recorder: OutcomeRecorder | None) -> None:
        """Pass each attempt that is dispatched from now on to a log when it ends, or none."""
        self._learning.recorder = recorder
        self._count_progress()

    def set_fleet(self, replicas: Sequence[ReplicaSpec], *, now: float) -> None:
        """Replace the fleet. A replica that stays keeps load, health and index; one that leaves may finish attempts."""
        was_empty = not self._fleet.replicas
        change = self._fleet.replace(replicas)
        self._parts.prefix_updater.on_fleet_change(change)
        self._table.on_fleet_change(change)
        if self.peers is not None:
            self.peers.on_fleet_change(change)
        self._parts.regions.on_fleet_change()
        self._parts.busy.on_fleet_change()
        self._parts.refused_kinds.on_fleet_change()
        self._parts.short_answers.on_fleet_change()
        for replica in () if was_empty else change.joined:
            self._parts.slow_start.begin(replica, now=now)
        self._admission.needs_drain = True

    def set_limits(self, limits: RouterLimits, *, now: float) -> None:
        """Replace the limits; the number of retained decisions and samples stays."""
        self.limits = limits
        self._parts.set_limits(limits)

    def drain(self, replica: str, draining: bool = True, *, now: float) -> None:
        """Dispatch no new request to a replica, or allow it again. Raises `UnknownReplica`."""
        self._fleet.drain(replica, draining, now=now)
        self._admission.needs_drain = True

    def flush(self, replica: str | None = None, *, now: float) -> None:
        """Empty the prefix index of one replica or of all. Raises `UnknownReplica`."""
        members = self._fleet.replicas.values() if replica is None else (self._fleet.member(replica),)
        for member in members:
            self._flush_slot(member.slot)
            self._parts.feeds.flush(member.slot)

    # -- reads

    @property
    def policy(self) -> Policy:
        """The policy that chooses."""
        return self._dispatcher.policy

    @property
    def weights(self) -> Weights:
        """The weights of the next decision."""
        return self._dispatcher.weights

    @property
    def shadow(self) -> Policy | None:
        """The policy that scores decisions and makes none."""
        return self._dispatcher.shadow

    @property
    def learner(self) -> Learner | None:
        """The policy or shadow that learns."""
        return self._learning.learner

    @property
    def outcomes(self) -> OutcomeRing | None:
        """Outcomes of the learner's decisions, a new ring for each learner; `None` without one."""
        return self._learning.outcomes

    @property
    def model_version(self) -> int | None:
        """The version of the learner's model; `None` without one."""
        return self._learning.model_version

    @property
    def model_digest(self) -> str | None:
        """Return the digest of the learned policy's model; `None` without one."""
        return self._learning.model_digest

    def lists(self, model: str | None) -> bool:
        """Return whether some replica serves `model` by name."""
        return self._fleet.eligibility.lists(model)

    def fleet_view(self, *, now: float) -> list[ReplicaSnapshot]:
        """Return a row per replica, in the order in which they joined."""
        return [self._snapshot(replica, now) for replica in self._fleet.replicas.values()]

    def models(self) -> dict[str, frozenset[str]]:
        """Return the models that replicas list, and the regions in which each is served."""
        return self._fleet.eligibility.regions_of_models()

    def count_request(self, client: str | None, *, now: float) -> QuotaExceeded | None:
        """Count a request that the proxy answers itself against the rates of `client`; return the one it exceeds."""
        return self._quotas.count(client, now=now)

    def quota_error(self, client: str, *, coming: int) -> QuotaExceeded | None:
        """Return why `client` may not have one more request open; `coming` have not been submitted yet."""
        return self._quotas.check(client, coming=coming)

    def draining(self) -> frozenset[str]:
        """Return the names of the draining replicas; cheaper than the whole view."""
        return frozenset(name for name, replica in self._fleet.replicas.items() if replica.draining)

    def health_states(self) -> dict[str, str]:
        """Return `healthy`, `ejected` or `half_open` per replica; cheaper than the whole view."""
        return {name: replica.health.state.value for name, replica in self._fleet.replicas.items()}

    @property
    def unreachable_regions(self) -> frozenset[str]:
        """Regions in which no replica answers a probe."""
        return self._parts.regions.unreachable

    def decisions(self, request_id: str) -> list[Decision]:
        """Return the retained decisions for a request, first attempt first."""
        return self._dispatcher.decisions(request_id)

    def newest_decisions(self, limit: int) -> list[Decision]:
        """Return the last decisions, newest first."""
        return self._dispatcher.newest_decisions(limit)

    def check(self) -> None:
        """Assert every invariant of the indexes, in-flight table, prefill queues and outcomes; visits all."""
        self.index.check()
        self._parts.feeds.check()
        self._table.check()
        if self.outcomes is not None:
            self.outcomes.check()
        if self.peers is not None:
            self.peers.check()

    def _flush_slot(self, slot: int) -> None:
        self.index.flush(slot)
        if self.peers is not None:
            self.peers.prefixes.flush(slot)

    def _use_index(self, kind: IndexKind) -> None:
        self.index.bounded = kind != "published"
        self._parts.feeds.used = kind == "events"

    def _count_progress(self) -> None:
        self._table.count_progress(self._learning.reads_progress)

    def _snapshot(self, replica: Replica, now: float) -> ReplicaSnapshot:
        return snapshot_replica(
            self._fleet,
            self._parts.slow_start,
            replica,
            index_blocks=self.index.resident_blocks(replica.slot),
            block_tokens=self.limits.block_tokens,
            found_share=self._parts.found_shares.recent(replica.slot),
            now=now,
        )
