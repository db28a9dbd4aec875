"""The records of one exchange: metrics, its line in the access log, and its line in the request log.

Owns what a front end answers without a replica too: refusals, readiness, and the models that are known. Each of these
functions returns a body of JSON, or raises the `HttpError` of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from gorgo.core.latency.ttft import TtftParts
from gorgo.core.messages.actions import Dispatch, Reject
from gorgo.core.messages.request import COMPLETED, AttemptResult, Outcome
from gorgo.core.prompt.parse import token_boundaries
from gorgo.core.record import mutable_record
from gorgo.live.event_loop import ahead_s
from gorgo.live.http.errors import HttpError, error_of
from gorgo.live.http.headers import Header
from gorgo.live.logs import Finished, log, log_request, logged_hashes
from gorgo.live.request.parse import ParsedRequest, unknown_model
from gorgo.live.state import LiveState, Routing, Telemetry
from gorgo.live.telemetry.metric_table import OPERATIONS

if TYPE_CHECKING:
    from gorgo.live.telemetry.spans import Trace


@mutable_record
class RequestRecord:
    """One request, as the metrics and logs show it at the end."""

    #: Of the process.
    routing: Routing
    telemetry: Telemetry
    received_s: float
    replica: str | None = None
    status: int = 0
    attempts: int = 0
    ttft_s: float | None = None
    ttft_parts_s: TtftParts | None = None
    outcome: Outcome | None = None
    code: str | None = None
    #: Why there was no connection for the last attempt that had none.
    cause: str | None = None
    decision_s: float = 0.0
    request: ParsedRequest | None = None
    #: Time in the queue, and whether it was sent to a second replica as well.
    queued_s: float | None = None
    hedged: bool = False
    #: How often its answer broke off and went on at another replica.
    continued: int = 0
    #: Attempts at the rest of its answer that were cancelled, because it went on where it was.
    withdrawn: int = 0
    #: Its stream broke off behind the finish reason, and the counts that the client asked for are missing.
    lacks_counts: bool = False
    #: `None` unless this request is traced.
    trace: Trace | None = None
    #: Name of its key; `None` while clients need none.
    client: str | None = None
    #: When it ended, where that is known before its records are complete.
    ended_s: float | None = None

    def body_read(self) -> None:
        """Record that the whole body has been read."""
        now = self.routing.clock()
        self.telemetry.metrics.body_read(now - self.received_s)
        if self.trace is not None:
            self.trace.body_read(now)

    def attempt_started(self, dispatch: Dispatch) -> None:
        """Record the start of an attempt."""
        self.attempts = dispatch.attempt
        self.replica = dispatch.replica
        if self.trace is not None:
            self.trace.attempt_started(dispatch, model=self._listed_model())

    def first_content(self, dispatch: Dispatch, *, now: float) -> None:
        """Record the first token of the winning attempt."""
        self.ttft_s = ttft_s = now - self.received_s
        decision = dispatch.decision
        self.ttft_parts_s = parts = decision.estimate.attribute(ttft_s)
        self.telemetry.metrics.first_content(
            dispatch.replica, dispatch.region, ttft_s, predicted_s=decision.predicted_ttft_s, parts=parts
        )
        if self.trace is not None:
            self.trace.first_content(dispatch, now=now, parts=parts)

    def attempt_ended(self, dispatch: Dispatch, outcome: Outcome) -> None:
        """Record the end of an attempt."""
        if self.request is not None:
            outcome = self.routing.router.bounded(self.request.route, dispatch.replica, outcome)
        if outcome.result is not AttemptResult.SUPERSEDED:
            self.outcome = outcome
        replica, region = dispatch.replica, dispatch.region
        self.telemetry.metrics.attempt_ended(replica, region, outcome.result.word)
        if self.trace is not None:
            self.trace.attempt_ended(dispatch, outcome, now=self._end_s())
        if outcome.result is COMPLETED and not outcome.continue_on:  # else the next one ends the request
            estimated = dispatch.decision.estimated_cached_tokens
            e2e_s = self._end_s() - self.received_s
            self.telemetry.metrics.completed(replica, region, e2e_s, outcome, estimated_cached_tokens=estimated)
            exact = None if self.request is None else self.request.exact
            if exact is not None and outcome.prompt_tokens is not None:
                self.routing.prompt_tokens.compare_report(exact, outcome.prompt_tokens, replica)

    def close(self, route: str, request_id: str, *, sent_status: int, disconnected: bool) -> None:
        """Record the end of the request: one count, one line in each log. `sent_status` is 0 if nothing was sent."""
        if disconnected:
            self.status = 499
            self.telemetry.metrics.client_disconnected()
        status = self.status or sent_status or 500
        self.telemetry.metrics.request(route, self.routing.router.settings.policy.name, status)
        now = self._end_s()
        self._count_for_client(status, now)
        operation = OPERATIONS.get(route)
        if operation is not None:
            self._count_times(operation, status, now)
        if self.telemetry.request_log is not None and self.request is not None:
            self._write_request_log(self.request, status, now)
        if self.trace is not None:
            self.trace.close(status=status, code=self.code, retries=self._retries, hedged=self.hedged, now=now)
        self._log(route, request_id, status, now)

    def _count_for_client(self, status: int, now: float) -> None:
        """Count the request and the tokens of its answer for its client."""
        request, outcome = self.request, self.outcome
        model = None if request is None else request.route.model
        prompt_tokens = output_tokens = 0
        if request is not None and outcome is not None:
            has_content = self.ttft_s is not None
            prompt_tokens, output_tokens = outcome.used_tokens(request.route.prompt_tokens, has_content=has_content)
        self.telemetry.metrics.clients.finished(
            self.client, model, status, now=now, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )

    def _listed_model(self) -> str | None:
        """Return the model that the client named, if a replica lists it: any other name is the client's own text."""
        model = None if self.request is None else self.request.route.model
        return model if model is not None and self.routing.router.view.lists(model) else None

    def _count_times(self, operation: str, status: int, now: float) -> None:
        """Count the times of the request by OpenTelemetry's conventions."""
        outcome = self.outcome
        whole = outcome is not None and outcome.result is COMPLETED
        self.telemetry.metrics.clients.served(
            operation,
            None if self.request is None else self.request.route.model,
            status,
            e2e_s=now - self.received_s,
            ttft_s=self.ttft_s,
            output_tokens=(outcome.output_tokens or 0) if whole and outcome is not None else 0,
        )

    def _end_s(self) -> float:
        return self.routing.clock() if self.ended_s is None else self.ended_s

    @property
    def _retries(self) -> int:
        return max(0, self.attempts - 1 - self.hedged - self.continued - self.withdrawn)

    def _log(self, route: str, request_id: str, status: int, now: float) -> None:
        outcome = self.outcome
        fields: dict[str, Any] = {
            "request_id": request_id,
            "route": route,
            "client": self.client,
            "model": None if self.request is None else self.request.route.recorded_model,
            "replica": self.replica,
            "status": status,
            "code": self.code,
            # Not by `round`, which goes through text and takes ten times as long.
            "ttft_ms": None if self.ttft_s is None else int(self.ttft_s * 1e4 + 0.5) / 10,
            "e2e_s": int((now - self.received_s) * 1e4 + 0.5) / 1e4,
            "prompt_tokens": None if outcome is None else outcome.prompt_tokens,
            "cached_tokens": None if outcome is None else outcome.cached_tokens,
            "output_tokens": None if outcome is None else outcome.output_tokens,
            "retries": self._retries,
        }
        # Fields that most requests do not have.
        if self.queued_s is not None:
            fields["queued_ms"] = round(self.queued_s * 1e3, 1)
        if self.hedged:
            fields["hedged"] = True
        if self.continued:
            fields["continued"] = self.continued
        if self.lacks_counts:
            fields["counts"] = "missing"
        if self.cause is not None:
            fields["cause"] = self.cause
        fields["error"] = None if outcome is None else outcome.error
        log_request(fields)

    def _write_request_log(self, request: ParsedRequest, status: int, now: float) -> None:
        """Write a line for a replay of this traffic, also for a request that failed."""
        assert self.telemetry.request_log is not None
        outcome = self.outcome or Outcome(AttemptResult.CLIENT_DISCONNECTED)
        route = request.route
        tokens = route.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens
        self.telemetry.request_log.add(
            Finished(  # by position: more than fifteen keywords go through a dict
                self.received_s + ahead_s(self.routing.clock),  # received_s
                route.recorded_model,  # model
                tokens,  # input_tokens
                # An incomplete response would have been longer.
                outcome.output_tokens if outcome.result is COMPLETED else None,  # output_tokens
                request.text_bytes,
                status,
                logged_hashes(route.blocks),  # hashes
                self.client,
                self.replica,
                outcome.cached_tokens,
                self.attempts,
                self.queued_s,
                self.ttft_s,
                now - self.received_s,  # e2e_s
                token_boundaries(route.boundaries, size=route.prompt_tokens, tokens=tokens),  # boundaries
                self.ttft_parts_s,
            )
        )


# Refusals of a front end's own: the checks before the body, the error of a rejected request, and what is counted.


#: Of an error that a second may end.
RETRY_SOON = ((b"retry-after", b"1"),)


def check_method(method: str) -> None:
    """Raise `HttpError` (405) for a request on a route of prompts that cannot have one."""
    if method != "POST":
        raise HttpError(405, "method_not_allowed", "expected POST", headers=((b"allow", b"POST"),))


def check_open(state: LiveState, *, open_requests: int) -> None:
    """Raise `HttpError` (429, 503) for a request that is one too many, this one counted, or that comes too late.

    Before its body is read: each body is held in memory.
    """
    name, limit = state.kind.name, state.limits.max_in_flight
    if open_requests > limit:
        message = f"{limit} requests are in flight, the limit of this {name}"
        raise HttpError(429, "too_many_in_flight", message, headers=RETRY_SOON)
    if state.stopping and state.kind.refuses_when_stopping:
        raise HttpError(503, "stopping", f"this {name} is stopping", headers=RETRY_SOON)


def internal_error(state: LiveState) -> HttpError:
    """Return the error for a fault in the process; its log has the fault."""
    return HttpError(500, "internal_error", f"internal error of the {state.kind.name}; its log has this request id")


def error_for(routing: Routing, reject: Reject, request: ParsedRequest | None) -> HttpError:
    """Return the error for a request that the Router rejects."""
    if reject.code == "model_not_found" and request is not None:
        return unknown_model(routing, name=request.route.model or "", client=request.route.client)
    return error_of(reject)


def record_refusal(telemetry: Telemetry, record: RequestRecord, error: HttpError) -> None:
    """Count the refusal of a request, whose record ends with it."""
    record.status, record.code = error.status, error.code
    telemetry.metrics.rejected(error.code)
    if error.status == 429:
        telemetry.metrics.clients.rejected(record.client, error.code)


def record_early_refusal(telemetry: Telemetry, error: HttpError) -> None:
    """Count and log the refusal of what is no request yet: it has no key."""
    telemetry.metrics.rejected(error.code)
    log("request_refused", status=error.status, code=error.code)


def refusal_headers(routing: Routing, request_id: str) -> tuple[Header, ...]:
    """Return the headers of a refusal beside those of its error."""
    return (b"x-request-id", request_id.encode()), (b"x-gorgo-policy", routing.router.settings.policy.name.encode())


ALIVE = b'{"status": "ok"}'


def readiness(state: LiveState) -> bytes:
    """Return the answer to a load balancer that may send requests here. Raises `HttpError` (503)."""
    if state.stopping:
        raise HttpError(503, "stopping", f"this {state.kind.name} is stopping")
    pending = state.replicas.found.pending(state.routing.clock())
    if pending:
        raise HttpError(503, "fleet_source_pending", f"no result yet of the fleet source {pending[0]}")
    missing = state.why_not_ready(required=state.config.proxy.min_ready_replicas)
    if missing is not None:
        raise HttpError(503, missing.code, missing.message)
    return b'{"status": "ready"}'


def count_own_answer(routing: Routing, telemetry: Telemetry, client: str | None) -> None:
    """Count a request for models against the rates of its client. Raises `HttpError` (429)."""
    exceeded = routing.router.quotas.count(client, now=routing.clock())
    if exceeded is not None:
        telemetry.metrics.rejected(exceeded.code)
        retry = ((b"retry-after", b"%d" % ceil(exceeded.retry_after_s)),)
        raise HttpError(429, exceeded.code, exceeded.message, headers=retry)


def model_list(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return the list of models."""
    return json.dumps({"object": "list", "data": rows}).encode()


def model_row(routing: Routing, rows: Sequence[dict[str, Any]], name: str, *, client: str | None) -> bytes:
    """Return one row of the list. Raises `HttpError` (404) with the models that there are."""
    row = next((row for row in rows if row.get("id") == name), None)
    if row is None:
        raise unknown_model(routing, name=name, client=client, listed=[row.get("id") for row in rows])
    return json.dumps(row).encode()
