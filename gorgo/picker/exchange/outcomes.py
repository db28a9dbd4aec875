"""Outcomes of attempts behind Envoy: by what was seen of the answer, and by the entry of Envoy's access log.

Owns the rules beside those of the proxy (`live.request.judgement`). Nothing is retried: the client has the answer.
"""

from __future__ import annotations

from dataclasses import replace

from gorgo.core.messages.request import COMPLETED, AttemptResult, Outcome
from gorgo.core.record import record
from gorgo.core.stream import StreamEnd, Usage, end_of_stream, filled, is_json
from gorgo.live.http.headers import Header
from gorgo.live.request.judgement import failure_of, is_short_stream, is_short_usage, result_of_stream
from gorgo.picker.exchange.answer import ObservedAnswer

#: Longest time from the first token to the end of a stream that may have no second one: less than an engine's step, s.
QUICK_S = 0.01
_DISCONNECTED = Outcome(AttemptResult.CLIENT_DISCONNECTED, sent=True)


@record
class LogEntry:
    """What the access log says of one exchange.

    Parameters
    ----------
    exchange_id:
        This picker's.
    status:
        Sent to the client; 0 if none was.
    disconnected:
        The client ended it.
    failure:
        Why the replica's answer is missing or incomplete, in the words of the proxy; `None` for a complete one.
    first_body_s:
        Request received to the first byte of the answer's body; `None` without one.
    usage:
        As the answer reports it.
    served:
        Address of the replica that answered last.
    headers:
        Of the answer, those that are logged.
    is_local:
        Envoy has answered itself.
    """

    exchange_id: str
    status: int
    disconnected: bool = False
    failure: str | None = None
    first_body_s: float | None = None
    usage: Usage | None = None
    served: str | None = None
    headers: tuple[Header, ...] = ()
    is_local: bool = False


def outcome_of_entry(entry: LogEntry, answer: ObservedAnswer, *, ended_s: float | None = None) -> Outcome:
    """Return the outcome of an exchange whose end, at `ended_s`, the access log describes."""
    status = entry.status or None
    if entry.failure is not None:
        return _failed(entry.failure, status, has_content=answer.has_content)
    if entry.disconnected or status is None or entry.is_local:
        return Outcome(AttemptResult.CLIENT_DISCONNECTED, status=status, sent=True)
    failure = failure_of(status, entry.headers)
    if failure is not None:
        return failure
    if status >= 400:
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status, sent=True)
    if answer.request is not None and not answer.chunks and entry.first_body_s is None and entry.usage is None:
        # Nobody has seen a byte of it. No prompt is answered by nothing.
        return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=status, error="truncated", sent=True)
    found = _outcome(_result(answer, answer.error_status), answer, status, entry.usage)
    if found.short is False and found.result is COMPLETED and found.output_tokens is None:
        return replace(found, short=_is_quick(answer, ended_s))
    return found


def outcome_of_answer(answer: ObservedAnswer, *, carried: bool = False) -> Outcome:
    """Return the outcome by the answer alone; `carried`: all of it has passed through the call, else its beginning."""
    if not (answer.complete if carried else answer.chunks):
        return _DISCONNECTED
    if answer.status:
        failure = failure_of(answer.status, answer.headers)
        if failure is not None:
            return failure
        if answer.status >= 400:
            return Outcome(AttemptResult.UPSTREAM_4XX, status=answer.status, sent=True)
    error_status = answer.error_status
    result, status, error = _result(answer, error_status), answer.status or 200, None
    if result is AttemptResult.UPSTREAM_4XX:
        status = error_status or status
    if carried and result is COMPLETED and answer.is_stream:
        end = end_of_stream(answer.route, answer.tail)
        if end is StreamEnd.MISSING:
            return _failed("truncated", status, has_content=answer.has_content)
        answer.gaps.drop_end(answer.route)
        if end is StreamEnd.ERROR:
            result = AttemptResult.FAILED_AFTER_CONTENT if answer.has_content else AttemptResult.FAILED_BEFORE_CONTENT
            error = "error_event"
    return _outcome(result, answer, status, None, error=error)


def _failed(reason: str, status: int | None, *, has_content: bool) -> Outcome:
    """Return the outcome of an answer that Envoy could not have, or not to its end."""
    if reason == "connections_exhausted":
        result = AttemptResult.BUSY
    elif reason == "total_timeout":
        result = AttemptResult.DEADLINE_EXCEEDED
    else:
        result = AttemptResult.FAILED_AFTER_CONTENT if has_content else AttemptResult.FAILED_BEFORE_CONTENT
    # Envoy's own status is not the replica's.
    return Outcome(result, status=status if has_content else None, error=reason, sent=True)


def _result(answer: ObservedAnswer, error_status: int | None) -> AttemptResult:
    """Return the result of an answer with a status below 400."""
    if answer.is_stream:
        return result_of_stream(error_status)
    if error_status is None:
        return COMPLETED
    failure = failure_of(error_status)
    return AttemptResult.UPSTREAM_4XX if failure is None else failure.result


def _outcome(
    result: AttemptResult, answer: ObservedAnswer, status: int, usage: Usage | None, *, error: str | None = None
) -> Outcome:
    # One dialect reports the prompt's at the beginning of a stream, and the rest at its end.
    usage = filled(usage, _usage_of(answer))
    return Outcome(
        result,
        status=status,
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        output_tokens=None if usage is None else usage.output_tokens,
        itl_s_p95=answer.gaps.p95(),
        error=error,
        sent=True,
        short=_shortness(answer, usage) if result is COMPLETED else False,
    )


def _usage_of(answer: ObservedAnswer) -> Usage | None:
    """Return the usage that the answer reports. The beginning of a stream does not say how long it gets."""
    usage = answer.usage()
    if usage is None or answer.complete or not answer.is_stream:
        return usage
    return Usage(usage.prompt_tokens, usage.cached_tokens, None)


def _is_quick(answer: ObservedAnswer, ended_s: float | None) -> bool:
    """Return whether a stream of unknown length, whose beginning alone is read, has ended at its first token."""
    request, first_s = answer.request, answer.last_content_s
    if request is None or not request.may_be_short or answer.complete or ended_s is None or first_s is None:
        return False
    return ended_s - first_s < QUICK_S


def _shortness(answer: ObservedAnswer, usage: Usage | None) -> bool | None:
    """Return whether the answer is doubtfully short, as `Outcome.short`. Without its end or its usage it is not."""
    request, body = answer.request, answer.body
    if request is None:
        return False
    if not answer.complete:
        # An own Envoy's picker reads the beginning alone: the access log has the usage.
        return is_short_usage(usage, may_be_short=request.may_be_short)
    if answer.is_stream:
        return is_short_stream(answer.route, answer.tail, usage, may_be_short=request.may_be_short)
    if body is not None and not is_json(body):
        return True
    return is_short_usage(usage, may_be_short=request.may_be_short)
