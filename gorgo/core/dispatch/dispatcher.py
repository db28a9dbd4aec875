"""Evaluation of all candidates of a request, and the dispatch that reserves one of them.

Owns the candidates' table of one request, the record of the decision, and the reservation. The fleet filters the
candidates, the policy chooses, and `admission` says whether the request is dispatched now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np

from gorgo.core.arrays import Floats
from gorgo.core.dispatch.candidate_sampler import LARGE, can_sample, sample_candidates
from gorgo.core.dispatch.evaluation import Evaluation
from gorgo.core.dispatch.in_flight import Attempt, InFlightTable, RequestState
from gorgo.core.dispatch.network_estimate import NetworkEstimate
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.ttft import TtftEstimate, expected_queue_s
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.shadow import Shadow
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.answers import Answers, Behind
from gorgo.core.prefix.found_share import FoundShares
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.training.learning import Learning
from gorgo.core.training.recorder import OutcomeRecorder

#: A dispatched prompt counts on its replica without a report for so long, or so long after its predicted first token:
#: reports come within a round trip and a batch of events.
SPECULATED_S = 2.0
SPECULATED_AFTER_S = 1.0
#: The rule that decided where a gateway did.
MOVED = "served_elsewhere"


class Dispatcher:
    """Evaluates and reserves.

    Parameters
    ----------
    fleet, table, index, found_shares, answers, feeds:
        The Router's. Shares and answers count where the index is bounded: the published one is never corrected.
    policy, weights:
        Of the choice; both may be replaced.
    rng:
        The only source of randomness.
    shadow:
        A policy that scores each decision and changes none, or none.
    learning:
        Which of the two learns, and where outcomes are written.
    limits:
        May be replaced by `set_limits`; the number of retained decisions stays.
    """

    def __init__(
        self,
        fleet: Fleet,
        table: InFlightTable,
        index: PrefixIndex,
        found_shares: FoundShares,
        answers: Answers,
        feeds: KvFeeds,
        *,
        policy: Policy,
        weights: Weights,
        rng: np.random.Generator,
        shadow: Policy | None,
        learning: Learning,
        limits: RouterLimits,
    ) -> None:
        self._fleet = fleet
        self._table = table
        self._index = index
        self._found_shares = found_shares
        self._answers = answers
        self._feeds = feeds
        self.policy = policy
        self.weights = weights
        self._rng = rng
        self._shadow = self._score_shadow(shadow)
        self._learning = learning
        self._decisions: deque[Decision] = deque(maxlen=limits.max_decisions)
        self.set_limits(limits)
        #: Raises matched tokens by prefixes that peers had confirmed; `None` without peers.
        self.raise_matches: Callable[[Floats, RouteRequest], Floats] | None = None
        #: Called with each reserved attempt; `None` without peers.
        self.on_sent: Callable[[Attempt], None] | None = None
        #: Called with each reserved attempt; set by the Hedger while hedging is on.
        self.on_reserved: Callable[[Attempt], None] | None = None

    @property
    def shadow(self) -> Policy | None:
        return None if self._shadow is None else self._shadow.policy

    @property
    def recorder(self) -> OutcomeRecorder | None:
        return self._learning.recorder

    def set_limits(self, limits: RouterLimits) -> None:
        self._fallbacks, self._sample = limits.fallbacks, limits.sampled_replicas
        self._large = LARGE * self._sample

    def set_shadow(self, policy: Policy | None) -> None:
        self._shadow = self._score_shadow(policy)

    def decisions(self, request_id: str) -> list[Decision]:
        """Return the retained decisions for a request, first attempt first."""
        return [decision for decision in self._decisions if decision.request_id == request_id]

    def newest_decisions(self, limit: int) -> list[Decision]:
        """Return the last decisions, newest first."""
        return list(islice(reversed(self._decisions), limit))

    def evaluate(self, request: RouteRequest, eligible: CandidateSet, *, now: float) -> Evaluation:
        """Let the policy choose. `eligible` has at least one replica."""
        columns = self._fleet.all_loads(now=now)
        matched = self._index.match(request.blocks, len(columns.salt), block_tokens=request.block_tokens)
        if self.raise_matches is not None:
            matched = self.raise_matches(matched, request)
        # No numpy number, whose `round` takes microseconds; of two kinds, which mypyc keeps apart.
        most: int | float = matched.item(matched.argmax())
        if most > request.prompt_tokens:  # full blocks rarely are more than the prompt
            np.minimum(matched, request.prompt_tokens, out=matched)
            most = request.prompt_tokens
        behind: dict[int, Behind] | None = None
        if most and self._index.bounded:
            behind = self._answers.behind(request, matched, most)
            found = self._found_shares.found_tokens(matched, request.recorded_model)
            if behind is not None:
                for slot, answer in behind.items():
                    found[slot] += self._answers.found_tokens(slot, answer)
            if found is not matched or behind is not None:
                matched, most = found, found.item(found.argmax())
        reported = None
        if request.kv_hashes and self._feeds.counted:
            reported = self._feeds.match(request, matched, now=now)
            np.minimum(matched, request.prompt_tokens, out=matched)
            most = matched.item(matched.argmax())
        if len(eligible.names) > self._large and can_sample(self.policy):
            known = None if self.policy.index == "any" else matched
            eligible = sample_candidates(eligible, columns, known, most=self._sample, rng=self._rng)
        candidates = Candidates(
            eligible.slots, eligible.names, columns, matched, request.prompt_tokens, is_all=eligible.is_all, now=now
        )
        choice = self.policy.choose(request, candidates, self.weights, self._rng)
        shadowed = None if self._shadow is None else self._shadow.choose(request, candidates)
        score = None if self._shadow is None or shadowed is None else self._shadow.score(shadowed, choice.row)
        learner = self._learning.learner
        features = None if learner is None else self._learning.table_of(choice, shadowed, request, candidates)
        recorder = self._learning.recorder
        recorded = None if recorder is None else recorder.candidate_features(request, candidates)
        replica = eligible.replicas[choice.row]
        return Evaluation(eligible, choice, matched, most, score, replica, features, recorded, reported, behind)

    def dispatch(self, state: RequestState, evaluation: Evaluation, *, now: float) -> Dispatch:
        """Reserve the replica chosen. `evaluation` was made at `now`."""
        request, replica = state.request, evaluation.replica
        state.attempts += 1
        state.tried_replicas.add(replica.spec.name)
        if state.first_dispatched_s is None:
            state.first_dispatched_s = now
        cached_tokens = int(evaluation.matched.item(replica.slot))
        network = NetworkEstimate.of(self._fleet.columns, request, replica, cached_tokens, now=now)
        decision = self._make_decision(
            state, evaluation, cached_tokens, self._estimate_ttft(state, replica, network, now), now
        )
        attempt = self._reserve(state, replica, decision, network, now)
        if evaluation.reported is not None:
            found_blocks = int(evaluation.reported.blocks[replica.slot])
            expires_s = now + max(SPECULATED_S, decision.estimate.expected_s + SPECULATED_AFTER_S)
            attempt.speculation = self._feeds.speculate(
                replica.slot, request, found_blocks=found_blocks, expires_s=expires_s
            )
        attempt.recorded = evaluation.recorded
        if evaluation.behind is not None:
            attempt.behind = evaluation.behind.get(replica.slot)
        attempt.learn = evaluation.choice.learn
        attempt.withhold = replica.doubtful and len(evaluation.eligible.replicas) > 1
        return Dispatch(
            request.request_id,
            attempt.attempt_id,
            state.attempts,
            replica.spec.name,
            replica.spec.region,
            decision,
            withhold=attempt.withhold,
            fallbacks=() if not self._fallbacks else self._next_best(evaluation, now),
        )

    def dispatch_moved(self, state: RequestState, replica: Replica, *, now: float) -> Dispatch:
        """Reserve `replica`, where a gateway has sent the request by itself at an unknown time."""
        evaluation = self.evaluate(state.request, self._fleet.eligibility.pinned(replica), now=now)
        # A prediction from now would be compared with a time from the gateway's dispatch.
        choice = replace(evaluation.choice, predicted_ttft_s=None, fallback=MOVED)
        evaluation = replace(evaluation, choice=choice, recorded=None)
        dispatch = self.dispatch(state, evaluation, now=now)
        attempt = self._table.find(dispatch.attempt_id)
        assert attempt is not None, "it is reserved"
        attempt.moved, attempt.outcomes = True, None
        return dispatch

    def _score_shadow(self, policy: Policy | None) -> Shadow | None:
        # A child of the Router's generator, which draws nothing from it: decisions are the same without the shadow.
        return None if policy is None else Shadow(policy, self._rng.spawn(1)[0])

    def _next_best(self, evaluation: Evaluation, now: float) -> tuple[str, ...]:
        return evaluation.next_best(self._fallbacks, self._fleet.all_loads(now=now).in_flight_requests)

    def _estimate_ttft(
        self, state: RequestState, replica: Replica, network: NetworkEstimate, now: float
    ) -> TtftEstimate:
        """Predict the parts of the TTFT before the reservation adds the request to the prefill queue."""
        first_s = state.first_dispatched_s
        assert first_s is not None, "it is being dispatched"
        others_s, queue = self._fleet.others_prefill_s(replica.slot), replica.prefill_queue
        return TtftEstimate(
            first_s - state.request.received_s,
            now - first_s,
            network.arrives_s - now + network.one_way_s if network.rtt_s == network.rtt_s else None,
            expected_queue_s(queue, others_s, arrives_s=network.arrives_s, one_way_s=network.one_way_s, now=now),
            network.prior_s * queue.speed.factor,
        )

    def _make_decision(
        self, state: RequestState, evaluation: Evaluation, cached_tokens: int, estimate: TtftEstimate, now: float
    ) -> Decision:
        eligible, choice = evaluation.eligible, evaluation.choice
        # By position: more than fifteen keywords go through a dict, which takes 2 us: 2 % of a request in the Router.
        # A test compares the order with the fields.
        decision = Decision(
            state.request.request_id,
            state.attempts,  # attempt
            now,  # decided_s
            self.policy.name,  # policy
            self.policy.unit,
            self.weights.version,  # weights_version
            self.weights.values_by_name,  # weights
            eligible.names,  # candidates
            choice.row,
            choice.terms,
            choice.cost,
            state.request.prompt_tokens,
            cached_tokens,  # estimated_cached_tokens
            evaluation.best_cached_tokens,
            choice.predicted_ttft_s,
            estimate,
            choice.fallback,
            eligible.excluded,
            evaluation.shadow,
            state.request.client,
            state.request.recorded_model,  # model
            evaluation.features,
            self._learning.names,  # feature_names
            self._learning.model_version,
            evaluation.cache_source,
            eligible.sampled_from,
        )
        self._decisions.append(decision)
        return decision

    def _reserve(
        self,
        state: RequestState,
        replica: Replica,
        decision: Decision,
        network: NetworkEstimate,
        now: float,
    ) -> Attempt:
        attempt = Attempt(
            f"{state.request.request_id}/{state.attempts}",
            state,
            replica,
            dispatched_s=now,
            decision=decision,
            rtt_s=network.rtt_s,
            arrival_s=network.arrives_s,
            prior_s=network.prior_s,
            outcomes=self._learning.outcomes,
        )
        self._table.open(attempt)
        attempt.confirmed_prefix = self._index.insert(state.request.blocks, replica.slot, state.request.client)
        replica.attempts += 1
        replica.health.attempt_started(attempt.attempt_id)
        if self.on_reserved is not None:
            self.on_reserved(attempt)
        if self.on_sent is not None:
            self.on_sent(attempt)
        return attempt
