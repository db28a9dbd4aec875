"""The Router: events in with `now`, actions out. A synchronous object without sockets, clock or randomness of its own.

Owns the order of work within an event, and what can be set and read from outside. Its parts, built in `wiring`, own
the rest: `admission` what is dispatched, queued or rejected; `dispatch` evaluation, reservation, retries and hedges;
`fleet` replicas and their columns; `prefix` the prefix index; the policy the choice.

Theory of operation: `submit` selects and reserves before it returns, so two requests never see the same empty replica
and no lock is needed. An attempt ends once; later reports about it are ignored. A request ends with its last attempt
and leaves one sample. A dispatched prompt enters the prefix index at once, so that a burst of siblings finds it. The
first token confirms it; an attempt that ends without one retracts it. What is set from outside takes effect with the
next event and moves no request that is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.dispatch.outcomes import (
    model_not_found,
    quota_exceeded,
    region_not_allowed,
    replica_not_found,
    too_many_in_flight,
)
from gorgo.core.fleet.network import record_connection
from gorgo.core.fleet.replica import Replica
from gorgo.core.fleet.snapshot import ReplicaSnapshot, snapshot_replica
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, AdmissionAction, Reject, RetryAction
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.events import ReplicaRestarted
from gorgo.core.messages.request import EngineSample, OpenConnection, Outcome, RouteRequest
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.shadow import required_index, validate_shadow
from gorgo.core.policy.weights import Weights
from gorgo.core.prompt.token_ratio import BytesPerToken
from gorgo.core.quotas import QuotaExceeded
from gorgo.core.wiring import build_parts

_DEFAULTS = RouterLimits()


class Router:
    """Sends each request to the replica that the policy picks, and accounts for it until it ends.

    Parameters
    ----------
    replicas:
        The fleet at the start.
    policy:
        Chooses a replica; the instance belongs to this Router alone.
    rng:
        The only source of randomness.
    boot_id:
        Names this run, for readers of samples.
    weights:
        Start values; the policy's defaults if `None`.
    limits:
        Every bound, with its reason (`core.limits`).
    shadow:
        Scores each decision beside `policy` and changes none (`core.policy.shadow`). Raises `ConfigError` if it has no
        cost, or if the two read different prefix indexes.

    Example
    -------
    >>> import numpy as np
    >>> from gorgo.core.messages.request import AttemptResult
    >>> from gorgo.core.fleet.spec import ReplicaSpec
    >>> from gorgo.policies.registry import make_policy
    >>> replicas = [ReplicaSpec("near", "us-ashburn"), ReplicaSpec("far", "ap-seoul")]
    >>> router = Router(replicas, make_policy("gorgo"), rng=np.random.default_rng(0), boot_id="example")
    >>> router.on_probe("near", 0.002, now=0.0), router.on_probe("far", 0.180, now=0.0)
    ([], [])
    >>> request = RouteRequest("r", 1.0, prompt_tokens=1000, blocks=b"", block_tokens=64.0, prefix_hash=0)
    >>> dispatch, others = router.submit(request, now=1.0)
    >>> dispatch.replica, dispatch.attempt_id, router.in_flight
    ('near', 'r/1', 1)
    >>> router.on_finish("r/1", Outcome(AttemptResult.COMPLETED, status=200), now=2.0), router.in_flight
    ((None, []), 0)
    """

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
        parts = build_parts(replicas, policy, rng=rng, boot_id=boot_id, weights=weights, limits=limits, shadow=shadow)
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
        self._hedger = parts.hedger
        self._lifecycle = parts.lifecycle
        self._quotas = parts.quotas
        #: Learned from the usage of responses; the shell estimates prompt tokens by it.
        self.token_ratios = BytesPerToken()
        #: Time of the last event.
        self._now = float("-inf")

    # -- events of a request

    @property
    def in_flight(self) -> int:
        """Open attempts."""
        return len(self._table)

    @property
    def queued(self) -> int:
        """Requests that wait at the proxy."""
        return len(self._admission.queue)

    def submit(self, request: RouteRequest, *, now: float) -> tuple[AdmissionAction, list[Action]]:
        """Choose a replica and reserve it, or queue the request, or reject it.

        Return the action for this request, and actions for other requests that became due by `now`: those come first.
        """
        others = self._run_timers(now)
        refusal = self._refuse(request, now)
        if refusal is not None:
            return refusal, others
        if self._hedger.on:
            self._hedger.record_request(now=now)
        self._lifecycle.record_request(now=now)
        state = RequestState(request, self._quotas.counts(request.client))
        own = self._admission.admit(state, now=now)
        if isinstance(own, Reject):
            self._release_quota(state)
        return own, others

    def abandon(self, request_id: str, *, now: float) -> list[Action]:
        """Remove a queued request: its client has disconnected. A request that is not queued is ignored."""
        self._now = now
        state = self._admission.cancel(request_id)
        if state is not None:
            self._release_quota(state)
        return []

    def on_first_token(self, attempt_id: str, *, now: float) -> list[Action]:
        """Record the first content of an attempt; a repeated report, or one for an ended attempt, changes nothing.

        Return a Cancel for another attempt of the request, and dispatches that became possible.
        """
        self._now = now
        found = self._table.find(attempt_id)
        ahead = found.replica.prefill_queue.before(attempt_id) if found is not None and self._hedger.on else []
        attempt = self._table.first_token(attempt_id, now=now)
        if attempt is None:
            return []
        if ahead and attempt.state.request.streamed:
            waiting = [other for key in ahead if (other := self._table.find(key)) is not None]
            self._hedger.on_superseded(waiting, now=now)
        return [*self._lifecycle.on_first_token(attempt, now=now), *self._drain_queue(now)]

    def on_finish(self, attempt_id: str, outcome: Outcome, *, now: float) -> tuple[RetryAction | None, list[Action]]:
        """Release the attempt's load, update the replica's health, and retry or close the request.

        Return the request's next Dispatch, or a Reject for a failure that cannot be retried; `None` for any other end
        or while another attempt is open. Then actions for other attempts and requests, to be done after it.
        """
        self._now = now
        attempt = self._table.close(attempt_id, now=now)
        if attempt is None:
            return None, []
        request = attempt.state.request
        if request.text_bytes is not None and outcome.prompt_tokens is not None:
            self.token_ratios.learn(request.model, text_bytes=request.text_bytes, prompt_tokens=outcome.prompt_tokens)
        own, others = self._lifecycle.on_result(attempt, outcome, now=now)
        others += self._drain_queue(now)
        return own, others

    # -- probes, scrapes, connections and time

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
                self.index.flush(member.slot)
                self.fleet_events.append(ReplicaRestarted(replica, member.spec.region))
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

    def next_timer(self) -> float | None:
        """Return when to call `handle_timer`; any event can change it."""
        due_s, hedge_s = self._fleet.next_timer(), self._hedger.next_timer_s()
        if hedge_s is not None and (due_s is None or hedge_s < due_s):
            due_s = hedge_s
        drain_s = self._admission.next_timer_s(now=self._now) if self._admission.queue else None
        return drain_s if drain_s is not None and (due_s is None or drain_s < due_s) else due_s

    def handle_timer(self, *, now: float) -> list[Action]:
        """Expire stale values and back-offs, hedge late requests, drain the queue. Safe to call at any time."""
        self._now = now
        due_s = self._fleet.next_timer()
        if due_s is not None and due_s <= now:
            self._fleet.handle_timer(now=now)
        return [*self._hedger.due_hedges(now=now), *self._drain_queue(now)]

    # -- settings

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
        """Score decisions by another shadow policy, or by none. Raises as the constructor does."""
        if policy is not None:
            validate_shadow(self.policy, policy)
        self._dispatcher.set_shadow(policy)
        self.index.bounded = required_index(self.policy, policy) == "bounded"

    def set_fleet(self, replicas: Sequence[ReplicaSpec], *, now: float) -> None:
        """Replace the fleet. A replica that stays keeps load, health and index; one that leaves may finish attempts."""
        was_empty = not self._fleet.replicas
        change = self._fleet.replace(replicas)
        self._parts.prefix_updater.on_fleet_change(change)
        self._parts.regions.on_fleet_change()
        self._parts.busy.on_fleet_change()
        self._parts.refused_kinds.on_fleet_change()
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
        self.index.flush(None if replica is None else self._fleet.member(replica).slot)

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
        """Assert every invariant of the index, the in-flight table and the prefill queues; visits all of them."""
        self.index.check()
        self._table.check()

    # -- helpers

    def _run_timers(self, now: float) -> list[Action]:
        """Do what is due first: decisions then do not depend on how late the shell's timer is."""
        self._now = now
        due_s = self.next_timer()
        return self.handle_timer(now=now) if due_s is not None and due_s <= now else []

    def _drain_queue(self, now: float) -> list[Action]:
        """Dispatch or reject queued requests: a replica may have capacity again."""
        if not self._admission.queue:
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

    def _refuse(self, request: RouteRequest, now: float) -> Reject | None:
        """Reject a request that no replica can serve or that is over a limit; else count it for its client."""
        if not self._fleet.eligibility.serves(request.model):
            return model_not_found(request)
        if len(self._table) + len(self._admission.queue) >= self.limits.max_in_flight:
            return too_many_in_flight(request, self.limits.max_in_flight)
        if request.pinned_replica is not None and request.pinned_replica not in self._fleet.replicas:
            return replica_not_found(request)
        if request.regions is not None and not self._parts.filter.has_replica_in(request.regions, request):
            return region_not_allowed(request)
        exceeded = self._quotas.acquire(request.client, now=now, tokens=request.prompt_tokens)
        return None if exceeded is None else quota_exceeded(request, exceeded)

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
