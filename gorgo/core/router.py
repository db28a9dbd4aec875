"""The Router: events in with `now`, actions out. One synchronous object without sockets, clock or chance of its own.

Owns the order of things: what each event means for whom, and what is asked first. The wiring, and what is set and read
from outside, is `assembly`. Leaves who goes, waits or is turned away to `front_door`, a request's life after that to
`lives`, late ones to `hedging`, the look at all candidates and the reservation to `placing`, the cells to `fleet`, what
is cached where to `prefix_index` and `beliefs`, and the choice to the policy.

Theory of operation: `submit` selects and reserves before it returns, so two requests never see the same empty replica
and no lock is needed. An attempt ends once; every later word about it is ignored. A request lives until its last
attempt ends and then leaves one sample. A belief enters the prefix index at dispatch, so that a burst of siblings sees
it, is confirmed by the first token and withdrawn when the attempt ends without one.
"""

from __future__ import annotations

from gorgo.core.assembly import Assembly
from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.dispatch.outcomes import (
    model_not_found,
    quota_exceeded,
    region_not_allowed,
    replica_not_found,
    too_many_in_flight,
)
from gorgo.core.fleet.network import record_connection
from gorgo.core.fleet.outlier import HealthState
from gorgo.core.messages.actions import Action, AdmissionAction, Reject, RetryAction
from gorgo.core.messages.request import AttemptResult, EngineSample, OpenConnection, Outcome, RouteRequest


class Router(Assembly):
    """Sends each request to the replica that the policy picks, and keeps account until it ends.

    Parameters
    ----------
    replicas:
        The fleet at the start.
    policy:
        Scores and picks; the Router alone owns this instance.
    rng:
        The only source of chance.
    boot_id:
        Names this run, for readers of samples.
    weights:
        Values to start with; the policy's defaults if `None`.
    limits:
        Every bound, with its reason (`core.limits`).
    shadow:
        Scores each decision beside `policy` and changes none (`core.policy.shadow`). Raises `ConfigError` if it has no
        cost, or if the two read different prefix indexes.

    Example
    -------
    >>> import numpy as np
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

    #: Of the last event: what is due is due by then.
    _now = float("-inf")

    # -- a request's life

    @property
    def in_flight(self) -> int:
        """Open attempts."""
        return len(self._in_flight_table)

    @property
    def queued(self) -> int:
        """Requests that wait here."""
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
        """The client of a request that waits is gone. One that does not wait is ignored."""
        self._now = now
        held = self._admission.cancel(request_id)
        if held is not None:
            self._release_quota(held)
        return []

    def on_first_token(self, attempt_id: str, *, now: float) -> list[Action]:
        """The first content came. Told again, or for an attempt that has ended, it changes nothing.

        Answers a Cancel for another attempt of the same request, and what became possible for others.
        """
        self._now = now
        found = self._in_flight_table.find(attempt_id)
        ahead = found.replica.prefill_queue.before(attempt_id) if found is not None and self._hedger.on else []
        attempt = self._in_flight_table.first_token(attempt_id, now=now)
        if attempt is None:
            return []
        if ahead and attempt.state.request.streamed:
            waiting = [other for key in ahead if (other := self._in_flight_table.find(key)) is not None]
            self._hedger.on_overtaken(waiting, now=now)
        return [*self._lifecycle.on_first_token(attempt, now=now), *self._drain_queue(now)]

    def on_finish(self, attempt_id: str, outcome: Outcome, *, now: float) -> tuple[RetryAction | None, list[Action]]:
        """Release the attempt's load, update the replica's health, and retry or close the request.

        Return the request's next Dispatch, or a Reject for a failure that cannot be retried; `None` for any other end
        or while another attempt is open. Then actions for other attempts and requests, to be done after it.
        """
        self._now = now
        attempt = self._in_flight_table.close(attempt_id, now=now)
        if attempt is None:
            return None, []
        if outcome.result is AttemptResult.COMPLETED:
            self._admission.saturation.on_result(attempt, now=now, tokens=outcome.output_tokens)
        own, others = self._lifecycle.on_result(attempt, outcome, now=now)
        others += self._drain_queue(now)
        return own, others

    # -- what probes, scrapes and time tell

    def on_probe(self, replica: str, rtt_s: float | None, *, now: float) -> list[Action]:
        """A ping's round trip, `None` if it failed. A replica that has just left is ignored."""
        self._now = now
        member = self._fleet.replicas.get(replica)
        if member is not None:
            healthy = member.health.state is HealthState.HEALTHY
            self._fleet.probed(member, rtt_s, now=now)
            self._lifecycle.on_readmitted(member, was_healthy=healthy, now=now)
            if rtt_s is None:
                self._regions.probe_failed(member, now=now)
            else:
                self._regions.probe_succeeded(member, now=now)
        return self._drain_queue(now)

    def on_connection(self, replica: str, connection: OpenConnection | None, *, now: float) -> list[Action]:
        """The connection that the next request to a replica takes, `None` if it opens one; told after each change.

        A shell that never tells has each request priced at one round trip.
        """
        member = self._fleet.replicas.get(replica)
        if member is not None:
            record_connection(self._fleet.columns, member.slot, connection)
        return []

    def on_engine_sample(self, replica: str, sample: EngineSample | None, *, now: float) -> list[Action]:
        """A scrape, `None` if it failed: the last figures then stand until they are stale."""
        member = self._fleet.replicas.get(replica)
        if member is not None and sample is not None:
            self._fleet.scraped(member, sample, now=now)
            if member.restarts.observe(sample):
                self.index.flush(member.slot)
            self._prefix_updater.resize(member)
        return []

    def next_timer(self) -> float | None:
        """When `handle_timer` is next of use. Any event can move it; without one it is not in the past."""
        due_s = self._fleet.next_timer()
        for other_s in (self._hedger.next_timer_s(), self._admission.next_timer_s(now=self._now)):
            if other_s is not None and (due_s is None or other_s < due_s):
                due_s = other_s
        return due_s

    def handle_timer(self, *, now: float) -> list[Action]:
        """Figures go stale, back-offs end, requests are late or their time is over. Safe to call at any time."""
        self._now = now
        due_s = self._fleet.next_timer()
        if due_s is not None and due_s <= now:
            self._fleet.handle_timer(now=now)
        return [*self._hedger.due_hedges(now=now), *self._drain_queue(now)]

    # -- helpers

    def _run_timers(self, now: float) -> list[Action]:
        """A decision never depends on how late the shell's timer is, so live and simulated runs agree."""
        self._now = now
        if self._admission.queue:
            due_s = self.next_timer()
        else:
            due_s, late_s = self._fleet.next_timer(), self._hedger.next_timer_s()
            if late_s is not None and late_s <= now:
                due_s = late_s
        return self.handle_timer(now=now) if due_s is not None and due_s <= now else []

    def _drain_queue(self, now: float) -> list[Action]:
        """Something may have opened a replica."""
        if not self._admission.queue:
            return []
        actions: list[Action] = []
        for state, action in self._admission.drain_queue(now=now):
            if isinstance(action, Reject):
                self._release_quota(state)
            actions.append(action)
        return actions

    def _release_quota(self, state: RequestState) -> None:
        """It is over before it was sent."""
        if state.quota_held:
            self._quotas.release(state.request.client)

    def _refuse(self, request: RouteRequest, now: float) -> Reject | None:
        """What no replica needs to be asked for; otherwise the client's count has it."""
        if not self._fleet.eligibility.serves(request.model):
            return model_not_found(request)
        if len(self._in_flight_table) + len(self._admission.queue) >= self.limits.max_in_flight:
            return too_many_in_flight(request, self.limits.max_in_flight)
        if request.pinned_replica is not None and request.pinned_replica not in self._fleet.replicas:
            return replica_not_found(request)
        if request.regions is not None and not self._anyone_in(request.regions, request):
            return region_not_allowed(request)
        excess = self._quotas.acquire(request.client, now=now)
        return None if excess is None else quota_exceeded(request, excess)

    def _anyone_in(self, regions: frozenset[str], request: RouteRequest) -> bool:
        """Whether someone is there who could serve it, well or not; of a pinned request only its own replica could."""
        if request.pinned_replica is None:
            return self._fleet.eligibility.anyone_in(regions, request.model)
        return self._fleet.replicas[request.pinned_replica].spec.region in regions
