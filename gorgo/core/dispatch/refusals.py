"""Refusals: whether a 4xx is the client's fault or the replica's.

Theory of operation. A wrong key, path or model name of the replica is a 401, 403, 404 or 405 to every client, at once,
and a replica that fails fast looks free. The same statuses can be the client's own fault, and then every replica
refuses alike. So such a request is tried elsewhere, and the verdict is by the same request: if another replica answers
it, the ones that refused it have failed. If all refuse, the client gets the last refusal, and no replica is to blame.

Any other 4xx is the client's fault until a replica has answered with nothing else `SUSPECT_AFTER` times in a row.
"""

from __future__ import annotations

from gorgo.core.dispatch.budget import RatioBudget
from gorgo.core.dispatch.in_flight import Attempt, RequestState
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import REFUSALS, AttemptResult, Outcome

#: Other 4xx in a row after which they may be the replica's fault.
SUSPECT_AFTER = 3


class Refusals:
    """Decides on attempts that ended with a 4xx of which nothing has been sent to the client.

    Parameters
    ----------
    limits:
        Of the retry budget. Refused requests have one of their own: clients that are in the wrong may not use up the
        retries of failed requests.
    """

    __slots__ = ("_budget",)

    def __init__(self, limits: RouterLimits) -> None:
        self.set_limits(limits)

    def set_limits(self, limits: RouterLimits) -> None:
        self._budget = RatioBudget(
            share=limits.retry_budget_ratio, minimum=limits.retry_budget_minimum, window_s=limits.retry_budget_window_s
        )

    def record_request(self, *, now: float) -> None:
        self._budget.record(now=now)

    def on_refusal(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Record a 4xx. Return whether another replica may answer the request."""
        replica = attempt.replica
        suspect = outcome.status in REFUSALS or replica.client_errors >= SUSPECT_AFTER
        replica.client_errors += 1
        if not (suspect and outcome.unsent and outcome.result is AttemptResult.UPSTREAM_4XX):
            return False
        attempt.state.refused.append((attempt, outcome.status))
        return True

    def may_retry(self, attempt: Attempt, *, now: float) -> bool:
        """Take a retry out of the budget. Free after a refusal that was proven to be the replica's fault."""
        return attempt.replica.refusal is not None or self._budget.try_spend(now=now)

    def on_answer(self, attempt: Attempt, *, now: float) -> None:
        """Blame the replicas that refused a request which `attempt` answers."""
        attempt.replica.client_errors, attempt.replica.refusal = 0, None
        if attempt.state.refused:
            _blame(attempt.state, now)


def _blame(state: RequestState, now: float) -> None:
    for refused, status in state.refused:
        replica = refused.replica
        replica.refusal = status
        replica.failures += 1
        replica.health.attempt_failed(dispatched_s=refused.dispatched_s, now=now, by="refusals")
    state.refused.clear()
