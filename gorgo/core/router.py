"""The Router: events in with `now`, actions out. A synchronous object without sockets, clock or randomness of its own.

Owns the order of work within an event of a request; `router_replicas` has events of replicas and peers, `router_caches`
reports of caches, `router_state` what is set and read from outside. Its parts, built in `wiring`, own the rest:
`admission` what is dispatched, queued or rejected; `dispatch` evaluation, reservation, retries and hedges; `fleet`
replicas and their columns; `prefix` the prefix index; the policy the choice.

Theory of operation: `submit` selects and reserves before it returns, so two requests never see the same empty replica
and no lock is needed. An attempt ends once; later reports about it are ignored. A request ends with its last attempt
and leaves one sample. A dispatched prompt enters the prefix index at once, so that a burst of siblings finds it. The
first token confirms it; an attempt that ends without one retracts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gorgo.core.dispatch.in_flight import RequestState
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, AdmissionAction, Dispatch, Reject, RetryAction
from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.router_replicas import RouterReplicas
from gorgo.core.wiring import build_parts

_DEFAULTS = RouterLimits()


class Router(RouterReplicas):
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
        super().__init__(parts, boot_id=boot_id, limits=limits)
        self._hedger = parts.hedger
        self._lifecycle = parts.lifecycle
        self._refuse = parts.preconditions.refuse

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
        refusal = self._refuse(request, unfinished=unfinished, most=self.limits.max_in_flight, now=now)
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
        request = attempt.state.request
        if request.text_bytes is not None and outcome.prompt_tokens is not None:
            self.token_ratios.learn(request.model, text_bytes=request.text_bytes, prompt_tokens=outcome.prompt_tokens)
        ended_s = now if attempt.released_s is None else attempt.released_s
        own, others = self._lifecycle.on_result(attempt, outcome, now=ended_s)
        others += self._drain_queue(now)
        return own, others

    def on_served_elsewhere(
        self, attempt_id: str, replica: str, *, now: float, refused: bool = False
    ) -> tuple[Dispatch | None, list[Action]]:
        """Record that a gateway retried by itself: the attempt has failed, and `replica` serves its request.

        `refused`: that one refuses it too, by a 4xx, so the request may be wrong, and the attempt does not count.
        Return the attempt that counts there from now on, with the first token that was reported already. `None` if the
        attempt has ended, if another one is open, or if the replica is unknown: that closes the request.
        """
        self._now = now
        failed = self._table.close(attempt_id, now=now)
        if failed is None:
            return None, []
        served = self._fleet.replicas.get(replica)
        dispatch = self._lifecycle.on_served_elsewhere(failed, served, refused=refused, now=now)
        others: list[Action] = []
        if dispatch is not None and failed.first_token_s is not None:
            moved = self._table.first_token(dispatch.attempt_id, now=failed.first_token_s)
            assert moved is not None, "it is reserved"
            others += self._lifecycle.on_first_token(moved, now=now)
        return dispatch, [*others, *self._drain_queue(now)]

    # -- time

    def next_timer(self) -> float | None:
        """Return when to call `handle_timer`; any event can change it."""
        due_s, hedge_s = self._fleet.next_timer(), self._hedger.next_timer_s()
        if hedge_s is not None and (due_s is None or hedge_s < due_s):
            due_s = hedge_s
        drain_s = self._admission.next_timer_s(now=self._now) if self._queued else None
        return drain_s if drain_s is not None and (due_s is None or drain_s < due_s) else due_s

    def handle_timer(self, *, now: float) -> list[Action]:
        """Expire stale values and back-offs, hedge late requests, drain the queue. Safe to call at any time."""
        self._now = now
        due_s = self._fleet.next_timer()
        if due_s is not None and due_s <= now:
            self._fleet.handle_timer(now=now)
        return [*self._hedger.due_hedges(now=now), *self._drain_queue(now)]

    # -- helpers

    def _run_timers(self, now: float) -> list[Action]:
        """Do what is due first: decisions then do not depend on how late the shell's timer is."""
        self._now = now
        due_s = self.next_timer()
        return self.handle_timer(now=now) if due_s is not None and due_s <= now else []
