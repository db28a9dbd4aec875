"""A request after its dispatch: results of attempts, retries, and the sample at its end.

Owns what a result means for the request, its replica and the logs. Leaves counted load to `dispatch.in_flight`, and the
prefix index to `dispatch.prefix_updates`.

- `Refusals` decides whether a 4xx or a short answer is the client's fault or the replica's.
- `write_outcome` and `record_outcome` leave a row for a training.
- `RequestLifecycle` applies the results.

Theory of operation. A request ends with its last attempt or with its answer, and then leaves one sample. While two
attempts are open, a result without an answer leaves the request to the other. Retries are within a budget. A retry is
free where no replica worked in vain: no connection was made, or it broke while other replicas are healthy, as when a
replica dies. Where no replica is healthy, a broken connection costs like any failure, and `poison` ends the retries of
a prompt that replicas go down under. An engine that is busy refuses at once: the request goes to one that is not, as
often as there is one, free of charge. See `Refusals` for a 4xx. A request of which an engine stores something is tried
again only where no engine can have begun it: a second answer would be stored too, and billed.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan

from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.hedging import RatioBudget
from gorgo.core.dispatch.in_flight import (
    RETRY_AFTER_S,
    Attempt,
    PoisonPrompts,
    RequestState,
    cause_of,
    no_replica,
    poison_prompt,
    status_of,
    to_sample,
    upstream_error,
)
from gorgo.core.dispatch.prefix_updates import PrefixUpdater
from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.replica import SUSPECT_AFTER, HealthState, Replica
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.limits import ClientQuotas, RouterLimits
from gorgo.core.messages.actions import Action, Cancel, Continue, Dispatch, Forward, Reject, RetryAction
from gorgo.core.messages.request import COMPLETED, REFUSALS, AttemptResult, Outcome, RouteRequest, SampleRing
from gorgo.core.numeric import nan_if_none
from gorgo.core.training.candidate_table import prefix_group
from gorgo.core.training.learning import OutcomeRecorder, RecordedOutcome
from gorgo.core.training.outcomes import OutcomeRow

# Doubtful results: whether a 4xx, a 5xx, a timeout or a short answer is the client's fault or the replica's.
#
# Theory of operation. A wrong key, path or model name of the replica is a 401, 403, 404 or 405 to every client, at
# once, and a replica that fails fast looks free. The same statuses can be the client's own fault, and then every
# replica refuses alike. So such a request is tried elsewhere, and the verdict is by the same request: if another
# replica answers it, the ones that refused it do not serve such requests. That is a failure of a replica which has
# answered nothing else of late; any other one gets no such request for a while (`RefusedKinds`). A key that the client
# sent and the replica refuses with 401 or 403 is no failure of the replica; its own key is. If all refuse, the
# client gets the last refusal, and no replica is to blame.
#
# A 5xx or a timeout before any content is judged at the end of its request: it is the replica's failure, unless
# several replicas failed the request alike. Then it is the request that is at fault, and no replica is to blame. Until
# that end `request_filter.OpenFailures` has the failure. A 501 is a refusal.
#
# A 4xx that names the context length says that the request is too long for this replica. It is tried once on a replica
# with a longer context, if there is one, and no replica is to blame.
#
# Any other 4xx is the client's fault until a replica has answered with nothing else `SUSPECT_AFTER` times in a row.
# Answers of one token or none are judged alike: after so many in a row they are withheld, and tried elsewhere. A
# replica whose short answers others repeat is trusted with the next `TRUSTED_ANSWERS`.
# `core.fleet.request_filter.ShortAnswers` has those of a gateway, whose client has the answer.


#: The failure of a request without an answer in time.
TIMEOUT = "timeout"
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

    __slots__ = ("_budget", "_kinds", "_open_failures", "_short_answers")

    def __init__(self, limits: RouterLimits, request_filter: RequestFilter) -> None:
        self._kinds, self._short_answers = request_filter.refused_kinds, request_filter.short_answers
        self._open_failures = request_filter.open_failures
        self.set_limits(limits)

    def set_limits(self, limits: RouterLimits) -> None:
        self._budget = RatioBudget(
            share=limits.retry_budget_ratio, minimum=limits.retry_budget_minimum, window_s=limits.retry_budget_window_s
        )

    def record_request(self, *, now: float) -> None:
        self._budget.record(now=now)

    def on_result(self, attempt: Attempt, outcome: Outcome, *, now: float) -> bool:
        """Record the end of an attempt. Return whether it is doubtful: another replica may answer the request."""
        replica, streamed = attempt.replica, attempt.request.streamed
        if outcome.too_long:
            # It says nothing of the replica but its context. A longer one is tried once.
            if attempt.state.too_long_for is not None or not outcome.unsent:
                return False
            attempt.state.too_long_for = replica
            return True
        if outcome.short:
            if replica.short_answers[streamed] <= 0:
                replica.short_answers_s[streamed] = now
            replica.short_answers[streamed] += 1
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
        status = None if outcome.short else outcome.status
        attempt.state.refused.append((attempt, status))
        if status is not None:
            self._open_failures.add(replica)
        return True

    def may_retry(self, attempt: Attempt, *, now: float) -> bool:
        """Take a retry out of the budget. Free after a refusal that was proven to be the replica's fault."""
        return attempt.replica.refusal is not None or self._budget.try_spend(now=now)

    def on_first_token(self, attempt: Attempt, *, now: float) -> None:
        """Blame the replicas that refused a request which `attempt` answers."""
        if attempt.dispatched_s >= attempt.replica.client_errors_s:
            attempt.replica.client_errors, attempt.replica.refusal = 0, None
        self._kinds.on_answer(attempt.replica, attempt.request, now=now)
        if attempt.state.refused:
            attempt.state.refused = self._blame(attempt.state, now, short=False)
        if attempt.state.failed:
            self.judge_failures(attempt.state, now=now, answered=True)

    def on_answer(self, attempt: Attempt, *, short: bool | None, now: float) -> None:
        """Blame the replicas that refused what `attempt` answers; trust those whose short answers it repeats."""
        self.on_first_token(attempt, now=now)
        replica, state = attempt.replica, attempt.state
        if not short:
            streamed = state.request.streamed
            if short is not None and attempt.dispatched_s >= replica.short_answers_s[streamed]:
                if replica.short_answers[streamed] > 0:
                    replica.short_answers[streamed] = 0
                self._short_answers.on_longer(replica)
            if state.refused:
                state.refused = self._blame(state, now, short=True)
        elif state.refused:
            _trust(attempt, *(refused for refused, _ in state.refused))
            self.on_closed(state)

    def on_forward(self, state: RequestState) -> None:
        """Trust replicas that all answered a request as shortly."""
        short = [entry[0] for entry in state.refused if entry[1] is None]
        if len(short) > 1:
            _trust(*short)

    def on_closed(self, state: RequestState) -> None:
        """Await no other replica's answer to a request any longer."""
        for refused, status in state.refused:
            if status is not None:
                self._open_failures.remove(refused.replica)
        state.refused = []

    def on_failure(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Leave a failure to the end of its request. Return False for one that no request can cause by itself."""
        kind = outcome.status if outcome.status is not None else outcome.error
        if kind is None or (isinstance(kind, str) and kind != TIMEOUT):
            return False
        attempt.state.failed.append((attempt, kind))
        self._open_failures.add(attempt.replica)
        return True

    def is_request_at_fault(self, state: RequestState, outcome: Outcome) -> bool:
        """Return whether several replicas failed the request like this."""
        return len({attempt.replica for attempt, kind in state.failed if kind in (outcome.status, outcome.error)}) > 1

    def judge_failures(self, state: RequestState, *, now: float, answered: bool, refused: bool = False) -> None:
        """Blame the replicas of failures: all if one `answered`; else those that failed alone, none if `refused`."""
        failed, state.failed = state.failed, []
        for attempt, kind in failed:
            self._open_failures.remove(attempt.replica)
            others = {other.replica for other, same in failed if same == kind} - {attempt.replica}
            if answered or not (others or refused):
                health = attempt.replica.health
                by, streamed = "answers" if health.breaks_answers else "attempts", state.request.streamed
                health.attempt_failed(dispatched_s=attempt.dispatched_s, now=now, by=by, streamed=streamed)

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
                self._open_failures.remove(replica)
                replica.refusal = status
                if not self._kinds.on_proven(replica, state.request, status, now=now):
                    continue
            by = "answers" if status is None else "refusals"
            streamed = state.request.streamed
            replica.health.attempt_failed(dispatched_s=refused.dispatched_s, now=now, by=by, streamed=streamed)
        return left


def _trust(*attempts: Attempt) -> None:
    for attempt in attempts:
        attempt.replica.short_answers[attempt.request.streamed] = -TRUSTED_ANSWERS


# What an ended attempt leaves for a training: a row in the ring of the learner that decided on it, and in the log.


def write_outcome(attempt: Attempt, outcome: Outcome, *, now: float) -> None:
    """Add the attempt's row, if its end says something of the time to a first token."""
    features, row = attempt.features, to_row(attempt, outcome, now=now)
    if attempt.outcomes is not None and features is not None and row is not None:
        attempt.outcomes.append(features, row)


def record_outcome(recorder: OutcomeRecorder | None, attempt: Attempt, outcome: Outcome, *, now: float) -> None:
    """Pass the attempt to the log of outcomes, if there is one and was one at its decision."""
    table = attempt.recorded
    if recorder is not None and table is not None:
        row, e2e_s = to_row(attempt, outcome, now=now), now - attempt.dispatched_s
        recorder.record_outcome(
            RecordedOutcome(attempt.decision, table, attempt.probability, outcome.result, e2e_s, row)
        )


def to_row(attempt: Attempt, outcome: Outcome, *, now: float) -> OutcomeRow | None:
    """Return the row of an attempt that ends at `now`.

    `None` for a stream without content and for a request that the engine refuses as wrong: their ends are no bound of a
    time to first token. An answer in one piece has the time to its end instead. Any other end without a first token is
    censored.
    """
    request, first_s = attempt.request, attempt.first_token_s
    whole = not request.streamed and outcome.result is COMPLETED
    if first_s is None and not whole and outcome.result in (COMPLETED, AttemptResult.UPSTREAM_4XX):
        return None
    e2e_s = now - attempt.dispatched_s
    if not request.streamed:
        first_s = None  # none is visible, whatever a gateway reports
    return OutcomeRow(
        attempt.dispatched_s,
        e2e_s if first_s is None else first_s - attempt.dispatched_s,
        e2e_s,
        float(request.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens),
        slot=attempt.replica.slot,
        censored=first_s is None and not whole,
        tpot_s=nan if not request.streamed else _tpot_s(attempt, outcome, now),
        output_tokens=nan_if_none(outcome.output_tokens),
        cached_tokens=nan_if_none(outcome.cached_tokens),
        group=prefix_group(request),
        unstreamed=not request.streamed,
    )


def _tpot_s(attempt: Attempt, outcome: Outcome, now: float) -> float:
    """Return the mean time per token after the first, of a whole answer of two or more."""
    tokens, first_s = outcome.output_tokens, attempt.first_token_s
    if first_s is None or tokens is None or tokens < 2 or outcome.result is not COMPLETED:
        return nan
    return (now - first_s) / (tokens - 1)


#: Attempts of one request in all, continued parts of its answer included.
_MOST_PARTS = 16
#: Errors of an outcome: the connection was never made, or it ended before an answer.
_REFUSED = "connect_failed"
_NEVER_SENT = frozenset({_REFUSED, "connect_timeout", "connections_exhausted"})
_FAILED = "disconnected"
#: End of an attempt whose gateway went on to another replica; it does not say why.
SERVED_ELSEWHERE = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="served_elsewhere")
#: The same where a refusal was among the tries, so that the client may be in the wrong: it says nothing of the replica.
REFUSED_ELSEWHERE = Outcome(AttemptResult.UPSTREAM_4XX, error="refused_elsewhere", sent=True)


class RequestLifecycle:
    """Applies results of attempts.

    Parameters
    ----------
    dispatcher, prefix_updater, quotas, samples:
        The Router's.
    request_filter:
        The candidates of a retry; results of attempts begin and end its pauses.
    poison:
        Takes broken connections, and ends the retries of a prompt that replicas go down under.
    limits:
        May be replaced by `set_limits`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        prefix_updater: PrefixUpdater,
        quotas: ClientQuotas,
        samples: SampleRing,
        request_filter: RequestFilter,
        poison: PoisonPrompts,
        limits: RouterLimits,
    ) -> None:
        self._dispatcher = dispatcher
        self._prefix_updater = prefix_updater
        self._quotas = quotas
        self._samples = samples
        self._filter = request_filter
        self._poison = poison
        self._busy = request_filter.busy
        self._refusals = Refusals(limits, request_filter)
        self.set_limits(limits)

    def set_limits(self, limits: RouterLimits) -> None:
        self._max_attempts = limits.max_attempts
        self._max_continuations = limits.continuations
        self._slo_e2e_s = limits.overload.slo_e2e_s
        self._refusals.set_limits(limits)
        self._retries = RatioBudget(
            share=limits.retry_budget_ratio, minimum=limits.retry_budget_minimum, window_s=limits.retry_budget_window_s
        )

    def record_request(self, *, now: float) -> None:
        """Add a request to the retry budgets."""
        self._retries.record(now=now)
        self._refusals.record_request(now=now)

    def on_first_token(self, attempt: Attempt, *, now: float) -> list[Action]:
        """Take the attempt as the answer; return Cancels for the request's other attempts."""
        attempt.replica.health.attempt_succeeded(
            dispatched_s=attempt.dispatched_s, now=now, whole=False, streamed=attempt.request.streamed
        )
        self._refusals.on_first_token(attempt, now=now)
        self._busy.on_answer(attempt.replica)
        self._prefix_updater.on_first_token(attempt, now=now)
        state = attempt.state
        if attempt.beside is None and (state.answered or state.closed):
            return []
        state.answered = True
        return _stop_others(attempt)

    def on_resumed(self, attempt: Attempt) -> list[Action]:
        """Leave the answer to the attempt that had it; return a Cancel for the continuation beside it."""
        actions = _stop_others(attempt)
        self._withdraw(attempt.state)
        return actions

    def on_released(self, attempt: Attempt) -> None:
        """Take the request out of its client's requests in flight; its outcome follows."""
        state = attempt.state
        if state.has_quota and not state.released:
            state.released = True
            self._quotas.on_released(state.request.client)

    def on_result(self, attempt: Attempt, outcome: Outcome, *, now: float) -> tuple[RetryAction | None, list[Action]]:
        """Update the replica's health, then retry or close the request; `attempt` has left the in-flight table.

        Return the request's next action, and Cancels for its other attempts.
        """
        state, result = attempt.state, outcome.result
        refused = self._record_end(attempt, outcome, now)
        unanswered = outcome.status is None and result is AttemptResult.DEADLINE_EXCEEDED
        if state.closed or self._is_left_to_another(attempt, outcome):
            return None, []
        is_open = any(not other.superseded for other in state.open_attempts)
        if is_open and (unanswered or refused or not result.final):
            return None, []
        # Of two attempts at the rest, another one may have been dispatched since.
        state.request, state.partial_tokens = attempt.request, attempt.partial_tokens
        if outcome.continue_on and not is_open:
            continued = self._continue(attempt, outcome, now)
            if continued is not None:
                return continued, []
        if outcome.sent or not (unanswered or refused or result.retryable):
            self._close(attempt, outcome, status_of(outcome), now)
            return Forward(state.request.request_id) if outcome.unsent else None, _stop_others(attempt)
        action: RetryAction
        if refused:
            action = self._retry_refused(attempt, now)
        else:
            action = upstream_error(state, outcome) if unanswered else self._retry(attempt, outcome, now)
        if isinstance(action, Reject) and any(status is None for _, status in state.refused):
            # A short answer is better than none.
            action = Forward(state.request.request_id)
            outcome = Outcome(COMPLETED, status=200)
        elif isinstance(action, Reject) and outcome.unsent and self._refusals.is_request_at_fault(state, outcome):
            action = Forward(state.request.request_id)
        if not isinstance(action, Dispatch):
            self._close(attempt, outcome, action.status if isinstance(action, Reject) else status_of(outcome), now)
        return action, []

    def on_served_elsewhere(
        self, attempt: Attempt, replica: Replica | None, outcome: Outcome, *, now: float
    ) -> Dispatch | None:
        """End `attempt`, and reserve its request on `replica`, where a gateway has sent it by itself.

        An unknown replica, `None`, closes the request. While another attempt is open, that one is the answer.
        """
        state = attempt.state
        self._record_end(attempt, outcome, now)
        if state.closed or state.open_attempts:
            return None
        if replica is None:
            self._close(attempt, outcome, 502, now)
            return None
        return self._dispatcher.dispatch_moved(state, replica, now=now)

    # -- helpers

    def _record_end(self, attempt: Attempt, outcome: Outcome, now: float) -> bool:
        """Write what the attempt leaves, and update its replica. Return whether another one may answer instead."""
        if attempt.outcomes is not None:
            write_outcome(attempt, outcome, now=now)
        if attempt.recorded is not None:
            record_outcome(self._dispatcher.recorder, attempt, outcome, now=now)
        if outcome.short or outcome.result is not COMPLETED:
            self._note_failure(attempt, outcome, now)
        refused = self._refusals.on_result(attempt, outcome, now=now)
        if attempt.learn is not None and outcome.result is COMPLETED and not refused:
            attempt.learn(now)
        self._update_health(attempt, outcome, now, refused=refused)
        return refused

    def _note_failure(self, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """Keep what may eject its replica, in words, before it does."""
        result, replica, spent_s = outcome.result, attempt.replica, now - attempt.dispatched_s
        if result is COMPLETED:
            replica.last_failure = f"an answer of one token or none after {spent_s:.2g} s"
            return
        refused = result is AttemptResult.UPSTREAM_4XX and outcome.status in REFUSALS
        if refused or result is AttemptResult.BUSY or result.failed:
            replica.last_failure = cause = cause_of(outcome, spent_s)
            attempt.state.causes.append(f"{replica.spec.name}: {cause}")

    def _update_health(self, attempt: Attempt, outcome: Outcome, now: float, *, refused: bool) -> None:
        """Update the replica's concurrency limit and health, and the prefix index."""
        replica, streamed = attempt.replica, attempt.request.streamed
        replica.health.attempt_ended(attempt.attempt_id)
        if outcome.result is COMPLETED and self._slo_e2e_s is not None and not attempt.moved:
            replica.concurrency.on_completed(
                attempt.checkpoint,
                stayed_s=now - attempt.dispatched_s,
                waited_s=attempt.dispatched_s - attempt.request.received_s,
                goal_s=self._slo_e2e_s,
                tokens=outcome.output_tokens,
            )
        if refused or outcome is REFUSED_ELSEWHERE:
            pass  # What another replica makes of the request decides.
        elif outcome.result is COMPLETED:
            if streamed and attempt.first_token_s is not None:
                spent_s = now - attempt.first_token_s
                replica.decode_times.on_stream(spent_s, tokens=outcome.output_tokens, itl_s_p95=outcome.itl_s_p95)
                if outcome.output_tokens:
                    replica.kv_demand.on_answer(
                        attempt.decision.estimate.prefill_s + spent_s,
                        prompt_tokens=attempt.uncached_tokens,
                        output_tokens=outcome.output_tokens,
                    )
            if replica.token_gap is not None:
                _learn_gap(attempt, outcome, now)
            whole = outcome.short is not None
            replica.health.attempt_succeeded(dispatched_s=attempt.dispatched_s, now=now, whole=whole, streamed=streamed)
            self._refusals.on_answer(attempt, short=outcome.short, now=now)
            self._busy.on_answer(replica)
        elif outcome.result is AttemptResult.UPSTREAM_4XX:
            # The client's fault, which proves the replica alive.
            replica.health.attempt_succeeded(dispatched_s=attempt.dispatched_s, now=now, whole=False, streamed=streamed)
        elif _is_engine_busy(outcome):
            self._busy.on_busy(replica, dispatched_s=attempt.dispatched_s, retry_after_s=outcome.retry_after_s, now=now)
        elif outcome.result is AttemptResult.FAILED_BEFORE_CONTENT:
            if not self._refusals.on_failure(attempt, outcome):
                by = "answers" if replica.health.breaks_answers else "attempts"
                replica.health.attempt_failed(dispatched_s=attempt.dispatched_s, now=now, by=by, streamed=streamed)
        elif outcome.result is AttemptResult.FAILED_AFTER_CONTENT:
            replica.health.answer_broken(dispatched_s=attempt.dispatched_s, now=now, streamed=streamed)
        if outcome.error == _FAILED:
            self._poison.on_broken(attempt.request, replica, dispatched_s=attempt.dispatched_s, now=now)
        elif outcome.error == _REFUSED:
            self._poison.on_down(replica, now=now)
        elif outcome.result is COMPLETED:
            self._poison.on_answered(attempt.request, now=now)
        replica.failures += outcome.result.failed
        self._prefix_updater.on_result(attempt, outcome, now=now)

    def _retry(self, attempt: Attempt, outcome: Outcome, now: float) -> Dispatch | Reject:
        """Return the Dispatch to the next best replica, or the Reject for the client."""
        state = attempt.state
        if outcome.error == _FAILED and self._poison.stops(state.request, attempt.replica, now=now):
            return poison_prompt(state.request, self._poison.known(state.request, now=now))
        if not (state.request.idempotent or _is_unbegun(outcome)):
            return upstream_error(state, outcome)
        left = self._untried(state, now)
        if _is_engine_busy(outcome) and any(self._busy.is_open(replica, now=now) for replica in left.replicas):
            return self._dispatch(state, left, now)
        may = state.attempts < self._max_attempts and left.replicas
        if may and (_is_free_retry(outcome, left) or self._retries.try_spend(now=now)):
            return self._dispatch(state, left, now)
        if outcome.error == _REFUSED and not _has_healthy_replica(left):
            # No replica listens: an outage, not a failed request, and worth another try.
            return no_replica(state.request, RETRY_AFTER_S, state.causes)
        return upstream_error(state, outcome, self._open_in_s(state, now))

    def _continue(self, attempt: Attempt, outcome: Outcome, now: float) -> Continue | None:
        """Return the dispatch of the rest of an answer that broke off; `None` if it ends here.

        It is no retry: the replica has worked, and its client waits in the middle of a sentence. So it takes nothing
        out of the budget, and is bounded by `continuations`.
        """
        state = attempt.state
        if outcome.error == _FAILED and self._poison.stops(state.request, attempt.replica, now=now):
            return None
        if outcome.result is AttemptResult.SUPERSEDED:
            # Its stream was moved: the replica has not failed, and may have the answer again once it is back.
            state.tried_replicas.discard(attempt.replica.spec.name)
        if outcome.result is COMPLETED:
            state.whole = outcome  # its counts alone are missing, and may stay so
        return self._dispatch_rest(attempt, outcome.continue_on, outcome.partial_tokens, now)

    def can_continue(self, attempt: Attempt, replicas: frozenset[str], *, now: float) -> bool:
        """Return whether one of `replicas` could go on with the answer of an attempt that runs."""
        others = attempt.state.open_attempts
        if (
            attempt.superseded
            or attempt.state.closed
            or any(not each.superseded for each in others if each is not attempt)
        ):
            return False
        return self._takers(attempt, replicas, 0, now) is not None

    def continue_beside(
        self, attempt: Attempt, replicas: frozenset[str], partial_tokens: int, *, now: float
    ) -> Continue | None:
        """Dispatch the rest of an answer whose attempt stays open; `None` if it stays there alone.

        It counts as a continuation unless the answer goes on where it was.
        """
        if not self.can_continue(attempt, replicas, now=now):
            return None
        action = self._dispatch_rest(attempt, replicas, partial_tokens, now)
        assert action is not None, "it can be continued"
        attempt.state.open_attempts[-1].beside = attempt.attempt_id
        return action

    def _dispatch_rest(
        self, attempt: Attempt, replicas: frozenset[str], partial_tokens: int, now: float
    ) -> Continue | None:
        state, left = attempt.state, self._takers(attempt, replicas, partial_tokens, now)
        if left is None:
            return None
        request, candidates = left
        if state.first_token_s is None:
            state.first_token_s = attempt.first_token_s
        state.request, state.partial_tokens = request, partial_tokens
        state.continuations += 1
        return Continue(request.request_id, self._dispatch(state, candidates, now))

    def _is_left_to_another(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Return whether the answer is left to the other one of an attempt and its continuation."""
        state, result = attempt.state, outcome.result
        if not state.open_attempts:
            return False
        if attempt.superseded:
            if result is AttemptResult.SUPERSEDED and state.continuations:  # no hedge that lost
                state.tried_replicas.discard(attempt.replica.spec.name)
            return True
        if attempt.first_token_s is None and any(each.attempt_id == attempt.beside for each in state.open_attempts):
            state.continuations -= 1  # it has not begun, and the answer may go on where it was
            return True
        has_rest = any(each.beside == attempt.attempt_id for each in state.open_attempts)
        return has_rest and result is AttemptResult.FAILED_AFTER_CONTENT

    def _withdraw(self, state: RequestState) -> None:
        """Count a continuation that has not begun no longer: its replica may be asked another time."""
        for each in state.open_attempts:
            if each.beside is not None and each.first_token_s is None:
                each.beside = None
                state.continuations -= 1
                state.withdrawn += 1
                state.tried_replicas.discard(each.replica.spec.name)

    def _takers(
        self, attempt: Attempt, replicas: frozenset[str], partial_tokens: int, now: float
    ) -> tuple[RouteRequest, CandidateSet] | None:
        """Return the request for the rest of an answer and which of `replicas` can have it; `None` if none can."""
        state = attempt.state
        if state.continuations >= self._max_continuations or state.attempts >= _MOST_PARTS:
            return None
        if self._quotas.is_spent(attempt.request.client, now=now):
            return None
        allowed = attempt.request.replicas
        request = replace(
            attempt.request,
            prompt_tokens=attempt.request.prompt_tokens + partial_tokens - attempt.partial_tokens,
            # The estimate of tokens by bytes is the prompt's.
            text_bytes=None,
            replicas=replicas if allowed is None else replicas & allowed,
        )
        left = self._filter.untried(request, state.tried_replicas, now)
        return (request, left) if left.replicas else None

    def _retry_refused(self, attempt: Attempt, now: float) -> Dispatch | Forward:
        """Return the Dispatch to another replica, as long as there is one and budget, or the refusal for the client."""
        state = attempt.state
        left = self._untried(state, now)
        is_open = any(self._busy.is_open(replica, now=now) for replica in left.replicas)
        if is_open and self._refusals.may_retry(attempt, now=now):
            return self._dispatch(state, left, now)
        self._refusals.on_forward(state)
        return Forward(state.request.request_id)

    def _untried(self, state: RequestState, now: float) -> CandidateSet:
        left = self._filter.untried(state.request, state.tried_replicas, now)
        short = state.too_long_for
        return left if short is None else self._filter.longer(left, state.request, short)

    def _dispatch(self, state: RequestState, left: CandidateSet, now: float) -> Dispatch:
        return self._dispatcher.dispatch(state, self._dispatcher.evaluate(state.request, left, now=now), now=now)

    def _open_in_s(self, state: RequestState, now: float) -> float:
        """Return when the first busy replica of the request ends its pause."""
        candidates = self._filter.eligible(state.request, now).replicas
        pauses_s = [pause_s for each in candidates if (pause_s := self._busy.remaining_s(each, now=now)) is not None]
        return max(RETRY_AFTER_S, min(pauses_s, default=0.0))

    def _close(self, attempt: Attempt, outcome: Outcome, status: int, now: float) -> None:
        state = attempt.state
        if state.whole is not None and outcome.result is not COMPLETED:
            outcome, status = state.whole, status_of(state.whole)
        state.closed = True
        if state.open_attempts:
            self._withdraw(state)
        self._refusals.on_closed(state)
        if state.failed:
            refused = outcome.result is AttemptResult.UPSTREAM_4XX
            self._refusals.judge_failures(state, now=now, answered=False, refused=refused)
        if attempt.state.has_quota:
            request = attempt.request
            has_content = attempt.first_token_s is not None or state.first_token_s is not None
            used = outcome.used_tokens(request.prompt_tokens, has_content=has_content)
            charge = self._quotas.charge if attempt.state.released else self._quotas.release
            charge(request.client, tokens=request.prompt_tokens - attempt.partial_tokens, used=sum(used))
        if self._samples.capacity:
            self._samples.append(to_sample(attempt, outcome, status, seq=self._samples.next_seq, now=now))


def _stop_others(attempt: Attempt) -> list[Action]:
    others = attempt.state.open_attempts
    if not others:
        return []
    request_id, actions = attempt.request.request_id, list[Action]()
    for other in others:
        if other is not attempt:
            other.superseded = True
            actions.append(Cancel(request_id, other.attempt_id))
    return actions


def _learn_gap(attempt: Attempt, outcome: Outcome, now: float) -> None:
    """Let the replica learn its time per output token from a streamed answer."""
    tokens, first_s = outcome.output_tokens, attempt.first_token_s
    if tokens is not None and tokens > 1 and first_s is not None and attempt.request.streamed:
        attempt.replica.learn_gap(now - first_s, tokens=tokens, mark=attempt.decode_mark)


def _is_engine_busy(outcome: Outcome) -> bool:
    """Return whether the engine is busy, and not this proxy without a free connection."""
    return outcome.result is AttemptResult.BUSY and outcome.status in (429, 503)


def _is_unbegun(outcome: Outcome) -> bool:
    """Return whether no engine can have begun the request, and so stored nothing of it."""
    return outcome.error in _NEVER_SENT or outcome.result is AttemptResult.BUSY


def _is_free_retry(outcome: Outcome, left: CandidateSet) -> bool:
    """Return whether no replica worked in vain: not reached, or disconnected while another is healthy."""
    return outcome.error in _NEVER_SENT or (outcome.error == _FAILED and _has_healthy_replica(left))


def _has_healthy_replica(left: CandidateSet) -> bool:
    return any(replica.health.state is HealthState.HEALTHY for replica in left.replicas)
