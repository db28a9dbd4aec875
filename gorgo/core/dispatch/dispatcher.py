"""From a request to a replica: the look at all candidates, and the dispatch that reserves one of them.

Owns the candidates' table of one request, the record of the decision, and the reservation. Who is a candidate is the
fleet's, the choice the policy's, and whether the request goes now `front_door`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.dispatch.in_flight import Attempt, InFlightTable, RequestState
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.network import arrival_s, one_way_s
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.ttft import TtftEstimate, expected_queue_s
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.decision import Choice, Decision
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.shadow import Shadow, ShadowScore
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.index import PrefixIndex


@dataclass(slots=True, eq=False)  # not frozen: one is made for each decision, and that takes three times as long
class Evaluation:
    """What the policy would do with a request now. Nothing is reserved, and nobody changes it."""

    eligible: CandidateSet
    choice: Choice
    matched: NDArray[np.float64]
    #: The most of the prompt that any replica has, a candidate or not.
    most_matched: float
    shadow: ShadowScore | None

    @property
    def replica(self) -> Replica:
        return self.eligible.replicas[self.choice.row]

    @property
    def best_cached_tokens(self) -> int:
        """Of the prompt, on whichever candidate has most of it."""
        if self.eligible.is_all:
            return int(self.most_matched)
        matched = self.matched[self.eligible.slots]
        return int(matched[matched.argmax()])


class _NetworkEstimate(NamedTuple):
    """Of a request to the replica chosen: its round trip (NaN if unknown), when it arrives, half a round trip as a
    clock needs it, and its prefill by the prior.
    """

    rtt_s: float
    arrives_s: float
    one_way_s: float
    prior_s: float


class Dispatcher:
    """Looks and reserves.

    Parameters
    ----------
    fleet, ledger, index:
        The Router's.
    policy, weights:
        What chooses; both may be replaced.
    rng:
        The only source of chance.
    shadow:
        A policy that scores without a say, or none.
    max_decisions:
        As in `RouterLimits`.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: InFlightTable,
        index: PrefixIndex,
        *,
        policy: Policy,
        weights: Weights,
        rng: np.random.Generator,
        shadow: Policy | None,
        max_decisions: int,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._index = index
        self.policy = policy
        self.weights = weights
        self._rng = rng
        self._shadow = self._score_shadow(shadow)
        self._decisions: deque[Decision] = deque(maxlen=max_decisions)
        #: Called with each reserved attempt; set by the Hedger while hedging is on.
        self.on_reserved: Callable[[Attempt], None] | None = None

    @property
    def shadow(self) -> Policy | None:
        return None if self._shadow is None else self._shadow.policy

    def set_shadow(self, policy: Policy | None) -> None:
        self._shadow = self._score_shadow(policy)

    def decisions(self, request_id: str) -> list[Decision]:
        """Decisions made for a request, first attempt first; empty when they are no longer kept."""
        return [decision for decision in self._decisions if decision.request_id == request_id]

    def newest_decisions(self, limit: int) -> list[Decision]:
        """The last decisions, newest first."""
        return list(islice(reversed(self._decisions), limit))

    def evaluate(self, request: RouteRequest, eligible: CandidateSet, *, now: float) -> Evaluation:
        """Ask the policy. `eligible` has a member."""
        columns = self._fleet.columns
        matched = self._index.match(request.blocks, len(columns.salt)) * request.block_tokens
        most = matched[matched.argmax()]
        if most > request.prompt_tokens:  # full blocks rarely are more than the prompt
            np.minimum(matched, request.prompt_tokens, out=matched)
            most = request.prompt_tokens
        candidates = Candidates(
            eligible.slots, eligible.names, columns, matched, request.prompt_tokens, is_all=eligible.is_all, now=now
        )
        choice = self.policy.choose(request, candidates, self.weights, self._rng)
        scored = None if self._shadow is None else self._shadow.score(request, candidates, choice.row)
        return Evaluation(eligible, choice, matched, most, scored)

    def dispatch(self, state: RequestState, placement: Evaluation, *, now: float) -> Dispatch:
        """Reserve what was chosen. `placement` is of this very moment."""
        request, member = state.request, placement.replica
        state.attempts += 1
        state.tried_replicas.add(member.spec.name)
        if state.first_dispatched_s is None:
            state.first_dispatched_s = now
        cached_tokens = int(placement.matched[member.slot])
        way = self._network(request, member, cached_tokens, now)
        decision = self._make_decision(
            state, placement, cached_tokens, self._estimate_ttft(state, member, way, now), now
        )
        attempt = self._reserve(state, member, decision, placement.choice, way, now)
        return Dispatch(
            request.request_id, attempt.attempt_id, state.attempts, member.spec.name, member.spec.region, decision
        )

    def _score_shadow(self, policy: Policy | None) -> Shadow | None:
        # A child of the Router's generator, which draws nothing from it: decisions are the same without the shadow.
        return None if policy is None else Shadow(policy, self._rng.spawn(1)[0])

    def _network(self, request: RouteRequest, member: Replica, cached_tokens: int, now: float) -> _NetworkEstimate:
        columns, slot = self._fleet.columns, member.slot
        return _NetworkEstimate(
            float(columns.rtt_s[slot]),
            arrival_s(columns, slot, request.body_bytes, now=now),
            one_way_s(columns, slot),
            member.prior.seconds(request.prompt_tokens - cached_tokens, cached_tokens),
        )

    def _estimate_ttft(self, state: RequestState, member: Replica, way: _NetworkEstimate, now: float) -> TtftEstimate:
        """Before the reservation, which puts the request itself on the replica's clock."""
        first_s = state.first_dispatched_s
        assert first_s is not None, "it is being dispatched"
        return TtftEstimate(
            first_s - state.request.received_s,
            now - first_s,
            way.arrives_s - now + way.one_way_s if way.rtt_s == way.rtt_s else None,
            expected_queue_s(member.prefill_queue, arrives_s=way.arrives_s, one_way_s=way.one_way_s, now=now),
            way.prior_s * member.prefill_queue.speed.factor,
        )

    def _make_decision(
        self, state: RequestState, placement: Evaluation, cached_tokens: int, outlook: TtftEstimate, now: float
    ) -> Decision:
        eligible, choice = placement.eligible, placement.choice
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
            estimated_cached_tokens=cached_tokens,
            best_cached_tokens=placement.best_cached_tokens,
            predicted_ttft_s=choice.predicted_ttft_s,
            estimate=outlook,
            fallback=choice.fallback,
            excluded=eligible.excluded,
            shadow=placement.shadow,
        )
        self._decisions.append(decision)
        return decision

    def _reserve(
        self,
        state: RequestState,
        member: Replica,
        decision: Decision,
        choice: Choice,
        way: _NetworkEstimate,
        now: float,
    ) -> Attempt:
        attempt = Attempt(
            self._ledger.new_id(state),
            state,
            member,
            dispatched_s=now,
            policy=decision.policy,
            weights_version=decision.weights_version,
            estimated_cached_tokens=decision.estimated_cached_tokens,
            best_cached_tokens=decision.best_cached_tokens,
            predicted_ttft_s=decision.predicted_ttft_s,
            estimate=decision.estimate,
            rtt_s=way.rtt_s,
            arrival_s=way.arrives_s,
            prior_s=way.prior_s,
            terms={name: float(column[choice.row]) for name, column in choice.terms.items()},
            shadow=decision.shadow,
        )
        self._ledger.open(attempt)
        attempt.confirmed_prefix = self._index.insert(state.request.blocks, member.slot)
        member.attempts += 1
        self._fleet.invalidate(member.health.attempt_started(attempt.attempt_id))
        if self.on_reserved is not None:
            self.on_reserved(attempt)
        return attempt
