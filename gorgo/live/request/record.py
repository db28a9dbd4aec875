"""The records of one exchange: metrics, its line in the access log, and its line in the request log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.prompt.parse import token_boundaries
from gorgo.live.logs import log_request
from gorgo.live.request.parse import ParsedRequest
from gorgo.live.state import Routing, Telemetry
from gorgo.live.telemetry.request_log_file import Finished, logged_hashes

if TYPE_CHECKING:
    from gorgo.live.telemetry.spans import Trace


@dataclass(slots=True)
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
    outcome: Outcome | None = None
    code: str | None = None
    #: Why there was no connection for the last attempt that had none.
    cause: str | None = None
    decision_s: float = 0.0
    request: ParsedRequest | None = None
    #: Time in the queue, and whether it was sent to a second replica as well.
    queued_s: float | None = None
    hedged: bool = False
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
            self.trace.attempt_started(dispatch)

    def first_content(self, dispatch: Dispatch, *, now: float) -> None:
        """Record the first token of the winning attempt."""
        self.ttft_s = ttft_s = now - self.received_s
        decision = dispatch.decision
        parts = decision.estimate.attribute(ttft_s)
        self.telemetry.metrics.first_content(
            dispatch.replica, dispatch.region, ttft_s, predicted_s=decision.predicted_ttft_s, parts=parts
        )
        if self.trace is not None:
            self.trace.first_content(dispatch, now=now, parts=parts)

    def attempt_ended(self, dispatch: Dispatch, outcome: Outcome) -> None:
        """Record the end of an attempt."""
        if outcome.result is not AttemptResult.SUPERSEDED:
            self.outcome = outcome
        replica, region = dispatch.replica, dispatch.region
        self.telemetry.metrics.attempt_ended(replica, region, outcome.result.value)
        if self.trace is not None:
            self.trace.attempt_ended(dispatch, outcome, now=self._end_s())
        if outcome.result is AttemptResult.COMPLETED:
            estimated = dispatch.decision.estimated_cached_tokens
            e2e_s = self._end_s() - self.received_s
            self.telemetry.metrics.completed(replica, region, e2e_s, outcome, estimated_cached_tokens=estimated)
            exact = None if self.request is None else self.request.exact
            if exact is not None and outcome.prompt_tokens is not None:
                self.routing.prompt_tokens.compare_report(exact, outcome.prompt_tokens)

    def close(self, route: str, request_id: str, *, sent_status: int, disconnected: bool) -> None:
        """Record the end of the request: one count, one line in each log. `sent_status` is 0 if nothing was sent."""
        if disconnected:
            self.status = 499
            self.telemetry.metrics.client_disconnected()
        status = self.status or sent_status or 500
        self.telemetry.metrics.request(route, self.routing.router.settings.policy.name, status)
        now = self._end_s()
        self._count_for_client(status, now)
        if self.telemetry.request_log is not None and self.request is not None:
            self._write_request_log(self.request, status)
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

    def _end_s(self) -> float:
        return self.routing.clock() if self.ended_s is None else self.ended_s

    @property
    def _retries(self) -> int:
        return max(0, self.attempts - 1 - self.hedged)

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
            "ttft_ms": None if self.ttft_s is None else round(self.ttft_s * 1e3, 1),
            "e2e_s": round(now - self.received_s, 4),
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
        if self.cause is not None:
            fields["cause"] = self.cause
        fields["error"] = None if outcome is None else outcome.error
        log_request(fields)

    def _write_request_log(self, request: ParsedRequest, status: int) -> None:
        """Write a line for a replay of this traffic, also for a request that failed."""
        assert self.telemetry.request_log is not None
        outcome = self.outcome or Outcome(AttemptResult.CLIENT_DISCONNECTED)
        route = request.route
        tokens = route.prompt_tokens if outcome.prompt_tokens is None else outcome.prompt_tokens
        self.telemetry.request_log.add(
            Finished(
                received_s=self.received_s,
                model=route.recorded_model,
                input_tokens=tokens,
                # An incomplete response would have been longer.
                output_tokens=outcome.output_tokens if outcome.result is AttemptResult.COMPLETED else None,
                text_bytes=request.text_bytes,
                status=status,
                hashes=logged_hashes(route.blocks),
                client=self.client,
                replica=self.replica,
                cached_tokens=outcome.cached_tokens,
                attempts=self.attempts,
                queued_s=self.queued_s,
                ttft_s=self.ttft_s,
                e2e_s=self._end_s() - self.received_s,
                boundaries=token_boundaries(route.boundaries, size=route.prompt_tokens, tokens=tokens),
            )
        )
