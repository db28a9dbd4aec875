"""The Router: events in with `now`, actions out. One synchronous object without sockets, clock or chance of its own.

Owns the order of things: filter, match, choose, reserve, retry, sample. Leaves the cells to `fleet`, the reservations
to `ledger`, who is ill to `health`, what is cached where to `prefix_index`, the words of a refusal and of a sample to
`endings`, and the choice to the policy.

Theory of operation: `submit` selects and reserves before it returns, so two requests never see the same empty replica
and no lock is needed. An attempt ends once; every later word about it is ignored. A request lives until its last
attempt ends and then leaves one sample. A belief enters the prefix index at dispatch, so that a burst of siblings sees
it, is confirmed by the first token and withdrawn when the attempt ends without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from gorgo.core.actions import Action, Dispatch, Reject
from gorgo.core.cache_reports import contradicts
from gorgo.core.candidates import Candidates
from gorgo.core.decision import Choice, Decision
from gorgo.core.endings import (
    RETRY_AFTER_S,
    failed,
    model_not_found,
    no_replica,
    replica_not_found,
    sample_of,
    status_of,
    too_many_in_flight,
)
from gorgo.core.fleet import Eligible, Fleet, Member
from gorgo.core.fleet_view import ReplicaView, view_replica
from gorgo.core.ledger import Attempt, Ledger, RequestState
from gorgo.core.limits import RouterLimits
from gorgo.core.policy import Policy
from gorgo.core.prefix_index import PrefixIndex
from gorgo.core.replica import ReplicaSpec
from gorgo.core.request import Ending, EngineSample, OpenConnection, Outcome, RouteRequest
from gorgo.core.samples import SampleRing
from gorgo.core.shadow import Shadow, ShadowScore, check_shadow, shared_index
from gorgo.core.weights import Weights

#: Endings of an attempt after which the request may go to another replica.
_RETRIED = (Ending.FAILED_BEFORE_CONTENT, Ending.BUSY)
#: Endings that prove the replica alive: it answered, even if with a 4xx.
_ANSWERED = (Ending.COMPLETED, Ending.REFUSED)

_DEFAULTS = RouterLimits()


__all__ = ["Router", "RouterLimits"]


class Router:
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
        Every bound, with its reason.
    shadow:
        Scores each decision beside `policy` and changes none (`core.shadow`). Raises `ConfigError` if it has no cost,
        or if the two read different prefix indexes.

    Example
    -------
    >>> from gorgo.policies.registry import make_policy
    >>> from gorgo.core.request import RouteRequest
    >>> replicas = [ReplicaSpec("near", "us-ashburn"), ReplicaSpec("far", "ap-seoul")]
    >>> router = Router(replicas, make_policy("gorgo"), rng=np.random.default_rng(0), boot_id="example")
    >>> router.on_probe("near", 0.002, now=0.0), router.on_probe("far", 0.180, now=0.0)
    ([], [])
    >>> request = RouteRequest("r", 1.0, prompt_tokens=1000, blocks=b"", block_tokens=64.0, head=0)
    >>> (dispatch,) = router.submit(request, now=1.0)
    >>> dispatch.replica, dispatch.attempt_id, router.in_flight
    ('near', 'r/1', 1)
    >>> router.on_finish("r/1", Outcome(Ending.COMPLETED, status=200), now=2.0), router.in_flight
    ([], 0)
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
        if shadow is not None:
            check_shadow(policy, shadow)
        self.policy = policy
        self.limits = limits
        self.boot_id = boot_id
        version = 1 if weights is None else weights.version
        # `widen`: the box was minded, or not, by whoever made them.
        self.weights = Weights.of(policy.weight_specs, weights, version=version, widen=True)
        self.index = PrefixIndex(max_blocks=limits.max_index_blocks, bounded=shared_index(policy, shadow) == "bounded")
        self.samples = SampleRing(boot_id, limits.samples_kept)
        self._rng = rng
        self._shadow = self._shadowed(shadow)
        self._fleet = Fleet(
            stale_after_s=limits.stale_after_s,
            rtt_ewma_alpha=limits.rtt_ewma_alpha,
            panic_threshold=limits.panic_threshold,
            ejection=limits.ejection,
        )
        self._ledger = Ledger(self._fleet)
        self._decisions: deque[Decision] = deque(maxlen=limits.decisions_kept)
        self._replace_fleet(replicas)

    # -- a request's life

    @property
    def in_flight(self) -> int:
        """Open attempts."""
        return len(self._ledger)

    def submit(self, request: RouteRequest, *, now: float) -> list[Action]:
        """Choose a replica and reserve it: one Dispatch, or one Reject and nothing reserved."""
        self._catch_up(now)
        refusal = self._refuse(request)
        if refusal is not None:
            return [refusal]
        eligible = self._eligible(request)
        if not eligible.members:
            return [no_replica(request, self._readmission_s(now))]
        return [self._dispatch(RequestState(request), eligible, now)]

    def on_first_token(self, attempt_id: str, *, now: float) -> list[Action]:
        """The first content came. Told again, or for an attempt that has ended, it changes nothing."""
        attempt = self._ledger.first_token(attempt_id, now=now)
        if attempt is not None:
            self._answered(attempt, now)
            if attempt.member.slot >= 0:
                self.index.confirm(attempt.state.request.blocks, attempt.member.slot)
        return []

    def on_finish(self, attempt_id: str, outcome: Outcome, *, now: float) -> list[Action]:
        """The attempt ended: release its load, judge the replica, and go on with the request or close it.

        Answers the next Dispatch, or a Reject when a failure cannot be retried; nothing for any other end.
        """
        attempt = self._ledger.close(attempt_id, now=now)
        if attempt is None:
            return []
        self._judge(attempt, outcome, now)
        if outcome.ending not in _RETRIED:
            self._sample(attempt, outcome, status_of(outcome), now)
            return []
        action = self._retry(attempt, outcome, now)
        if isinstance(action, Reject):
            self._sample(attempt, outcome, action.status, now)
        return [action]

    # -- what probes, scrapes and time tell

    def on_probe(self, replica: str, rtt_s: float | None, *, now: float) -> list[Action]:
        """A ping's round trip, `None` if it failed. A replica that has just left is ignored."""
        member = self._fleet.members.get(replica)
        if member is not None:
            self._fleet.probed(member, rtt_s, now=now)
        return []

    def on_path(self, replica: str, connection: OpenConnection | None, *, now: float) -> list[Action]:
        """The connection that the next request to a replica takes, `None` if it opens one; told after each change.

        A shell that never tells has each request priced at one round trip.
        """
        member = self._fleet.members.get(replica)
        if member is not None:
            self._fleet.on_path(member, connection)
        return []

    def on_engine_sample(self, replica: str, sample: EngineSample | None, *, now: float) -> list[Action]:
        """A scrape, `None` if it failed: the last figures then stand until they are stale."""
        member = self._fleet.members.get(replica)
        if member is not None and sample is not None:
            self._fleet.scraped(member, sample, now=now)
            self._fit_index(member)
        return []

    def next_timer(self) -> float | None:
        """When `handle_timer` is next of use."""
        return self._fleet.next_timer()

    def handle_timer(self, *, now: float) -> list[Action]:
        """Figures go stale and back-offs end. Safe to call at any time."""
        self._fleet.handle_timer(now=now)
        return []

    # -- what an operator or a tuner sets

    def set_weights(self, values: Mapping[str, float], *, now: float, widen: bool = False) -> Weights:
        """Replace the values named, under a new version. Raises `WeightsError` and changes nothing if one is wrong."""
        self.weights = self.weights.changed(self.policy.weight_specs, values, widen=widen)
        return self.weights

    def set_policy(
        self, policy: Policy, values: Mapping[str, float] | None = None, *, now: float, widen: bool = False
    ) -> Weights:
        """Route by another policy from the next decision on; requests in flight are not moved.

        Raises `ConfigError` if it and the shadow policy read different prefix indexes, and changes nothing.
        """
        bounded = shared_index(policy, self.shadow) == "bounded"
        version = self.weights.version + 1
        self.weights = Weights.of(policy.weight_specs, values, version=version, widen=widen)
        self.policy = policy
        self.index.bounded = bounded
        return self.weights

    def set_shadow(self, policy: Policy | None, *, now: float) -> None:
        """Have another policy score decisions from the next one on, or none. Raises as the constructor does."""
        if policy is not None:
            check_shadow(self.policy, policy)
        self._shadow = self._shadowed(policy)
        self.index.bounded = shared_index(self.policy, policy) == "bounded"

    def set_fleet(self, replicas: Sequence[ReplicaSpec], *, now: float) -> None:
        """Who stays keeps load, health and index; who leaves loses its entries, and its open attempts may finish."""
        self._replace_fleet(replicas)

    def set_limits(self, limits: RouterLimits, *, now: float) -> None:
        """Other bounds from the next event on; how many decisions and samples are kept stays as it was."""
        self.limits = limits
        self._fleet.set_limits(
            stale_after_s=limits.stale_after_s,
            rtt_ewma_alpha=limits.rtt_ewma_alpha,
            panic_threshold=limits.panic_threshold,
        )
        self.index.resize(limits.max_index_blocks)
        for member in self._fleet.members.values():
            self._fit_index(member)

    def drain(self, replica: str, draining: bool = True, *, now: float) -> None:
        """Send nothing new there (or again). Raises `UnknownReplica`."""
        self._fleet.drain(replica, draining)

    def flush(self, replica: str | None = None, *, now: float) -> None:
        """Forget what is believed cached, on one replica or all. Raises `UnknownReplica`."""
        self.index.flush(None if replica is None else self._fleet.member(replica).slot)

    # -- what can be read

    @property
    def shadow(self) -> Policy | None:
        """The policy that scores without a say, if there is one."""
        return None if self._shadow is None else self._shadow.policy

    def fleet_view(self, *, now: float) -> list[ReplicaView]:
        """A row per replica, in the order in which they joined."""
        return [self._view(member, now) for member in self._fleet.members.values()]

    def standings(self) -> dict[str, str]:
        """`healthy`, `ejected` or `half_open` per replica; cheaper than the whole view."""
        return {name: member.health.state.value for name, member in self._fleet.members.items()}

    def decisions(self, request_id: str) -> list[Decision]:
        """Decisions made for a request, first attempt first; empty when they are no longer kept."""
        return [decision for decision in self._decisions if decision.request_id == request_id]

    # -- helpers

    def _shadowed(self, policy: Policy | None) -> Shadow | None:
        # A child of the Router's generator, which draws nothing from it: decisions are the same without the shadow.
        return None if policy is None else Shadow(policy, self._rng.spawn(1)[0])

    def _catch_up(self, now: float) -> None:
        """A decision never depends on how late the shell's timer is, so live and simulated runs agree."""
        due = self._fleet.next_timer()
        if due is not None and due <= now:
            self._fleet.handle_timer(now=now)

    def _refuse(self, request: RouteRequest) -> Reject | None:
        """What no replica needs to be asked for."""
        if not self._fleet.serves(request.model):
            return model_not_found(request)
        if len(self._ledger) >= self.limits.max_in_flight:
            return too_many_in_flight(request, self.limits.max_in_flight)
        if request.pinned_replica is not None and request.pinned_replica not in self._fleet.members:
            return replica_not_found(request)
        return None

    def _eligible(self, request: RouteRequest) -> Eligible:
        if request.pinned_replica is not None:
            return self._fleet.only(request.pinned_replica)
        return self._fleet.eligible(request.model)

    def _dispatch(self, state: RequestState, eligible: Eligible, now: float) -> Dispatch:
        request, columns = state.request, self._fleet.columns
        matched = self.index.match(request.blocks, len(columns.salt)) * request.block_tokens
        if matched[matched.argmax()] > request.prompt_tokens:  # full blocks rarely are more than the prompt
            np.minimum(matched, request.prompt_tokens, out=matched)
        candidates = Candidates(
            eligible.slots, eligible.names, columns, matched, request.prompt_tokens, whole=eligible.whole, now=now
        )
        choice = self.policy.choose(request, candidates, self.weights, self._rng)
        scored = None if self._shadow is None else self._shadow.score(request, candidates, choice.row)
        member = eligible.members[choice.row]
        state.attempts += 1
        state.tried.add(member.spec.name)
        decision = self._decide(state, eligible, choice, scored, int(matched[member.slot]), now)
        attempt = self._reserve(state, member, decision, choice, now)
        return Dispatch(
            request.request_id, attempt.attempt_id, state.attempts, member.spec.name, member.spec.region, decision
        )

    def _decide(
        self,
        state: RequestState,
        eligible: Eligible,
        choice: Choice,
        scored: ShadowScore | None,
        cached_tokens: int,
        now: float,
    ) -> Decision:
        decision = Decision(
            request_id=state.request.request_id,
            attempt=state.attempts,
            decided_s=now,
            policy=self.policy.name,
            unit=self.policy.unit,
            weights_version=self.weights.version,
            weights=self.weights.values_by_name,
            candidates=eligible.names,
            replica=eligible.names[choice.row],
            terms=choice.terms,
            cost=choice.cost,
            prompt_tokens=state.request.prompt_tokens,
            believed_cached_tokens=cached_tokens,
            predicted_ttft_s=choice.predicted_ttft_s,
            fallback=choice.fallback,
            excluded=eligible.excluded,
            shadow=scored,
        )
        self._decisions.append(decision)
        return decision

    def _reserve(self, state: RequestState, member: Member, decision: Decision, choice: Choice, now: float) -> Attempt:
        attempt = Attempt(
            self._ledger.new_id(state),
            state,
            member,
            dispatched_s=now,
            policy=decision.policy,
            weights_version=decision.weights_version,
            believed_cached_tokens=decision.believed_cached_tokens,
            predicted_ttft_s=decision.predicted_ttft_s,
            rtt_s=float(self._fleet.columns.rtt_s[member.slot]),
            arrives_s=self._fleet.arrives_s(member, state.request.body_bytes, now=now),
            prior_s=member.prior.seconds(
                decision.prompt_tokens - decision.believed_cached_tokens, decision.believed_cached_tokens
            ),
            terms={name: float(column[choice.row]) for name, column in choice.terms.items()},
            shadow=decision.shadow,
        )
        self._ledger.open(attempt)
        attempt.belief = self.index.insert(state.request.blocks, member.slot)
        member.attempts += 1
        self._fleet.health_changed(member.health.attempt_started(attempt.attempt_id))
        return attempt

    def _judge(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """What the end says about the replica and about the belief that its prompt is cached there."""
        member = attempt.member
        self._fleet.health_changed(member.health.attempt_ended(attempt.attempt_id))
        if outcome.ending in _ANSWERED:
            self._answered(attempt, now)
        elif outcome.ending is Ending.FAILED_BEFORE_CONTENT:
            self._fleet.health_changed(member.health.attempt_failed(dispatched_s=attempt.dispatched_s, now=now))
        member.failures += outcome.ending in (Ending.FAILED_BEFORE_CONTENT, Ending.FAILED_AFTER_CONTENT)
        if member.slot >= 0:
            self._believe(attempt, outcome)

    def _believe(self, attempt: Attempt, outcome: Outcome) -> None:
        blocks, slot = attempt.state.request.blocks, attempt.member.slot
        completed, bounded = outcome.ending is Ending.COMPLETED, self.index.bounded
        if completed and (bounded or attempt.first_token_s is None):
            # Once more after the first token: the engine held the blocks to the end, so they were used last now.
            self.index.confirm(blocks, slot)
        elif attempt.first_token_s is None:
            self.index.withdraw(blocks, slot)
        if completed and bounded:
            self._correct(attempt, outcome)

    def _correct(self, attempt: Attempt, outcome: Outcome) -> None:
        """Truth beats belief: the engine has told what it had cached."""
        contradicted = contradicts(attempt.state.request, attempt.belief, outcome)
        if contradicted is None:
            return
        member = attempt.member
        if contradicted:
            self.index.correct(member.slot, before=attempt.belief.tick)
        resident = self.index.resident_blocks(member.slot)
        if member.learned_capacity.learn(contradicted=contradicted, resident_blocks=resident):
            self._fit_index(member)

    def _answered(self, attempt: Attempt, now: float) -> None:
        health = attempt.member.health
        self._fleet.health_changed(health.attempt_succeeded(dispatched_s=attempt.dispatched_s, now=now))

    def _retry(self, attempt: Attempt, outcome: Outcome, now: float) -> Dispatch | Reject:
        """The next best replica, or the error that the client gets."""
        state = attempt.state
        if state.request.pinned_replica is None and state.attempts < self.limits.max_attempts:
            left = self._fleet.without(self._eligible(state.request), state.tried)
            if left.members:
                return self._dispatch(state, left, now)
        return failed(state, outcome)

    def _sample(self, attempt: Attempt, outcome: Outcome, status: int, now: float) -> None:
        self.samples.append(sample_of(attempt, outcome, status, seq=self.samples.next_seq, now=now))

    def _replace_fleet(self, replicas: Sequence[ReplicaSpec]) -> None:
        change = self._fleet.replace(replicas)
        for slot in change.left_slots:
            self.index.remove_replica(slot)
        for member in change.joined:
            self.index.add_replica(member.slot, capacity_blocks=self._capacity_blocks(member))
        for member in self._fleet.members.values():
            self._fit_index(member)

    def _fit_index(self, member: Member) -> None:
        self.index.set_capacity(member.slot, self._capacity_blocks(member))

    def _capacity_blocks(self, member: Member) -> int | None:
        tokens = float(self._fleet.columns.kv_capacity_tokens[member.slot])
        return member.learned_capacity.blocks if tokens != tokens else int(tokens / self.limits.block_tokens)

    def _view(self, member: Member, now: float) -> ReplicaView:
        blocks = self.index.resident_blocks(member.slot)
        return view_replica(self._fleet, member, index_blocks=blocks, block_tokens=self.limits.block_tokens, now=now)

    def _readmission_s(self, now: float) -> float:
        """When the first ejected replica may be tried again, at least `RETRY_AFTER_S` from now."""
        wakes = [member.health.wakes_s for member in self._fleet.members.values()]
        return max(RETRY_AFTER_S, min((at for at in wakes if at is not None), default=now) - now)
