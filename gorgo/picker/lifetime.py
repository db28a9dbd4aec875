"""One exchange from its dispatch to its outcome.

Owns the replica in use, that each dispatch of the Router ends exactly once, what is read from the answer as it passes
(`ObservedAnswer`), and the rules that make an outcome of it. Leaves to the calls and the access log what of an answer
is seen, and by which message.

Theory of operation. Load is released when the call ends, by whatever means, or when the exchange has outlived its time.
Of an own Envoy the call carries no answer: its outcome is completed by the entry of the access log, which comes some ms
later or never. Without it the outcome is what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gorgo.core.dispatch.in_flight import status_of
from gorgo.core.dispatch.lifecycle import REFUSED_ELSEWHERE, SERVED_ELSEWHERE
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import COMPLETED, REFUSALS, AttemptResult, Outcome
from gorgo.core.record import record
from gorgo.core.stream import (
    FirstTokenDetector,
    StreamEnd,
    StreamState,
    Usage,
    UsageReader,
    end_of_stream,
    error_of_body,
    filled,
    has_end,
    is_json,
    lacks_answer,
    read_usage,
)
from gorgo.live.http.headers import Header, is_encoded, is_event_stream
from gorgo.live.request.parse import (
    Gaps,
    ParsedRequest,
    failure_of,
    is_comment,
    is_short_stream,
    is_short_usage,
    result_of_stream,
)
from gorgo.live.upstream.target import Target
from gorgo.picker.pending import PendingRequest
from gorgo.picker.protocol.messages import ServedBy
from gorgo.picker.state import PickerState

# What is seen of one replica's answer as it passes: its first token, an error instead of it, its usage, its end. It is
# read by the rules of the core. Bytes are not changed, and only both ends of an answer are retained.


#: Bytes of an answer in one piece that are retained to be judged: a larger one is no error.
BODY_BYTES = 64 * 1024


class ObservedAnswer:
    """One answer.

    Parameters
    ----------
    route:
        Path of the request, on which the form of a token depends.
    request:
        `None` for a request without a prompt, whose answer is not read.
    """

    __slots__ = (
        "_body",
        "_detector",
        "_events",
        "_tail",
        "chunks",
        "complete",
        "gaps",
        "has_content",
        "headers",
        "in_first_chunk",
        "request",
        "route",
        "size",
        "status",
    )

    def __init__(self, route: str, request: ParsedRequest | None) -> None:
        self.route = route
        self.request = request
        #: 0 before the head, or where only the access log has it.
        self.status = 0
        self.headers: Sequence[Header] = ()
        #: Whether it is a stream of events that can be read; by the request where no head is seen.
        self._events = request is not None and request.route.streamed
        self._detector: FirstTokenDetector | None = None
        self._tail: UsageReader | None = None
        self._body = bytearray()
        self.gaps = Gaps()
        self.size = self.chunks = 0
        #: The first token has come, and with the first bytes of the body.
        self.has_content = self.in_first_chunk = False
        #: All of it has passed.
        self.complete = False

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of readable events."""
        return self._events

    @property
    def body(self) -> bytes | None:
        """The whole body in one piece; `None` for a stream, and for one that is not retained to its end."""
        return bytes(self._body) if self.complete and not self._events and self.size <= BODY_BYTES else None

    @property
    def error_status(self) -> int | None:
        """Status of an error event before any content, or of an error that is the whole body."""
        if self._detector is not None:
            return self._detector.error_status
        body = self.body
        return None if body is None else error_of_body(body)

    @property
    def has_failed(self) -> bool:
        """Whether an error came instead of content."""
        return self.error_status is not None

    @property
    def last_content_s(self) -> float | None:
        """When the last content came, `None` before any."""
        return self.gaps.last_s if self.has_content else None

    @property
    def tail(self) -> bytes:
        """The last bytes of a stream."""
        return b"" if self._tail is None else self._tail.tail

    def read_head(self, status: int, headers: Sequence[Header]) -> None:
        """Read the head of the answer, where the call carries it."""
        self.status, self.headers = status, headers
        self._events = self.request is not None and status < 300 and is_event_stream(headers)
        if is_encoded(headers):
            self._events, self.request = False, None

    def feed(self, chunk: bytes, *, now: float, end: bool = False) -> bool:
        """Read a part of the body; return whether the first token is in it."""
        self.complete = self.complete or end
        if not chunk:
            return False
        self.chunks += 1
        self.size += len(chunk)
        if self.request is None:
            return False
        return self._read_event(chunk, now) if self._events else self._retain(chunk)

    def usage(self) -> Usage | None:
        """Return the usage that the answer reports; `None` before its end has come or without one."""
        if self._events:
            return None if self._tail is None else self._tail.usage()
        body = self.body
        return None if body is None else read_usage(body)

    @property
    def is_waiting(self) -> bool:
        """Whether a stream has shown neither content nor an error."""
        return self._events and not self.has_content and not self.has_failed

    def _retain(self, chunk: bytes) -> bool:
        if self.size <= BODY_BYTES:
            self._body += chunk
        return False

    def _read_event(self, chunk: bytes, now: float) -> bool:
        if self._tail is None:
            self._tail, self._detector = UsageReader(), FirstTokenDetector(self.route)
        self._tail.feed(chunk)
        if self.has_content:
            if not is_comment(chunk):
                self.gaps.add(chunk, now)
            return False
        assert self._detector is not None
        if self._detector.feed(chunk) is not StreamState.CONTENT:
            return False
        self.gaps.last_s = now
        self.has_content = True
        self.in_first_chunk = self.chunks == 1
        return True


# Outcomes of attempts behind Envoy: by what was seen of the answer, and by the entry of Envoy's access log. Nothing is
# retried: the client has the answer.


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
    body:
        Of a short answer in one piece, of which no call was made.
    served:
        Who answered last, and the tries before.
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
    body: bytes | None = None
    served: ServedBy | None = None
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
    outcome = _outcome(_result(answer, answer.error_status), answer, status, entry.usage)
    if outcome.short is False and outcome.result is COMPLETED and outcome.output_tokens is None:
        return replace(outcome, short=_is_quick(answer, ended_s))
    return outcome


def outcome_of_answer(answer: ObservedAnswer, *, carried: bool = False) -> Outcome:
    """Return the outcome by the answer alone; `carried`: all of it has passed through the call, else its beginning."""
    # An engine may break its connection behind the end of its answer, and a client may leave there.
    is_whole = answer.complete or (answer.is_stream and has_end(answer.route, answer.tail))
    if not (is_whole if carried else answer.chunks):
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
    if body is not None and (not is_json(body) or lacks_answer(answer.route, body)):
        return True
    return is_short_usage(usage, may_be_short=request.may_be_short)


def outcome_of_try(status: int) -> Outcome:
    """Return the outcome of a try that ended by `status`, after which Envoy has tried another replica."""
    return failure_of(status) or Outcome(AttemptResult.UPSTREAM_4XX, status=status, unsent=True)


class PickerExchange:
    """A dispatched request.

    Parameters
    ----------
    state:
        The running picker.
    pending:
        The request.
    dispatch:
        Its replica.
    has_entry:
        An entry of the access log follows its end.
    """

    __slots__ = (
        "_entry",
        "_has_entry",
        "_pending",
        "_state",
        "_target",
        "answer",
        "closed",
        "dispatch",
        "ended",
        "exchange_id",
        "expires_s",
        "replicas",
    )

    def __init__(self, state: PickerState, pending: PendingRequest, dispatch: Dispatch, *, has_entry: bool) -> None:
        self._state = state
        self._pending = pending
        self._has_entry = has_entry
        self._entry: LogEntry | None = None
        self.exchange_id = state.open_exchanges.next_id()
        #: Those that Envoy tries, in that order; empty where it is not known.
        self.replicas: tuple[str, ...] = ()
        #: What was seen of the answer.
        self.answer = ObservedAnswer(pending.head.path, pending.request)
        #: The call has ended, and the load is released.
        self.ended = False
        self.closed = False
        self._use(dispatch)
        self.expires_s = pending.record.received_s + self._target.deadlines.request_s
        state.open_exchanges.add(self)

    @property
    def client(self) -> str | None:
        """Return the name of the client's key."""
        return self._pending.record.client

    @property
    def target(self) -> Target:
        """The replica, as it was at the dispatch."""
        return self._target

    # -- the answer

    def feed(self, chunk: bytes, *, end: bool = False) -> None:
        """Read a part of the answer's body."""
        if self.closed:
            return
        state, answer, now = self._state, self.answer, self._state.routing.clock()
        is_first = not answer.chunks
        if answer.feed(chunk, now=now, end=end):
            record = self._pending.record
            now = now if record.ended_s is None else min(now, record.ended_s)
            state.routing.gateway.first_token(self.dispatch.attempt_id, now=now)
            if self._pending.has_prompt:
                record.first_content(self.dispatch, now=now)
        if is_first and chunk and answer.route == "/v1/responses":
            state.replicas.record_stored(self.dispatch, self._target, chunk, client=self._pending.client)

    def served_at(self, served: ServedBy) -> None:
        """Credit the replica that has answered, where the gateway has retried by itself."""
        replica = self._state.endpoints.replica(served.address)
        if replica is None or replica == self.dispatch.replica or self.closed:
            return
        for outcome, following in self._tries(replica, served):
            self._move(following, outcome)

    def _tries(self, replica: str, served: ServedBy) -> list[tuple[Outcome, str]]:
        """Return how each try before that of `replica` ended, and the replica of the next one.

        Envoy says of tries that failed which statuses came, and not whose. Where each try has one, they are those of
        the named replicas in their order; else the first try alone is known to have failed. If the last one refuses the
        request too, nothing is said of any.
        """
        named, status, tried = self.replicas, served.status, served.tried
        if 400 <= status < 500 and status != 429:
            return [(REFUSED_ELSEWHERE, replica)]
        if status >= 400 and tried[-1:] == (status,):
            tried = tried[:-1]
        if replica in named and len(tried) == (position := named.index(replica)):
            return list(zip(map(outcome_of_try, tried), named[1 : position + 1], strict=True))
        return [(SERVED_ELSEWHERE if REFUSALS.isdisjoint(tried) else REFUSED_ELSEWHERE, replica)]

    def _move(self, replica: str, outcome: Outcome) -> None:
        state, record, first = self._state, self._pending.record, self.dispatch
        second = state.routing.gateway.served_elsewhere(first, replica, outcome)
        if second is None:
            return
        if self._pending.has_prompt:
            record.attempt_ended(first, outcome)
            state.telemetry.metrics.retried(outcome.result.value)
        if not self.ended:
            self._target.release()
        self._use(second)
        if self.ended:
            state.routing.gateway.released(second)
            self._target.release()

    # -- its end

    def on_call_end(self, outcome: Outcome | None = None) -> None:
        """Release the load: the call has ended. Idempotent.

        `outcome` is that of an answer which the call carried; `None` where the access log completes it.
        """
        if self.ended:
            return
        self.ended = True
        self._pending.record.ended_s = self._state.routing.clock()
        self._target.release()
        if outcome is not None:
            self._close(outcome)
        elif self._entry is not None:
            self._complete(self._entry)
        elif self._has_entry:
            self._state.routing.gateway.released(self.dispatch)
            self._state.open_exchanges.await_entry(self)
        else:
            self.close()

    def complete(self, entry: LogEntry) -> None:
        """Complete the outcome by the entry of the access log, as soon as the call has ended."""
        if self.closed or self._entry is not None:
            return
        self._entry = entry
        if entry.served is not None:
            self.served_at(entry.served)
        if entry.body is not None and not self.answer.chunks:
            self.feed(entry.body, end=True)
        if entry.first_body_s is not None and self.answer.in_first_chunk:
            self._pending.record.ttft_s = entry.first_body_s
        if self.ended:
            self._complete(entry)

    def on_timeout(self) -> None:
        """End an exchange that has outlived its time."""
        self.on_call_end(Outcome(AttemptResult.DEADLINE_EXCEEDED, error="total_timeout"))

    def close(self) -> None:
        """Close an ended exchange by what is known of it."""
        self._close(outcome_of_answer(self.answer))

    # -- helpers

    def _complete(self, entry: LogEntry) -> None:
        self._close(outcome_of_entry(entry, self.answer, ended_s=self._pending.record.ended_s))

    def _use(self, dispatch: Dispatch) -> None:
        """Put the replica of a dispatch in use."""
        state = self._state
        self.dispatch = dispatch
        self._target = state.replicas.targets[dispatch.replica]
        self._target.acquire()
        self._pending.record.attempt_started(dispatch)
        if self._pending.has_prompt:
            state.telemetry.metrics.dispatched(dispatch.replica, dispatch.region, dispatch.decision)

    def _close(self, outcome: Outcome) -> None:
        if self.closed:
            return
        self.closed = True
        state, pending, dispatch = self._state, self._pending, self.dispatch
        if outcome.status == 404 and pending.request is not None and (model := pending.request.route.model) is not None:
            # For the next request: this one has its answer.
            state.routing.models.read_again(model, dispatch.replica, now=state.routing.clock())
        if not outcome.sent:
            outcome = replace(outcome, sent=True)
        state.routing.gateway.finish(dispatch, outcome)
        state.open_exchanges.remove(self)
        if pending.has_prompt:
            self._target.check_usage(dispatch, outcome)
            pending.record.attempt_ended(dispatch, outcome)
        disconnected = outcome.result is AttemptResult.CLIENT_DISCONNECTED
        pending.close(self._sent_status(outcome), disconnected=disconnected)

    def _sent_status(self, outcome: Outcome) -> int:
        """Return the status of the request log: Envoy's, but the outcome's of an answer that has begun and broke off.

        That is the proxy's, whose clients get such an answer as an error. A replica's own error in an answer of 200
        changes no status.
        """
        entry = self._entry
        if entry is None and (outcome.result is AttemptResult.UPSTREAM_4XX or outcome.error == "error_event"):
            return self.answer.status or 200
        if entry is None or not entry.status or self.answer.has_content or (entry.failure and entry.status < 400):
            return status_of(outcome)
        left = outcome.result is AttemptResult.CLIENT_DISCONNECTED
        return status_of(outcome) if left and not (entry.is_local and entry.status >= 400) else entry.status
