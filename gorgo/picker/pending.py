"""One request until its decision: read, admitted or queued, and chosen for, or refused.

Owns the order of these steps, as the proxy has them, the bytes of the body meanwhile (`BodyBuffer`) and what has to be
waited for. Leaves what is sent to Envoy to the call, and what follows a dispatch to `gorgo.picker.lifetime`.

Theory of operation: nearly every request is decided within the step in which its body came. A task is made for a body
that another process reads, for exact tokens and for a model that no replica is known to serve. A queued request waits
for `deliver`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

from gorgo.core.messages.actions import Action, AdmissionAction, Dispatch, Hold, Reject, RetryAction
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.live.event_loop import ahead_s
from gorgo.live.http.body import BODY_COPIES, RequestBuffer, buffer_client
from gorgo.live.http.errors import HttpError, error_json
from gorgo.live.http.headers import Header, request_id
from gorgo.live.logs import log_failure
from gorgo.live.parsing.json_body import BodyFields, check_media_type, read_quick_fields, unpack_quick
from gorgo.live.request.parse import (
    ParsedRequest,
    count_tokens,
    find_model,
    has_tokens,
    may_find_model,
    parse_request,
)
from gorgo.live.request.record import (
    RETRY_SOON,
    RequestRecord,
    check_method,
    check_open,
    error_for,
    internal_error,
    record_refusal,
    refusal_headers,
)
from gorgo.live.request_options import RequestOptions
from gorgo.picker.protocol.messages import RequestHead, peer_of
from gorgo.picker.state import PickerState

# A body as a request for the Router: at once where it is quick to read. A long body, exact tokens, and a model that no
# replica is known to serve have to be waited for.


#: Parses a body with its fields. Raises `HttpError`.
Parse = Callable[[bytes, BodyFields], ParsedRequest]


def read_now(
    state: PickerState, route: str, body: bytes, parse: Parse
) -> tuple[ParsedRequest | None, BodyFields | None]:
    """Return the request if nothing has to be waited for, and the fields if they are read. Raises `HttpError`."""
    fields = read_quick_fields(route, body, state.routing.fingerprinter)
    if fields is None:
        return None, None
    if has_tokens(state.routing, fields):
        return None, fields
    request = parse(body, fields)
    return (None if may_find_model(state.routing, request.route.model) else request), fields


async def read_later(
    state: PickerState, route: str, body: bytes, fields: BodyFields | None, parse: Parse, *, client: str
) -> ParsedRequest:
    """Return the request after all that it waits for. Raises `HttpError`."""
    if fields is None:
        fields = await state.routing.body_workers.read(route, body, client=client)
    fields.exact = await count_tokens(state.routing, route, fields)
    fields.prompt = None  # as large as the body, and needed no more
    request = parse(body, fields)
    return parse(body, fields) if await find_model(state.routing, request.route.model) else request


def request_without_prompt(
    request_id: str, route: str, options: RequestOptions, *, client: str | None, received_s: float
) -> RouteRequest:
    """Return a request that any replica may answer: it counts as load, and has no prompt."""
    return RouteRequest(
        request_id,
        received_s,
        prompt_tokens=1,
        blocks=b"",
        block_tokens=1.0,
        prefix_hash=0,
        streamed=False,
        client=client,
        regions=options.regions,
        priority=options.priority,
        idempotent=False,
        route=route,
    )


# The bytes of a request's body while a picker has them: their bound, and what they reserve. One that comes in parts is
# reserved from its first on, and one that has come whole, as an own Envoy sends it, only where it has to wait. Most are
# decided within the step in which they came.


class BodyBuffer:
    """The body of one request.

    Parameters
    ----------
    state:
        The running picker.
    head:
        Of the request.
    client:
        Name of its key, for whom the bytes count; `None`: they count for its address.
    """

    __slots__ = ("_client", "_head", "_reserved", "_size", "_state")

    def __init__(self, state: PickerState, head: RequestHead, client: str | None) -> None:
        self._state = state
        self._head = head
        self._client = client
        self._reserved: RequestBuffer | None = None
        self._size = 0

    @property
    def limit(self) -> int:
        """Return the bytes of the largest body that a request may have, unpacked too."""
        return min(self._state.live.limits.max_body_bytes, self._state.live.buffers.size_limit // BODY_COPIES)

    def unpacked(self, size: int) -> None:
        """Count a body of `size` bytes in the place of the one that came. Raises `HttpError` (503)."""
        self._size = max(self._size, size)
        if self._reserved is not None:
            self.reserve()

    def receive(self, count: int, *, end: bool) -> None:
        """Count bytes as they come, the last ones at the `end`. Raises `HttpError` (413, 503)."""
        self._size += count
        limit = self.limit
        if self._size > limit:
            raise HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")
        if not end or self._reserved is not None:
            self.reserve(count)

    def reserve(self, count: int = 0) -> None:
        """Reserve what has come, `count` bytes of it now. Raises `HttpError` (503)."""
        if self._reserved is None:
            client = self._client or buffer_client({"client": peer_of(self._head.varying)})
            self._reserved = RequestBuffer(self._state.live.buffers, client)
        self._reserved.received(count, self._size)

    def release(self) -> None:
        """Release everything. Idempotent."""
        if self._reserved is not None:
            self._reserved.release()


_JSON = (b"content-type", b"application/json")


class Decided(Protocol):
    """The call of a request."""

    def dispatched(self, dispatch: Dispatch) -> None:
        """Send the request to a replica."""
        ...

    def refused(self, status: int, headers: Sequence[Header], body: bytes, code: str) -> None:
        """Answer the client with an error, and end the exchange."""
        ...


class PendingRequest:
    """One request.

    Parameters
    ----------
    state:
        The running picker.
    head:
        Of the request; its headers have no key that was for the picker.
    client:
        Name of that key.
    replicas:
        The only ones that may serve it, as the gateway demands; `None` is any.
    call:
        Gets the decision.
    """

    def __init__(
        self,
        state: PickerState,
        head: RequestHead,
        call: Decided,
        *,
        client: str | None,
        has_prompt: bool,
        replicas: frozenset[str] | None = None,
    ) -> None:
        self._state = state
        self._call = call
        self._replicas = replicas
        self.head = head
        self.client = client
        self.request_id = request_id(head.varying)
        #: The id of the request in the Router; `None` before and after.
        self.router_id: str | None = None
        #: `None` before the body is parsed, and for a request without a prompt.
        self.request: ParsedRequest | None = None
        received_s = state.routing.clock()
        self.record = RequestRecord(state.routing, state.telemetry, received_s, client=client)
        #: Only requests with a prompt are counted, logged and traced.
        self.has_prompt = has_prompt
        if has_prompt and state.telemetry.tracing is not None:
            self.record.trace = state.telemetry.tracing.start(
                head.headers,
                route=head.path,
                request_id=self.request_id,
                received_s=received_s,
                ahead_s=ahead_s(state.routing.clock),
            )
        self._buffer = BodyBuffer(state, head, client)
        #: The replica gets a body that the client has sent compressed.
        self.is_unpacked = False
        self._started = 0.0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._queued_s: float | None = None
        #: Dispatched, refused or cancelled.
        self._done = False

    # -- the decision

    def decide(self, body: bytes) -> None:
        """Choose for a request with a prompt, now or once that can be done."""
        try:
            self._admit()
            self.record.body_read()
            coding = check_media_type(self.head.headers)
            self._started = perf_counter()
            request: ParsedRequest | None = None
            fields: BodyFields | None = None
            if coding is not None:
                self.is_unpacked = True
                plain = unpack_quick(coding, body, limit=self._buffer.limit)
                if plain is not None:
                    self._buffer.unpacked(len(plain))
                    body, coding = plain, None
            if coding is None:
                request, fields = read_now(self._state, self.head.path, body, self._parse)
            if request is None:
                self._buffer.reserve()
        except HttpError as error:
            self.refuse(error)
            return
        except Exception as failure:  # noqa: BLE001 - the border of one request: its client is not the one that left
            self._refuse_fault(failure)
            return
        if request is None:
            self._bound_wait()
            self._task = asyncio.ensure_future(self._decide_later(body, fields, coding))
        else:
            self._submit(request)

    def decide_any(self) -> None:
        """Choose for a request without a prompt: any replica that is ready."""
        state, head = self._state, self.head
        try:
            self._admit()
            options = state.routing.client_policies.request_options(head.headers, client=self.client, model=None)
        except HttpError as error:
            self.refuse(error)
            return
        assert self.router_id is not None
        request = request_without_prompt(
            self.router_id, head.path, options, client=self.client, received_s=self.record.received_s
        )
        action = state.routing.gateway.submit(
            request if self._replicas is None else replace(request, replicas=self._replicas)
        )
        self._act(action)

    def on_call_end(self) -> None:
        """End a request whose call has ended before its decision. Idempotent."""
        if self._done:
            return
        self._end_wait()
        if self._queued_s is not None and self.router_id is not None:
            self._state.routing.gateway.abandon(self.router_id)
        self.close(0, disconnected=True)

    def refuse(self, error: HttpError) -> None:
        """Answer with an error of the picker's own."""
        self._end_wait()
        # Before the answer: transports close the call in the step that sends it, and its client has not left.
        self._done = True
        record_refusal(self._state.telemetry, self.record, error)
        headers = (_JSON, *error.headers, *refusal_headers(self._state.routing, self.request_id))
        body = error_json(error.status, error.code, error.message, error.details, path=self.head.path)
        self._call.refused(error.status, headers, body, error.code)
        self.close(error.status)

    def has_method(self) -> bool:
        """Refuse a request on a route of prompts that cannot have one, and return False for it."""
        try:
            check_method(self.head.method)
        except HttpError as error:
            self.refuse(error)
            return False
        return True

    def receive(self, count: int, *, end: bool) -> bool:
        """Count bytes of the body as they come; refuse the request and return False for a body that is too large."""
        try:
            self._buffer.receive(count, end=end)
        except HttpError as error:
            self.refuse(error)
            return False
        return True

    def fail(self, action: RetryAction | None) -> None:
        """Refuse a request for whose replicas there is no address."""
        if isinstance(action, Reject):
            self._refuse_by(action)
        else:
            self.refuse(HttpError(503, "no_replica", "no replica has an address yet", headers=RETRY_SOON))

    def release_body(self) -> None:
        """Release the body, which has been sent."""
        if self.request is not None:
            self.request.body = b""
        self._buffer.release()

    # -- steps

    def _admit(self) -> None:
        """Check what does not depend on the body, and take an id of the Router."""
        state = self._state
        check_open(state.live, open_requests=len(state.calls))
        self.router_id = state.routing.gateway.register(self.request_id, self)

    async def _decide_later(self, body: bytes, fields: BodyFields | None, coding: str | None) -> None:
        """Choose after another process, a tokenizer or lists of models have been waited for."""
        client = self.client or buffer_client({"client": peer_of(self.head.varying)})
        try:
            if coding is not None:
                workers = self._state.routing.body_workers
                body = await workers.unpack(coding, body, limit=self._buffer.limit, client=client)
                self._buffer.unpacked(len(body))
            request = await read_later(self._state, self.head.path, body, fields, self._parse, client=client)
            self._task = None
            self._submit(request)
        except HttpError as error:
            self._task = None
            self.refuse(error)
        except Exception as failure:  # noqa: BLE001 - the border of one request: a fault in it must not end the others
            self._task = None
            self._refuse_fault(failure)

    def _refuse_fault(self, failure: Exception) -> None:
        log_failure("internal_error", failure, request_id=self.request_id)
        self.refuse(internal_error(self._state.live))

    def _parse(self, body: bytes, fields: BodyFields) -> ParsedRequest:
        assert self.router_id is not None, "it is registered"
        return parse_request(
            self._state.routing,
            self._state.replicas.stored_responses,
            self.head.path,
            self.head.headers,
            body,
            fields,
            request_id=self.router_id,
            received_s=self.record.received_s,
            client=self.client,
            replicas=self._replicas,
        )

    def _submit(self, request: ParsedRequest) -> None:
        state = self._state
        self.request = self.record.request = request
        action = state.routing.gateway.submit(request.route)
        state.telemetry.metrics.decided(perf_counter() - self._started)
        self._act(action)

    def _act(self, action: AdmissionAction) -> None:
        if isinstance(action, Dispatch):
            self._dispatched(action)
        elif isinstance(action, Hold):
            self._hold()
        else:
            self._refuse_by(action)

    def _hold(self) -> None:
        """Let the request wait in the queue."""
        self._queued_s = self._state.routing.clock()
        try:
            self._buffer.reserve()
        except HttpError as error:
            assert self.router_id is not None, "it is registered"
            self._state.routing.gateway.abandon(self.router_id)
            self.refuse(error)
            return
        self._bound_wait()

    def _bound_wait(self) -> None:
        """Wait for `hold_s` at most, to be read and in the queue: Envoy's message timeout passes after that."""
        if self._timer is None:
            hold_s = self._state.hold_s
            self._timer = asyncio.get_running_loop().call_later(hold_s, self._wait_expired, hold_s)

    def deliver(self, action: Action) -> None:
        """Act on a decision of the Router that an event of another request, or of time, caused."""
        is_queued = self._queued_s is not None and not self._done
        match action:
            case Dispatch() if is_queued:
                self._dispatched(action)
            case Dispatch():
                self._state.routing.gateway.finish(action, Outcome(AttemptResult.CLIENT_DISCONNECTED))
            case Reject() if is_queued:
                self._refuse_by(action)
            case _:
                raise AssertionError(f"{type(action).__name__} for a request of a picker, which is not queued")

    def _wait_expired(self, hold_s: float) -> None:
        self._timer = None
        if self._queued_s is None:
            message = f"the request could not be read within {hold_s:g} s, behind other large ones"
            self.refuse(HttpError(503, "too_many_in_flight", message, headers=RETRY_SOON))
            return
        assert self.router_id is not None
        self._state.routing.gateway.abandon(self.router_id)
        message = f"no replica could take the request within {hold_s:g} s"
        self.refuse(HttpError(503, "no_replica", message, headers=RETRY_SOON))

    def _dispatched(self, dispatch: Dispatch) -> None:
        self._end_wait()
        self._done = True
        self._call.dispatched(dispatch)

    def _refuse_by(self, reject: Reject) -> None:
        self.refuse(error_for(self._state.routing, reject, self.request))

    def _end_wait(self) -> None:
        """Stop what the request waits for, and record its time in the queue."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._queued_s is not None and self.record.queued_s is None:
            self.record.queued_s = self._state.routing.clock() - self._queued_s
            self._state.telemetry.metrics.queued(self.record.queued_s)

    def close(self, sent_status: int, *, disconnected: bool = False) -> None:
        """Release what the request has, and write its records; `sent_status` is 0 if nothing was sent."""
        self._done = True
        self._buffer.release()
        if self.router_id is not None:
            self._state.routing.gateway.unregister(self.router_id)
            self.router_id = None
        if self.has_prompt:
            self.record.close(self.head.path, self.request_id, sent_status=sent_status, disconnected=disconnected)
