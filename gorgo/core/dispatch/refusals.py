"""Doubtful results: whether a 4xx or a short answer is the client's fault or the replica's.

Theory of operation. A wrong key, path or model name of the replica is a 401, 403, 404 or 405 to every client, at once,
and a replica that fails fast looks free. The same statuses can be the client's own fault, and then every replica
refuses alike. So such a request is tried elsewhere, and the verdict is by the same request: if another replica answers
it, the ones that refused it have failed. If all refuse, the client gets the last refusal, and no replica is to blame.

Any other 4xx is the client's fault until a replica has answered with nothing else `SUSPECT_AFTER` times in a row.
Answers of one token or none are judged alike: after so many in a row they are withheld, and tried elsewhere. A replica
whose short answers others repeat is trusted with the next `TRUSTED_ANSWERS`. `core.fleet.request_filter.ShortAnswers`
has those of a gateway, whose client has the answer.
"""

from __future__ import annotations

from gorgo.core.dispatch.budget import RatioBudget
from gorgo.core.dispatch.in_flight import Attempt, RequestState
from gorgo.core.fleet.replica import SUSPECT_AFTER
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import COMPLETED, REFUSALS, AttemptResult, Outcome

#: Bounds the retries of clients that want one token to one in thirty of their requests.
TRUSTED_ANSWERS = 30


class Refusals:
    """Decides on attempts that ended with a 4xx or a short answer of which nothing has been sent to the client.

    Parameters
    ----------
    limits:
        Of the retry budget. Such requests have one of their own: clients that are in the wrong may not use up the
        retries of failed requests.
    request_filter:
        Has the kinds of requests that replicas refuse, and the replicas whose short answers cannot be withheld.
    """

    __slots__ = ("_budget", "_kinds", "_short_answers")

    def __init__(self, limits: RouterLimits, request_filter: RequestFilter) -> None:
        self._kinds, self._short_answers = request_filter.refused_kinds, request_filter.short_answers
        self.set_limits(limits)

    def set_limits(self, limits: RouterLimits) -> None:
        self._budget = RatioBudget(
            share=limits.retry_budget_ratio, minimum=limits.retry_budget_minimum, window_s=limits.retry_budget_window_s
        )

    def record_request(self, *, now: float) -> None:
        self._budget.record(now=now)

    def on_result(self, attempt: Attempt, outcome: Outcome, *, now: float) -> bool:
        """Record the end of an attempt. Return whether it is doubtful: another replica may answer the request."""
        replica = attempt.replica
        if outcome.short:
            if replica.short_answers <= 0:
                replica.short_answers_s = now
            replica.short_answers += 1
            doubtful = True
            if outcome.sent:
                self._short_answers.on_short(replica, doubtful=attempt.withhold, now=now)
        elif outcome.result is COMPLETED:
            return False
        elif outcome.result is AttemptResult.UPSTREAM_4XX:
            doubtful = outcome.status in REFUSALS or replica.client_errors >= SUSPECT_AFTER
            if not replica.client_errors:
                replica.client_errors_s = now
            replica.client_errors += 1
        else:
            return False
        if not (doubtful and outcome.unsent):
            return False
        attempt.state.refused.append((attempt, None if outcome.short else outcome.status))
        return True

    def may_retry(self, attempt: Attempt, *, now: float) -> bool:
        """Take a retry out of the budget. Free after a refusal that was proven to be the replica's fault."""
        return attempt.replica.refusal is not None or self._budget.try_spend(now=now)

    def on_first_token(self, attempt: Attempt, *, now: float) -> None:
        """Blame the replicas that refused a request which `attempt` answers."""
        if attempt.dispatched_s >= attempt.replica.client_errors_s:
            attempt.replica.client_errors, attempt.replica.refusal = 0, None
        self._kinds.on_answer(attempt.replica, attempt.state.request)
        if attempt.state.refused:
            attempt.state.refused = self._blame(attempt.state, now, short=False)

    def on_answer(self, attempt: Attempt, *, short: bool | None, now: float) -> None:
        """Blame the replicas that refused what `attempt` answers; trust those whose short answers it repeats."""
        self.on_first_token(attempt, now=now)
        replica, state = attempt.replica, attempt.state
        if not short:
            if short is not None and attempt.dispatched_s >= replica.short_answers_s:
                replica.short_answers = min(replica.short_answers, 0)
                self._short_answers.on_longer(replica)
            if state.refused:
                state.refused = self._blame(state, now, short=True)
        elif state.refused:
            _trust(attempt, *(refused for refused, _ in state.refused))
            state.refused = []

    def on_forward(self, state: RequestState) -> None:
        """Trust replicas that all answered a request as shortly."""
        short = [entry[0] for entry in state.refused if entry[1] is None]
        if len(short) > 1:
            _trust(*short)

    def _blame(self, state: RequestState, now: float, *, short: bool) -> list[tuple[Attempt, int | None]]:
        """Blame the replicas of refusals, or of all results; return the others."""
        left: list[tuple[Attempt, int | None]] = []
        status: int | None
        for refused, status in state.refused:
            if status is None and not short:
                left.append((refused, status))
                continue
            replica = refused.replica
            replica.failures += 1
            if status is not None:
                replica.refusal = status
                self._kinds.on_proven(replica, state.request, now=now)
            by = "answers" if status is None else "refusals"
            replica.health.attempt_failed(dispatched_s=refused.dispatched_s, now=now, by=by)
        return left


def _trust(*attempts: Attempt) -> None:
    for attempt in attempts:
        attempt.replica.short_answers = -TRUSTED_ANSWERS
