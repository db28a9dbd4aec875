"""From a request to a replica: the look at all candidates, and the dispatch that reserves one of them.

Owns the candidates' table of one request, the record of the decision, and the reservation. Who is a candidate is the
fleet's, the choice the policy's, and whether the request goes now `front_door`'s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.actions import Dispatch
from gorgo.core.candidates import Candidates
from gorgo.core.decision import Choice, Decision
from gorgo.core.eligible import Eligible
from gorgo.core.fleet import Fleet
from gorgo.core.ledger import Attempt, Ledger, RequestState
from gorgo.core.member import Member
from gorgo.core.policy import Policy
from gorgo.core.prefix_index import PrefixIndex
from gorgo.core.request import RouteRequest
from gorgo.core.shadow import Shadow, ShadowScore
from gorgo.core.ttft import TtftOutlook, expected_queue_s
from gorgo.core.way import arrives_s, one_way_s
from gorgo.core.weights import Weights


@dataclass(slots=True, eq=False)  # not frozen: one is made for each decision, and that takes three times as long
class Placement:
    """What the policy would do with a request now. Nothing is reserved, and nobody changes it."""

    eligible: Eligible
    choice: Choice
    matched: NDArray[np.float64]
    #: The most of the prompt that any replica has, a candidate or not.
    most_matched: float
    shadow: ShadowScore | None

    @property
    def member(self) -> Member:
        return self.eligible.members[self.choice.row]

    @property
    def best_cached_tokens(self) -> int:
        """Of the prompt, on whichever candidate has most of it."""
        if self.eligible.whole:
            return int(self.most_matched)
        matched = self.matched[self.eligible.slots]
        return int(matched[matched.argmax()])


class _Way(NamedTuple):
    """Of a request to the replica chosen: its round trip (NaN if unknown), when it arrives, half a round trip as a
    clock needs it, and its prefill by the prior.
    """

    rtt_s: float
    arrives_s: float
    one_way_s: float
    prior_s: float


class Placer:
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
    decisions_kept:
        As in `RouterLimits`.
    """

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        index: PrefixIndex,
        *,
        policy: Policy,
        weights: Weights,
        rng: np.random.Generator,
        shadow: Policy | None,
        decisions_kept: int,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._index = index
        self.policy = policy
        self.weights = weights
        self._rng = rng
        self._shadow = self._shadowed(shadow)
        self._decisions: deque[Decision] = deque(maxlen=decisions_kept)

    @property
    def shadow(self) -> Policy | None:
        return None if self._shadow is None else self._shadow.policy

    def set_shadow(self, policy: Policy | None) -> None:
        self._shadow = self._shadowed(policy)

    def decisions(self, request_id: str) -> list[Decision]:
        """Decisions made for a request, first attempt first; empty when they are no longer kept."""
        return [decision for decision in self._decisions if decision.request_id == request_id]

    def newest(self, limit: int) -> list[Decision]:
        """The last decisions, newest first."""
        return list(islice(reversed(self._decisions), limit))

    def look(self, request: RouteRequest, eligible: Eligible, *, now: float) -> Placement:
        """Ask the policy. `eligible` has a member."""
        columns = self._fleet.columns
        matched = self._index.match(request.blocks, len(columns.salt)) * request.block_tokens
        most = matched[matched.argmax()]
        if most > request.prompt_tokens:  # full blocks rarely are more than the prompt
            np.minimum(matched, request.prompt_tokens, out=matched)
            most = request.prompt_tokens
        candidates = Candidates(
            eligible.slots, eligible.names, columns, matched, request.prompt_tokens, whole=eligible.whole, now=now
        )
        choice = self.policy.choose(request, candidates, self.weights, self._rng)
        scored = None if self._shadow is None else self._shadow.score(request, candidates, choice.row)
        return Placement(eligible, choice, matched, most, scored)

    def dispatch(self, state: RequestState, placement: Placement, *, now: float) -> Dispatch:
        """Reserve what was chosen. `placement` is of this very moment."""
        request, member = state.request, placement.member
        state.attempts += 1
        state.tried.add(member.spec.name)
        if state.first_dispatched_s is None:
            state.first_dispatched_s = now
        cached_tokens = int(placement.matched[member.slot])
        way = self._way(request, member, cached_tokens, now)
        decision = self._decide(state, placement, cached_tokens, self._outlook(state, member, way, now), now)
        attempt = self._reserve(state, member, decision, placement.choice, way, now)
        return Dispatch(
            request.request_id, attempt.attempt_id, state.attempts, member.spec.name, member.spec.region, decision
        )

    def _shadowed(self, policy: Policy | None) -> Shadow | None:
        # A child of the Router's generator, which draws nothing from it: decisions are the same without the shadow.
        return None if policy is None else Shadow(policy, self._rng.spawn(1)[0])

    def _way(self, request: RouteRequest, member: Member, cached_tokens: int, now: float) -> _Way:
        columns, slot = self._fleet.columns, member.slot
        return _Way(
            float(columns.rtt_s[slot]),
            arrives_s(columns, slot, request.body_bytes, now=now),
            one_way_s(columns, slot),
            member.prior.seconds(request.prompt_tokens - cached_tokens, cached_tokens),
        )

    def _outlook(self, state: RequestState, member: Member, way: _Way, now: float) -> TtftOutlook:
        """Before the reservation, which puts the request itself on the replica's clock."""
        first_s = state.first_dispatched_s
        assert first_s is not None, "it is being dispatched"
        return TtftOutlook(
            first_s - state.request.received_s,
            now - first_s,
            way.arrives_s - now + way.one_way_s if way.rtt_s == way.rtt_s else None,
            expected_queue_s(member.clock, arrives_s=way.arrives_s, one_way_s=way.one_way_s, now=now),
            way.prior_s * member.clock.speed.factor,
        )

    def _decide(
        self, state: RequestState, placement: Placement, cached_tokens: int, outlook: TtftOutlook, now: float
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
            believed_cached_tokens=cached_tokens,
            best_cached_tokens=placement.best_cached_tokens,
            predicted_ttft_s=choice.predicted_ttft_s,
            outlook=outlook,
            fallback=choice.fallback,
            excluded=eligible.excluded,
            shadow=placement.shadow,
        )
        self._decisions.append(decision)
        return decision

    def _reserve(
        self, state: RequestState, member: Member, decision: Decision, choice: Choice, way: _Way, now: float
    ) -> Attempt:
        attempt = Attempt(
            self._ledger.new_id(state),
            state,
            member,
            dispatched_s=now,
            policy=decision.policy,
            weights_version=decision.weights_version,
            believed_cached_tokens=decision.believed_cached_tokens,
            best_cached_tokens=decision.best_cached_tokens,
            predicted_ttft_s=decision.predicted_ttft_s,
            outlook=decision.outlook,
            rtt_s=way.rtt_s,
            arrives_s=way.arrives_s,
            prior_s=way.prior_s,
            terms={name: float(column[choice.row]) for name, column in choice.terms.items()},
            shadow=decision.shadow,
        )
        self._ledger.open(attempt)
        attempt.belief = self._index.insert(state.request.blocks, member.slot)
        member.attempts += 1
        self._fleet.health_changed(member.health.attempt_started(attempt.attempt_id))
        return attempt
