"""One exchange from its dispatch to its outcome.

Owns the replica in use, and that each dispatch of the Router ends exactly once. What of an answer is seen, and by which
message, is the calls' and the access log's.

Theory of operation. Load is released when the call ends, by whatever means, or when the exchange has outlived its time.
Of an own Envoy the call carries no answer: its outcome is completed by the entry of the access log, which comes some
ms later or never. Without it the outcome is what is known.
"""

from __future__ import annotations

from dataclasses import replace

from gorgo.core.dispatch.outcomes import status_of
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.upstream.target import Target
from gorgo.picker.exchange.answer import ObservedAnswer
from gorgo.picker.exchange.outcomes import LogEntry, outcome_of_answer, outcome_of_entry
from gorgo.picker.exchange.pending import PendingRequest
from gorgo.picker.state import PickerState

#: Of an attempt after which the gateway has tried another replica.
_RETRIED = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="retried_by_gateway", sent=True)
_REFUSED = Outcome(AttemptResult.UPSTREAM_4XX, error="refused_elsewhere", sent=True)


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
    )

    def __init__(self, state: PickerState, pending: PendingRequest, dispatch: Dispatch, *, has_entry: bool) -> None:
        self._state = state
        self._pending = pending
        self._has_entry = has_entry
        self._entry: LogEntry | None = None
        self.exchange_id = state.open_exchanges.next_id()
        #: What was seen of the answer.
        self.answer = ObservedAnswer(pending.head.path, pending.request)
        #: The call has ended, and the load is released.
        self.ended = False
        self.closed = False
        self._use(dispatch)
        self.expires_s = pending.record.received_s + self._target.deadlines.request_s
        state.open_exchanges.add(self)

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

    def served_at(self, address: str, status: int) -> None:
        """Credit the replica that has answered with `status`, where the gateway has retried by itself."""
        replica = self._state.endpoints.replica(address)
        if replica is not None and replica != self.dispatch.replica and not self.closed:
            self._move(replica, refused=400 <= status < 500 and status != 429)

    def _move(self, replica: str, *, refused: bool) -> None:
        state, record, first = self._state, self._pending.record, self.dispatch
        second = state.routing.gateway.served_elsewhere(first, replica, refused=refused)
        if second is None:
            return
        if self._pending.has_prompt:
            outcome = _REFUSED if refused else _RETRIED
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
            self.served_at(entry.served, entry.status)
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
        if not outcome.sent:
            outcome = replace(outcome, sent=True)
        state.routing.gateway.finish(dispatch, outcome)
        state.open_exchanges.remove(self)
        if pending.has_prompt:
            state.replicas.check_usage(dispatch, self._target, outcome)
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
