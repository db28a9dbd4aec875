"""What an ended attempt leaves for a training: a row in the ring of the learner that decided on it, and in the log."""

from __future__ import annotations

from math import nan

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.messages.request import COMPLETED, AttemptResult, Outcome
from gorgo.core.training.features import prefix_group
from gorgo.core.training.outcomes import OutcomeRow
from gorgo.core.training.recorder import OutcomeRecorder, RecordedOutcome


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
        recorder.record_outcome(RecordedOutcome(attempt.decision, table, outcome.result, e2e_s, row))


def to_row(attempt: Attempt, outcome: Outcome, *, now: float) -> OutcomeRow | None:
    """Return the row of an attempt that ends at `now`.

    `None` for an answer in one piece, for an answer without content and for a request that the engine refuses as
    wrong: their ends are no bound of a time to first token. Any other end without a first token is censored.
    """
    request, first_s = attempt.state.request, attempt.first_token_s
    if not request.streamed:
        return None
    if first_s is None and outcome.result in (COMPLETED, AttemptResult.UPSTREAM_4XX):
        return None
    e2e_s = now - attempt.dispatched_s
    return OutcomeRow(
        attempt.dispatched_s,
        e2e_s if first_s is None else first_s - attempt.dispatched_s,
        e2e_s,
        float(request.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens),
        slot=attempt.replica.slot,
        censored=first_s is None,
        tpot_s=_tpot_s(attempt, outcome, now),
        output_tokens=_known(outcome.output_tokens),
        cached_tokens=_known(outcome.cached_tokens),
        group=prefix_group(request),
    )


def _tpot_s(attempt: Attempt, outcome: Outcome, now: float) -> float:
    """Return the mean time per token after the first, of a whole answer of two or more."""
    tokens, first_s = outcome.output_tokens, attempt.first_token_s
    if first_s is None or tokens is None or tokens < 2 or outcome.result is not COMPLETED:
        return nan
    return (now - first_s) / (tokens - 1)


def _known(value: int | None) -> float:
    return nan if value is None else float(value)
