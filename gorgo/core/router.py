"""The Router: events in with `now`, actions out. A synchronous object without sockets, clock or randomness of its own.

Owns the requests: the order of work within an event of an attempt, and time. Each other side of a Router is an object
that it has: `replicas` takes what is learned of the fleet, `caches` takes reports of caches, and `peers` those of other
routers; `settings` has what may be replaced while it runs, and `view` what operators and metrics read. These objects
and the parts below them are built here, in one place: `admission` says what is dispatched, queued or rejected;
`dispatch` has evaluation, reservation, retries and hedges; `fleet` the replicas and their columns; `prefix` what is
known of caches; the policy makes the choice.

Theory of operation: `submit` selects and reserves before it returns, so two requests never see the same empty replica
and no lock is needed. An attempt ends once; later reports about it are ignored. A request ends with its last attempt
and leaves one sample. A dispatched prompt enters the prefix index at once, so that a burst of siblings finds it. The
first token confirms it; an attempt that ends without one retracts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gorgo.core.admission import AdmissionController, Preconditions
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.hedging import Hedger
from gorgo.core.dispatch.in_flight import InFlightTable, PoisonPrompts, RequestState
from gorgo.core.dispatch.lifecycle import SERVED_ELSEWHERE, RequestLifecycle
from gorgo.core.dispatch.prefix_updates import CacheAccuracy, PrefixUpdater
from gorgo.core.fleet.fleet import Fleet, RegionOutages
from gorgo.core.fleet.replica import HealthState, Replica, ReplicaSpec
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.limits import ClientQuotas, RouterLimits
from gorgo.core.messages.actions import Action, AdmissionAction, Continue, Dispatch, Reject, RetryAction
from gorgo.core.messages.request import Outcome, RouteRequest, SampleRing
from gorgo.core.peers.group import PeerGroup
from gorgo.core.peers.records import PeerStatus
from gorgo.core.policy.interface import Policy, required_index, validate_shadow
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.index import Answers, PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.prefix.residency import FoundShares
from gorgo.core.prompt.fingerprint import BytesPerToken
from gorgo.core.prompt.media import MediaTokens
from gorgo.core.router_parts import RouterCaches, RouterReplicas, RouterSettings, RouterView
from gorgo.core.training.learning import Learning

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
        Scores each decision beside `policy` and changes none (`policy.interface`). Raises `ConfigError` if it has no
        cost, or if the two read different prefix indexes.

    Example
    -------
    >>> import numpy as np
    >>> from gorgo.core.messages.request import AttemptResult
    >>> from gorgo.core.fleet.replica import ReplicaSpec
    >>> from gorgo.policies.registry import make_policy
    >>> replicas = [ReplicaSpec("near", "us-ashburn"), ReplicaSpec("far", "ap-seoul")]
    >>> router = Router(replicas, make_policy("gorgo"), rng=np.random.default_rng(0), boot_id="example")
    >>> router.replicas.on_probe("near", 0.002, now=0.0), router.replicas.on_probe("far", 0.180, now=0.0)
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
        if shadow is not None:
            validate_shadow(policy, shadow)
        self.boot_id = boot_id
        #: Time of the last event.
        self._now = float("-inf")

        # The replicas, and what is in flight there.
        self._fleet = fleet = Fleet(
            stale_after_s=limits.stale_after_s,
            rtt_ewma_alpha=limits.rtt_ewma_alpha,
            panic_threshold=limits.panic_threshold,
            ejection=limits.outlier,
        )
        #: Changes of the fleet, for the shell to take after each event; bounded.
        self.fleet_events = fleet.events
        self._table = table = InFlightTable(fleet)
        self._filter = request_filter = RequestFilter(fleet, slow_start_s=limits.slow_start_s)
        self._regions = regions = RegionOutages(fleet, window_s=limits.region_window_s)

        # What is known of their caches.
        index_kind = required_index(policy, shadow)
        #: Which prompts each replica has been sent.
        self.index = index = PrefixIndex(max_blocks=limits.max_index_blocks, bounded=index_kind != "published")
        self._feeds = feeds = KvFeeds(max_blocks=limits.max_index_blocks, used=index_kind == "events")
        found_shares, answers, accuracy = FoundShares(), Answers(), CacheAccuracy()
        self._prefix_updater = updater = PrefixUpdater(
            index, fleet, found_shares, answers, feeds, accuracy, block_tokens=limits.block_tokens
        )

        # What decides, and what accounts for the decision.
        #: Which policy learns, its outcomes and its model.
        self.learning = Learning(policy, shadow)
        #: What clients use of their quotas.
        self.quotas = ClientQuotas(limits.clients)
        #: One sample per request that has ended, the newest.
        self.samples = SampleRing(boot_id, limits.max_samples)
        #: Learned from the usage of responses; the shell estimates prompt tokens by it.
        self.token_ratios = BytesPerToken()
        #: The same for images, audio and video.
        self.media_tokens = MediaTokens()
        self._dispatcher = dispatcher = Dispatcher(
            fleet,
            table,
            index,
            found_shares,
            answers,
            feeds,
            updater,
            policy=policy,
            weights=Weights.of(policy.weight_specs, version=1) if weights is None else weights,
            rng=rng,
            shadow=shadow,
            learning=self.learning,
            limits=limits,
        )
        poison = PoisonPrompts()
        self._refuse = Preconditions(fleet, request_filter, self.quotas, poison).refuse
        self._admission = admission = AdmissionController(fleet, dispatcher, request_filter, limits.overload)
        self._queued = admission.queue.requests
        self._hedger = Hedger(
            dispatcher, admission.saturation, request_filter, limits.hedging, max_attempts=limits.max_attempts
        )
        fleet.on_ejected = self._on_ejected
        self._lifecycle = RequestLifecycle(
            dispatcher, updater, self.quotas, self.samples, request_filter, poison, limits
        )

        # The replicas join before the settings begin to count what they prefill and decode.
        updater.on_fleet_change(fleet.replace(replicas))

        # Its other sides.
        self.settings = RouterSettings(
            dispatcher,
            self.learning,
            table,
            index,
            feeds,
            admission,
            limits=limits,
            apply_limits=self._apply_limits,
        )
        self.view = RouterView(
            fleet,
            table,
            request_filter.slow_start,
            regions,
            index,
            found_shares,
            updater,
            dispatcher,
            poison,
            admission,
            self.samples,
        )
        self.peers = PeerGroup(
            fleet,
            table,
            found_shares,
            index,
            feeds,
            updater,
            dispatcher,
            status=self._peer_status,
            record_time=self._record_time,
            drain_queue=self._drain_queue,
        )
        self.caches = RouterCaches(fleet, feeds, index, self.peers, accuracy, dispatcher)
        self.replicas = RouterReplicas(
            fleet,
            table,
            request_filter,
            regions,
            admission,
            self.peers,
            index=index,
            feeds=feeds,
            prefix_updater=updater,
            poison=poison,
            drain_queue=self._drain_queue,
        )

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
        unfinished = len(self._table) + len(self._queued)
        refusal = self._refuse(request, unfinished=unfinished, most=self.settings.limits.max_in_flight, now=now)
        if refusal is not None:
            return refusal, others
        if self._hedger.on:
            self._hedger.record_request(now=now)
        self._lifecycle.record_request(now=now)
        state = RequestState(request, self.quotas.counts(request.client))
        action = self._admission.admit(state, now=now)
        if isinstance(action, Reject):
            self._release_quota(state)
        return action, others

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
        reported = self._table.find(attempt_id)
        ahead = reported.replica.prefill_queue.before(attempt_id) if reported is not None and self._hedger.on else []
        attempt = self._table.first_token(attempt_id, now=now)
        if attempt is None:
            return []
        if ahead and attempt.request.streamed:
            waiting = [other for key in ahead if (other := self._table.find(key)) is not None]
            self._hedger.on_superseded(waiting, now=now)
        return [*self._lifecycle.on_first_token(attempt, now=now), *self._drain_queue(now)]

    def on_released(self, attempt_id: str, *, now: float) -> list[Action]:
        """Release the load of an attempt that has ended, before its outcome is known. `on_finish` follows.

        Return dispatches that became possible. An attempt that is not open is ignored.
        """
        self._now = now
        attempt = self._table.release(attempt_id, now=now)
        if attempt is None:
            return []
        self._lifecycle.on_released(attempt)
        return self._drain_queue(now)

    def on_finish(self, attempt_id: str, outcome: Outcome, *, now: float) -> tuple[RetryAction | None, list[Action]]:
        """Release the attempt's load, update the replica's health, and retry or close the request.

        Return the request's next Dispatch, or a Reject for a failure that cannot be retried; `None` for any other end
        or while another attempt is open. Then actions for other attempts and requests, to be done after it. An attempt
        that was released ended then.
        """
        self._now = now
        attempt = self._table.close(attempt_id, now=now)
        if attempt is None:
            return None, []
        request = attempt.request
        outcome = outcome.bounded(request, attempt.replica.context_tokens(request.model))
        if request.text_bytes is not None and outcome.prompt_tokens is not None:
            self._learn_tokens(request, request.text_bytes, outcome.prompt_tokens)
        ended_s = now if attempt.released_s is None else attempt.released_s
        retry, others = self._lifecycle.on_result(attempt, outcome, now=ended_s)
        others += self._drain_queue(now)
        return retry, others

    def can_continue(self, attempt_id: str, replicas: frozenset[str], *, now: float) -> bool:
        """Return whether one of `replicas` could go on with the answer of an open attempt, if it ended now."""
        attempt = self._table.find(attempt_id)
        return attempt is not None and self._lifecycle.can_continue(attempt, replicas, now=now)

    def continue_beside(
        self, attempt_id: str, replicas: frozenset[str], partial_tokens: int, *, now: float
    ) -> Continue | None:
        """Dispatch the rest of an answer to one of `replicas`, while its attempt stays open.

        The client has `partial_tokens` of it. The first content of the new attempt makes it the answer, and returns a
        Cancel for the old one. `on_resumed` does the reverse, and the end of one leaves the answer to the other. `None`
        if the answer cannot go on elsewhere: it stays where it is.
        """
        self._now = now
        attempt = self._table.find(attempt_id)
        if attempt is None:
            return None
        return self._lifecycle.continue_beside(attempt, replicas, partial_tokens, now=now)

    def on_resumed(self, attempt_id: str, *, now: float) -> list[Action]:
        """Record that an answer goes on at its attempt before the continuation beside it has begun; cancel that."""
        self._now = now
        attempt = self._table.find(attempt_id)
        return [] if attempt is None else self._lifecycle.on_resumed(attempt)

    def bounded(self, request: RouteRequest, replica: str, outcome: Outcome) -> Outcome:
        """Return an outcome with no larger counts than `request` can have used on `replica`, for records of it."""
        registered = self._fleet.replicas.get(replica)
        return outcome.bounded(request, None if registered is None else registered.context_tokens(request.model))

    def _learn_tokens(self, request: RouteRequest, text_bytes: int, prompt_tokens: int) -> None:
        """Learn of a report how many tokens a text has, or beside a text its media."""
        if not request.media:
            self.token_ratios.learn(request.model, text_bytes=text_bytes, prompt_tokens=prompt_tokens)
            return
        text_tokens = text_bytes / self.token_ratios.ratio(request.model)
        media_tokens = prompt_tokens - text_tokens
        self.media_tokens.on_reported(request.model, request.media, tokens=media_tokens, text_tokens=text_tokens)

    def learned_tokens(self) -> dict[str, list[list[Any]]]:
        """Return as JSON what reports have taught of prompts' lengths; empty if nothing."""
        learned = {"text": self.token_ratios.entries(), "media": self.media_tokens.entries()}
        return {name: entries for name, entries in learned.items() if entries}

    def restore_tokens(self, learned: Mapping[str, object]) -> None:
        """Take in `learned_tokens` of a former process. Raises `ValueError` for any other value."""
        self.token_ratios.restore(learned.get("text", []))
        self.media_tokens.restore(learned.get("media", []))

    def on_served_elsewhere(
        self, attempt_id: str, replica: str, outcome: Outcome = SERVED_ELSEWHERE, *, now: float
    ) -> tuple[Dispatch | None, list[Action]]:
        """Record that a gateway retried by itself: the attempt ended with `outcome`, and `replica` has its request.

        `SERVED_ELSEWHERE`: the gateway does not say why; that is a failure. `REFUSED_ELSEWHERE`: a replica has refused
        the request, by a 4xx, so the request may be wrong, and the attempt does not count.
        Return the attempt that counts there from now on, with the first token that was reported already. `None` if the
        attempt has ended, if another one is open, or if the replica is unknown: that closes the request.
        """
        self._now = now
        failed = self._table.close(attempt_id, now=now)
        if failed is None:
            return None, []
        served = self._fleet.replicas.get(replica)
        dispatch = self._lifecycle.on_served_elsewhere(failed, served, outcome, now=now)
        others: list[Action] = []
        if dispatch is not None and failed.first_token_s is not None:
            moved = self._table.first_token(dispatch.attempt_id, now=failed.first_token_s)
            assert moved is not None, "it is reserved"
            others += self._lifecycle.on_first_token(moved, now=now)
        return dispatch, [*others, *self._drain_queue(now)]

    # -- time

    def next_timer(self) -> float | None:
        """Return when to call `handle_timer`; any event can change it."""
        due_s = self._fleet.timers.next_s
        # Of most requests none is watched and none queued.
        if self._hedger.watched:
            due_s = _earlier(due_s, self._hedger.next_timer_s())
        return _earlier(due_s, self._admission.next_timer_s(now=self._now)) if self._queued else due_s

    def handle_timer(self, *, now: float) -> list[Action]:
        """Expire stale values and back-offs, hedge late requests, drain the queue. Safe to call at any time."""
        self._now = now
        due_s = self._fleet.timers.next_s
        if due_s is not None and due_s <= now:
            self._fleet.handle_timer(now=now)
        return [*self._hedger.due_hedges(now=now), *self._drain_queue(now)]

    def check(self) -> None:
        """Assert every invariant of the indexes, in-flight table, prefill queues and outcomes; visits all."""
        self.index.check()
        self._feeds.check()
        self._table.check()
        if self.learning.outcomes is not None:
            self.learning.outcomes.check()
        self.peers.check()

    # -- helpers

    def _run_timers(self, now: float) -> list[Action]:
        """Do what is due first: decisions then do not depend on how late the shell's timer is."""
        self._now = now
        due_s = self.next_timer()
        return self.handle_timer(now=now) if due_s is not None and due_s <= now else []

    def _record_time(self, now: float) -> None:
        self._now = now

    def _drain_queue(self, now: float) -> list[Action]:
        """Dispatch or reject queued requests: a replica may have capacity again."""
        self._now = now
        if not self._queued:
            return []
        actions: list[Action] = []
        for state, action in self._admission.drain_queue(now=now):
            if isinstance(action, Reject):
                self._release_quota(state)
            actions.append(action)
        return actions

    def _on_ejected(self, replica: Replica, *, now: float) -> None:
        if replica.health.probe_down:
            self._hedger.on_ejected(self._table.unanswered((replica,)), now=now)

    def _release_quota(self, state: RequestState) -> None:
        """Release the client's quota of a request that was not dispatched."""
        if state.has_quota:
            self.quotas.release(state.request.client, tokens=state.request.prompt_tokens)

    def _apply_limits(self, limits: RouterLimits) -> None:
        """Hand other limits to every part; the number of retained decisions and samples stays."""
        self._fleet.set_limits(
            stale_after_s=limits.stale_after_s,
            rtt_ewma_alpha=limits.rtt_ewma_alpha,
            panic_threshold=limits.panic_threshold,
            ejection=limits.outlier,
        )
        self._dispatcher.set_limits(limits)
        self._admission.set_limits(limits.overload)
        self._hedger.set_limits(limits.hedging, max_attempts=limits.max_attempts)
        self._lifecycle.set_limits(limits)
        self._filter.slow_start.ramp_s = limits.slow_start_s
        self._regions.window_s = limits.region_window_s
        self.quotas.set_rules(limits.clients)
        self.index.resize(limits.max_index_blocks)
        self._feeds.set_max_blocks(limits.max_index_blocks)
        self._prefix_updater.block_tokens = limits.block_tokens
        self._prefix_updater.resize_all()

    def _peer_status(self) -> PeerStatus:
        """Return what peers read of this Router beside its load."""
        replicas = self._fleet.replicas.items()
        return PeerStatus(
            self.settings.policy.name,
            self.settings.weights.version,
            self.settings.frozen,
            self.learning.model_digest,
            tuple(name for name, replica in replicas if replica.draining),
            tuple(name for name, replica in replicas if replica.health.state is HealthState.EJECTED),
        )


def _earlier(one_s: float | None, other_s: float | None) -> float | None:
    return other_s if one_s is None or (other_s is not None and other_s < one_s) else one_s
