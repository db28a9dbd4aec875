"""What becomes of a request after its dispatch: who answers it, where it goes next, and its one sample at the end.

Owns the ends of attempts: what they say of the replica, and what they mean for the request. Before the dispatch a
request is `front_door`'s; that load is released once is `ledger`'s; the words of a refusal are `endings`'.

Theory of operation. A request lives until its last attempt ends or one of them is its answer, and then leaves one
sample. While two are open, what ends without an answer leaves it to the other. Retries are within a budget, except
where nobody has worked in vain: no connection came to be, or it broke while others are in good standing, as when a
replica dies. Where nobody is, connections that break are what the replicas do, and cost as any failure.
"""

from __future__ import annotations

from collections.abc import Callable

from gorgo.core.actions import Action, Cancel, Dispatch, Reject
from gorgo.core.beliefs import Beliefs
from gorgo.core.budgets import ShareBudget
from gorgo.core.clients import ClientBook
from gorgo.core.eligible import Eligible
from gorgo.core.endings import RETRY_AFTER_S, failed, no_replica, sample_of, status_of
from gorgo.core.fleet import Fleet
from gorgo.core.health import HealthState
from gorgo.core.ledger import Attempt, RequestState
from gorgo.core.limits import RouterLimits
from gorgo.core.member import Member
from gorgo.core.placing import Placer
from gorgo.core.request import Ending, Outcome
from gorgo.core.samples import SampleRing
from gorgo.core.slow_start import SlowStart

#: Endings of an attempt after which the request may go to another replica.
_RETRIED = (Ending.FAILED_BEFORE_CONTENT, Ending.BUSY)
#: Endings of an attempt that are not the request's while another attempt is open.
_LEAVES_IT_TO_OTHERS = (*_RETRIED, Ending.SUPERSEDED)
#: Endings that prove the replica alive: it answered, even if with a 4xx.
_ANSWERED = (Ending.COMPLETED, Ending.REFUSED)
#: Words of an outcome for a connection that never came to be, and for one that ended before an answer.
_REFUSED = "connect_failed"
_NEVER_ASKED = frozenset({_REFUSED, "connect_timeout", "connections_exhausted"})
_BROKE = "disconnected"


class Lives:
    """The later part of every request's life.

    Parameters
    ----------
    fleet, placer, beliefs, slow_start, clients, samples:
        The Router's.
    elsewhere:
        Who may serve a request now that has not had it yet.
    limits:
        May be replaced by `set_limits`.
    """

    def __init__(
        self,
        fleet: Fleet,
        placer: Placer,
        beliefs: Beliefs,
        slow_start: SlowStart,
        clients: ClientBook,
        samples: SampleRing,
        elsewhere: Callable[[RequestState, float], Eligible],
        limits: RouterLimits,
    ) -> None:
        self._fleet = fleet
        self._placer = placer
        self._beliefs = beliefs
        self._slow_start = slow_start
        self._clients = clients
        self._samples = samples
        self._elsewhere = elsewhere
        self.set_limits(limits)

    def set_limits(self, limits: RouterLimits) -> None:
        self._max_attempts = limits.max_attempts
        self._retries = ShareBudget(
            share=limits.retry_share, minimum=limits.retry_minimum, window_s=limits.retry_window_s
        )

    def asked(self, *, now: float) -> None:
        """One more request, of which a share may be retried."""
        self._retries.note(now=now)

    def first_token(self, attempt: Attempt, *, now: float) -> list[Action]:
        """Its first content is there: whoever else is at the request may stop."""
        self._answered(attempt, now)
        self._beliefs.first_token(attempt)
        state = attempt.state
        if state.answer is not None or state.closed:
            return []
        state.answer = attempt
        return _stop_others(attempt)

    def ended(self, attempt: Attempt, outcome: Outcome, *, now: float) -> list[Action]:
        """Judge the replica, and go on with the request or close it. `attempt` is not open any more."""
        self._judge(attempt, outcome, now)
        state = attempt.state
        if state.closed or (state.open and (outcome.ending in _LEAVES_IT_TO_OTHERS or _unanswered(outcome))):
            return []
        if outcome.ending not in _RETRIED and not _unanswered(outcome):
            self._close(attempt, outcome, status_of(outcome), now)
            return _stop_others(attempt)
        action = failed(state, outcome) if _unanswered(outcome) else self._retry(attempt, outcome, now)
        if isinstance(action, Reject):
            self._close(attempt, outcome, action.status, now)
        return [action]

    def readmitted(self, member: Member, *, was_healthy: bool, now: float) -> None:
        """Something good was heard of a replica: if that lets it in again, it starts slowly."""
        if not was_healthy and member.health.state is HealthState.HEALTHY:
            self._slow_start.begin(member, now=now)

    # -- helpers

    def _judge(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """What the end says about the replica and about the belief that its prompt is cached there."""
        member = attempt.member
        self._fleet.health_changed(member.health.attempt_ended(attempt.attempt_id))
        if outcome.ending in _ANSWERED:
            self._answered(attempt, now)
        elif outcome.ending is Ending.FAILED_BEFORE_CONTENT:
            self._fleet.health_changed(member.health.attempt_failed(dispatched_s=attempt.dispatched_s, now=now))
        member.failures += outcome.ending in (Ending.FAILED_BEFORE_CONTENT, Ending.FAILED_AFTER_CONTENT)
        self._beliefs.ended(attempt, outcome)

    def _answered(self, attempt: Attempt, now: float) -> None:
        member = attempt.member
        healthy = member.health.state is HealthState.HEALTHY
        self._fleet.health_changed(member.health.attempt_succeeded(dispatched_s=attempt.dispatched_s, now=now))
        self.readmitted(member, was_healthy=healthy, now=now)

    def _retry(self, attempt: Attempt, outcome: Outcome, now: float) -> Dispatch | Reject:
        """The next best replica, or the error that the client gets."""
        state = attempt.state
        left = self._elsewhere(state, now)
        may = state.attempts < self._max_attempts and left.members
        if may and (_costs_nothing(outcome, left) or self._retries.spend(now=now)):
            return self._placer.dispatch(state, self._placer.look(state.request, left, now=now), now=now)
        if outcome.error == _REFUSED and not _someone_is_well(left):
            # Nobody listens: that is no bad answer but an outage, and whoever comes again is tried again.
            return no_replica(state.request, RETRY_AFTER_S)
        return failed(state, outcome)

    def _close(self, attempt: Attempt, outcome: Outcome, status: int, now: float) -> None:
        attempt.state.closed = True
        if attempt.state.counted:
            self._clients.leave(attempt.state.request.client)
        self._samples.append(sample_of(attempt, outcome, status, seq=self._samples.next_seq, now=now))


def _stop_others(attempt: Attempt) -> list[Action]:
    request_id = attempt.state.request.request_id
    return [Cancel(request_id, other.attempt_id) for other in attempt.state.open if other is not attempt]


def _unanswered(outcome: Outcome) -> bool:
    """Its time was over before it had an answer: the client is still to be told."""
    return outcome.ending is Ending.OUT_OF_TIME and outcome.status is None


def _costs_nothing(outcome: Outcome, left: Eligible) -> bool:
    """The replica was never asked, or it is gone and somebody else is well."""
    return outcome.error in _NEVER_ASKED or (outcome.error == _BROKE and _someone_is_well(left))


def _someone_is_well(left: Eligible) -> bool:
    return any(member.health.state is HealthState.HEALTHY for member in left.members)
