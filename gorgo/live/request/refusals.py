"""Refusals of a front end's own: the checks before the body, the error of a rejected request, and what is counted.

Owns the rules, which proxy and picker share. Each sends the error in its own way.
"""

from __future__ import annotations

from gorgo.core.messages.actions import Reject
from gorgo.live.http.errors import HttpError, error_of
from gorgo.live.http.headers import Header
from gorgo.live.logs import log
from gorgo.live.request.parse import ParsedRequest, unknown_model
from gorgo.live.request.record import RequestRecord
from gorgo.live.state import LiveState, Routing, Telemetry

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
