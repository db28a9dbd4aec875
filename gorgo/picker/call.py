"""One call of Envoy: serialized messages in, serialized messages out, without any transport.

Owns which of two roles a call has, by its first message, and that whatever ends a call ends its part of an exchange.
Leaves the decision and what follows it to `gorgo.picker.pending` and `gorgo.picker.lifetime`, and the form of messages
to `gorgo.picker.protocol`. Its parts, in the order of the file:

- `public_answer` and `own_answer`: what the picker answers itself;
- `CarriedResponse`: a response that passes through the call of its request;
- `RequestCall`: the call of one request;
- `FirstTokenCall`: the call of the filter that detects first tokens;
- `PickerCall`: either of the two roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import unquote

from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.record import record
from gorgo.core.stream import UsageEventFilter
from gorgo.errors import closest
from gorgo.live.http.errors import HttpError, error_json
from gorgo.live.http.headers import IDENTITY, KEYS, Header, RequestHeaders, find, upstream_headers
from gorgo.live.logs import log_failure
from gorgo.live.request.parse import INFERENCE_ROUTES
from gorgo.live.request.record import ALIVE, count_own_answer, model_list, model_row, readiness, record_early_refusal
from gorgo.live.upstream.target import Target
from gorgo.picker.lifetime import BODY_BYTES, PickerExchange, outcome_of_answer
from gorgo.picker.pending import PendingRequest
from gorgo.picker.protocol.answers import UNCHANGED, EndpointChoice, Labels, answered, chosen, refused, streamed
from gorgo.picker.protocol.messages import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    LB,
    OWN,
    SERVED,
    CallOutput,
    ProtocolError,
    RequestHead,
    RequestStart,
    ServedBy,
    metadata_text,
    read_headers,
    read_message,
    read_served,
    read_status,
)
from gorgo.picker.protocol.protos import ProcessingMode
from gorgo.picker.state import PickerState

# What of a request is changed for its replica: destination, headers, key, and the model's name in the body.
#
# The rules are the proxy's: a replica gets the headers that `live.http.headers` forwards, and Envoy's own.


#: Headers that Envoy frames the request by, or sets itself.
_FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"te", b"connection", b"upgrade", b"via"})
_ENVOYS = (b"x-envoy-", b"x-forwarded-")


def choose(state: PickerState, pending: PendingRequest, exchange: PickerExchange) -> EndpointChoice:
    """Return the choice for a dispatched request."""
    target, dispatch, request = exchange.target, exchange.dispatch, pending.request
    model = None if request is None else request.route.model
    name = None if model is None else state.routing.models.engine_name(dispatch.replica, model)
    same = (each for each in dispatch.fallbacks if _gets_the_same(state, target, each, name, model))
    named = {each: address for each in (dispatch.replica, *same) if (address := state.endpoints.address(each))}
    exchange.replicas, addresses = tuple(named), named.values()
    destination = ",".join(addresses)
    set_headers, removed = _headers(state, pending, exchange)
    if _is_closed(state, target):
        # Envoy has no other replica to try, and would answer 503 in place of the last refusal.
        set_headers.append((MAX_RETRIES, b"%d" % max(0, len(addresses) - 1)))
    if request is not None and request.route.idempotent and not state.live.config.fleet_sources:
        set_headers.append(MAY_BE_SENT_TWICE)
    body, adds_usage = None, False
    if request is not None:
        adds_usage = target.request_usage and request.adds_usage
        sent = request.body_for(name, with_usage=target.request_usage)
        body = None if sent is request.body and not pending.is_unpacked else sent
    labels = labels_of(state, exchange)
    return EndpointChoice(destination, exchange.exchange_id, set_headers, removed, body, adds_usage, labels)


def labels_of(state: PickerState, exchange: PickerExchange) -> Labels:
    """Return what the client sees of a decision, as the proxy shows it."""
    dispatch, decision = exchange.dispatch, exchange.dispatch.decision
    made = ("policy", decision.policy), ("weights-version", str(decision.weights_version))
    if not state.routing.client_policies.may_see_estimates(exchange.client):
        return made
    return ("replica", dispatch.replica), ("region", dispatch.region), *made


#: Headers of a request, as the proxy's own listener has it; Envoy's limit leaves room for those that are set here.
MAX_HEADERS = 128
#: By this header Envoy sends a request to no more replicas than the picker has named.
MAX_RETRIES = b"x-envoy-max-retries"
#: What Envoy retries beside its route's, for a request of which no engine stores anything (`RouteRequest.idempotent`).
#: Alone it makes Envoy retry, so that a found fleet, whose route has no retries, goes without.
MAY_BE_SENT_TWICE = (b"x-envoy-retry-on", b"5xx,reset")


def _is_closed(state: PickerState, *targets: Target) -> bool:
    """Return whether no replica may get a request but those that the picker names (`gorgo.picker.envoy`)."""
    routing = state.routing
    if routing.client_keys is not None or routing.client_policies.models:
        return True
    return any(target.secrets.api_key is not None for target in targets)


def _gets_the_same(state: PickerState, target: Target, replica: str, name: str | None, model: str | None) -> bool:
    """Return whether Envoy may send to `replica` what it sends to `target`: one body, and one key."""
    other = state.replicas.targets.get(replica)
    return (
        other is not None
        and other.secrets.api_key == target.secrets.api_key
        and other.request_usage == target.request_usage
        and (model is None or state.routing.models.engine_name(replica, model) == name)
    )


def _headers(
    state: PickerState, pending: PendingRequest, exchange: PickerExchange
) -> tuple[list[Header], tuple[bytes, ...]]:
    """Return the headers to set, and the names of those to remove."""
    headers, api_key = pending.head.headers, exchange.target.api_key
    removed = _withheld(headers, state.live.passed_headers, has_key=api_key is not None)
    if not pending.has_prompt:
        # Its body passes as it came.
        removed = tuple(name for name in removed if name != b"content-encoding")
    # A path without a prompt answers as its client asks: nothing of it is read.
    changed: list[Header] = [IDENTITY] if pending.has_prompt else []
    identity = (b"x-request-id", pending.request_id.encode("ascii"))
    if identity not in pending.head.varying:
        changed.append(identity)
    if api_key is not None:
        changed.append((b"authorization", b"Bearer " + api_key.encode("latin-1")))
    trace = pending.record.trace
    if trace is not None:
        changed = trace.carry(changed, exchange.dispatch.attempt_id)
        # What is set anew is replaced without that.
        names = {name for name, _ in headers}.difference(name for name, _ in changed)
        removed = (*removed, *(name for name in trace.dropped if name in names))
    return changed, (*removed, *pending.head.removed)


def _withheld(headers: Sequence[Header], passed: frozenset[bytes], *, has_key: bool) -> tuple[bytes, ...]:
    """Return `_removed`, found once for headers that are repeated: none of those that differ is withheld."""
    if not isinstance(headers, RequestHeaders):
        return _removed(headers, passed, has_key)
    cached = headers.findings.withheld
    if cached is None or cached[0] is not passed or cached[1] is not has_key:
        cached = passed, has_key, _removed(headers, passed, has_key)
        if find(headers, b"connection") is None:  # it names others, also those that differ
            headers.findings.withheld = cached
    return cached[2]


def _removed(headers: Sequence[Header], passed: frozenset[bytes], has_key: bool) -> tuple[bytes, ...]:
    """Return the names of headers that the replica does not get, as the proxy does not forward them."""
    forwarded = upstream_headers(headers, request_id="", api_key="" if has_key else None, passed=passed)
    retained = {name for name, _ in forwarded}
    names = dict.fromkeys(name for name, _ in headers)
    return tuple(
        name for name in names if name not in retained and name not in _FRAMING and not name.startswith(_ENVOYS)
    )


# What the picker of an own Envoy answers itself, as the proxy does: health, readiness and known models, and the errors
# 404 and 405. A gateway has routes of its own: there each path goes to a replica. Not so with client keys, restricted
# models or engines' keys: a path that is not read could be another spelling of one that is, or an order to the engine.


_ALIVE = frozenset({"/health", "/healthz", "/livez"})
_READY = frozenset({"/ready", "/readyz"})
_MODELS = "/v1/models"


@record
class OwnAnswer:
    """A response of the picker's own, in JSON."""

    status: int
    body: bytes


def public_answer(state: PickerState, head: RequestHead) -> OwnAnswer | None:
    """Return the answer to a load balancer, which needs no key; `None` for any other request. Raises `HttpError`."""
    if head.method not in ("GET", "HEAD"):
        return None
    if head.path in _ALIVE:
        return OwnAnswer(200, ALIVE)
    if head.path not in _READY:
        return None
    return OwnAnswer(200, readiness(state.live))


def own_answer(state: PickerState, head: RequestHead, client: str | None) -> OwnAnswer | None:
    """Return the answer to a request for models; `None` for a request for a replica.

    Raises `HttpError`: 404 for a path without a route, which an engine could take for an order, and 405.
    """
    path = head.path
    if path in _INFERENCE:
        return None
    if path != _MODELS and not path.startswith(f"{_MODELS}/"):
        routes = [*INFERENCE_ROUTES, _MODELS]
        message = f"no such route{closest(path[:200], routes)}; there are: {', '.join(routes)}"
        raise HttpError(404, "not_found", message)
    if head.method not in ("GET", "HEAD"):
        raise HttpError(405, "method_not_allowed", "expected GET", headers=((b"allow", b"GET, HEAD"),))
    rows = state.routing.models.rows()
    if not rows:
        return None
    count_own_answer(state.routing, state.telemetry, client)
    if path == _MODELS:
        return OwnAnswer(200, model_list(rows))
    # Some clients encode the slash in a name; on every other path a percent sign is no route.
    return OwnAnswer(200, model_row(state.routing, rows, unquote(path[len(_MODELS) + 1 :]), client=client))


# The response as it passes through the call of its request, where Envoy sends it there. Each byte goes back once, but
# for the event of usage that only the picker has requested. An own Envoy sends none of it, and so its client gets that
# event too.


class CarriedResponse:
    """The response of one call.

    Parameters
    ----------
    body_mode:
        How Envoy sends the body of the response; nothing comes before the choice.
    output:
        The transport's end of the call.
    state:
        The running picker.
    """

    __slots__ = ("_filter", "_is_returned", "_output", "_state", "has_body", "removes_usage")

    def __init__(self, body_mode: int, output: CallOutput, state: PickerState) -> None:
        self._output = output
        self._state = state
        #: Whether the body passes through the call, and whether Envoy has only what is sent back of it.
        self.has_body = body_mode in (ProcessingMode.STREAMED, ProcessingMode.FULL_DUPLEX_STREAMED)
        self._is_returned = body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
        #: The client has not requested the usage that the replica was asked for.
        self.removes_usage = False
        self._filter: UsageEventFilter | None = None

    def feed(self, exchange: PickerExchange, kind: str, message: Any) -> None:
        """Take a part of the response, answer it, and then read it: the client waits for the answer alone."""
        # Of Envoy's metadata alone: a header of the same name can be the engine's, and would blame another replica.
        served = metadata_text(message, LB, SERVED)
        if kind == "response_headers":
            self._take_head(exchange, message.response_headers)
        if served is not None:
            exchange.served_at(ServedBy(served, exchange.answer.status))
        if kind == "response_body":
            body = message.response_body
            self._send_body(body.body, end=body.end_of_stream)
            exchange.feed(body.body, end=body.end_of_stream)
        elif kind == "response_trailers":
            self._end_body()
            exchange.answer.complete = True
            self._output.send_message(UNCHANGED[kind])
        elif kind == "response_headers":
            labels = labels_of(self._state, exchange)
            self._output.send_message(answered(labels, is_shortened=self._filter is not None))
        else:
            self._output.send_message(UNCHANGED[kind])

    def _take_head(self, exchange: PickerExchange, message: Any) -> None:
        headers, answer = read_headers(message), exchange.answer
        answer.read_head(read_status(headers), headers)
        answer.complete = message.end_of_stream
        if self.removes_usage and self._is_returned and answer.is_stream and not answer.complete:
            self._filter = UsageEventFilter()

    def _send_body(self, body: bytes, *, end: bool) -> None:
        if not self._is_returned:
            self._output.send_message(UNCHANGED["response_body"])
            return
        if self._filter is not None:
            body = self._filter.feed(body)
            if end:
                body += self._filter.flush()
            if not (body or end):
                return  # its event is not whole yet, or is the one
        for piece in streamed("response_body", body, end=end):
            self._output.send_message(piece)

    def _end_body(self) -> None:
        """Send what is left of a body that trailers end."""
        rest = b"" if self._filter is None else self._filter.flush()
        if rest:
            for piece in streamed("response_body", rest, end=False):
                self._output.send_message(piece)


# The call of one request: its decision, its end, and where the gateway sends them the bytes of both bodies.
#
# There are two modes, which the first message says: the body of an own Envoy comes whole (BUFFERED),
# and Envoy has it; a gateway sends it in parts and has only what is sent back (FULL_DUPLEX_STREAMED).
#
# Theory of operation. In both modes a request is decided once all of it has come. In the second mode nothing has been
# answered until then: the headers' answer with the choice is sent first, and the body after it, in pieces.


_MODES = (BUFFERED, FULL_DUPLEX_STREAMED)
_INFERENCE = frozenset(INFERENCE_ROUTES)
#: The name in a replica's URL is not resolved: nothing was sent.
_NO_ADDRESS = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed")
_JSON = (b"content-type", b"application/json")


class RequestCall:
    """One request.

    Parameters
    ----------
    state:
        The running picker.
    output:
        The transport's end of the call.
    start:
        What begins the request. Raises `ProtocolError` for a mode that it cannot have.
    """

    __slots__ = (
        "_body",
        "_duplex",
        "_exchange",
        "_has_trailers",
        "_head",
        "_output",
        "_parts",
        "_pending",
        "_refused",
        "_response",
        "_state",
        "_subset",
    )

    def __init__(self, state: PickerState, output: CallOutput, start: RequestStart) -> None:
        self._state = state
        self._output = output
        mode = start.mode.request_body
        self._response = CarriedResponse(start.mode.response_body, self._output, state)
        self._head: RequestHead = start.head
        self._subset = start.mode.subset
        if mode not in _MODES and not self._head.ended:
            raise ProtocolError("expected request_body_mode BUFFERED or FULL_DUPLEX_STREAMED")
        #: The request's body is sent back in pieces.
        self._duplex = mode == FULL_DUPLEX_STREAMED
        self._parts: list[bytes] | None = []
        self._body = b""
        self._has_trailers = False
        self._refused = False
        self._pending: PendingRequest | None = None
        self._exchange: PickerExchange | None = None

    # -- messages

    def feed(self, kind: str, message: Any) -> None:
        """Take a message after the first. Raises `ProtocolError` for one that cannot come now."""
        if self._refused:
            return
        assert self._pending is not None, "it has begun"
        if kind == "request_body":
            self._take_body(message.request_body.body, end=message.request_body.end_of_stream or not self._duplex)
        elif kind == "request_trailers":
            self._take_trailers()
        elif kind == "request_headers":
            raise ProtocolError("expected one message with request_headers")
        elif self._exchange is None:
            raise ProtocolError(f"expected {kind} after the choice")
        else:
            self._response.feed(self._exchange, kind, message)

    def closed(self) -> None:
        """End the exchange."""
        self._parts, self._body = None, b""
        if self._exchange is not None:
            outcome = outcome_of_answer(self._exchange.answer, carried=True) if self._response.has_body else None
            self._exchange.on_call_end(outcome)
        elif self._pending is not None:
            self._pending.on_call_end()
        # They refer to the call: without this only the collector would free all three.
        self._exchange = self._pending = None

    # -- the request

    def begin(self) -> None:
        """Take the head."""
        head, state = self._head, self._state
        client = None
        has_own_routes = not self._duplex or _is_closed(state, *state.replicas.targets.values())
        try:
            if len(head.headers) > MAX_HEADERS:
                raise HttpError(431, "headers_too_large", f"expected at most {MAX_HEADERS} headers")
            answer = None if self._duplex else public_answer(state, head)
            if answer is None:
                client = self._admit_client()
                answer = own_answer(state, head, client) if has_own_routes else None
        except HttpError as error:
            body = error_json(error.status, error.code, error.message, error.details, path=head.path)
            self.refused(error.status, (_JSON, *error.headers), body, error.code)
            return
        if answer is not None:
            self._answer(answer)
            return
        subset = self._subset
        # A gateway sends whatever else it has on these paths to a replica.
        has_prompt = head.path in _INFERENCE and (head.method == "POST" or has_own_routes)
        self._pending = PendingRequest(
            state,
            head,
            self,
            client=client,
            has_prompt=has_prompt,
            replicas=None if subset is None else state.endpoints.replicas(subset),
        )
        if has_prompt and not self._pending.has_method():
            return
        if head.ended:
            self._decide()
        elif not self._duplex:
            self._output.send_message(UNCHANGED["request_headers"])

    def _admit_client(self) -> str | None:
        """Return the name of the client's key, which was for the picker: it is removed. Raises `HttpError` (401)."""
        head, keys = self._head, self._state.routing.client_keys
        if keys is None:
            return None
        try:
            client, head.headers = keys.admit(head.headers)
        except HttpError as error:
            record_early_refusal(self._state.telemetry, error)
            raise
        head.removed = tuple(KEYS)
        return client

    def _take_body(self, body: bytes, *, end: bool) -> None:
        if self._parts is None:
            raise ProtocolError("expected no more of the request's body")
        assert self._pending is not None
        self._parts.append(body)
        if not self._pending.receive(len(body), end=end):
            self._parts = None
        elif end:
            self._decide()

    def _take_trailers(self) -> None:
        if self._parts is None:
            # An own Envoy sends trailers after the body's answer.
            self._output.send_message(UNCHANGED["request_trailers"])
            return
        self._has_trailers = True
        self._decide()

    def _decide(self) -> None:
        assert self._pending is not None
        assert self._parts is not None
        self._body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = None
        if self._pending.has_prompt:
            self._pending.decide(self._body)
        else:
            self._pending.decide_any()

    # -- the decision

    def dispatched(self, dispatch: Dispatch) -> None:
        """Answer with the choice, and in pieces with the body."""
        state, pending = self._state, self._pending
        assert pending is not None
        while state.endpoints.address(dispatch.replica) is None:
            action = state.routing.gateway.finish(dispatch, _NO_ADDRESS)
            if not isinstance(action, Dispatch):
                pending.fail(action)
                return
            dispatch = action
        self._exchange = PickerExchange(state, pending, dispatch, has_entry=not self._response.has_body)
        choice = choose(state, pending, self._exchange)
        self._response.removes_usage = choice.adds_usage
        if self._duplex:
            self._output.send_message(chosen("request_headers", choice, with_body=False))
            if not self._head.ended:
                body = self._body if choice.body is None else choice.body
                for piece in streamed("request_body", body, end=not self._has_trailers):
                    self._output.send_message(piece)
                if self._has_trailers:
                    self._output.send_message(UNCHANGED["request_trailers"])
        else:
            kind = "request_headers" if self._head.ended else "request_body"
            self._output.send_message(chosen(kind, choice, with_body=True))
        self._body = b""
        pending.release_body()

    def refused(self, status: int, headers: Sequence[Header], body: bytes, code: str) -> None:
        """Have Envoy answer the client with an error."""
        self._refused = True
        self._parts, self._body = None, b""
        self._output.send_message(refused(status, headers, body, code=code))
        self._output.end_call()

    def _answer(self, answer: OwnAnswer) -> None:
        """Have Envoy answer the client with something of the picker's own."""
        self.refused(answer.status, (_JSON,), answer.body, "answered")


# The call of the filter of first tokens: it has the beginning of an answer, and ends as soon as that says enough.
#
# In observability mode Envoy waits for nothing: the answer's bytes have passed already.


_KINDS = frozenset({"response_headers", "response_body", "response_trailers"})


class FirstTokenCall:
    """One such call."""

    __slots__ = ("_ended", "_exchange", "_output", "_state")

    def __init__(self, state: PickerState, output: CallOutput) -> None:
        self._state = state
        self._output = output
        self._exchange: PickerExchange | None = None
        self._ended = False

    def feed(self, kind: str, message: Any) -> None:
        """Take a part of the answer. Raises `ProtocolError` for a part of a request."""
        if kind not in _KINDS:
            raise ProtocolError(f"expected a response of the filter of first tokens, and not {kind}")
        if self._ended:
            return
        if self._exchange is None:
            exchange_id = metadata_text(message, OWN, "id")
            exchange = None if exchange_id is None else self._state.open_exchanges.get(exchange_id)
            assert exchange is None or isinstance(exchange, PickerExchange), "calls add no other kind"
            self._exchange = exchange
        if not message.observability_mode:
            self._output.send_message(UNCHANGED[kind])
        if self._exchange is None or self._read(self._exchange, kind, message):
            self._end()

    def closed(self) -> None:
        """Do nothing: the end of the exchange is another call's."""
        self._ended = True

    def _read(self, exchange: PickerExchange, kind: str, message: Any) -> bool:
        """Read a part of the answer; return whether no more of it is needed."""
        served, status = read_served(message)
        if served is not None:
            exchange.served_at(served)
        answer = exchange.answer
        if status and not answer.status:
            answer.status = status
        if kind == "response_headers":
            headers = read_headers(message.response_headers)
            answer.read_head(read_status(headers), headers)
            return bool(message.response_headers.end_of_stream)
        if kind == "response_trailers":
            return True
        body = message.response_body
        exchange.feed(body.body, end=body.end_of_stream)
        if answer.is_stream:
            return not answer.is_waiting or answer.complete
        return answer.complete or answer.size > BODY_BYTES or answer.request is None

    def _end(self) -> None:
        self._ended = True
        self._output.end_call()


class _Role(Protocol):
    def feed(self, kind: str, message: Any) -> None: ...

    def closed(self) -> None: ...


class PickerCall:
    """One call.

    Parameters
    ----------
    state:
        The running picker.
    output:
        The transport's end of the call.
    """

    __slots__ = ("__weakref__", "_closed", "_output", "_role", "_state")

    def __init__(self, state: PickerState, output: CallOutput) -> None:
        self._state = state
        self._output = output
        self._role: _Role | None = None
        self._closed = False
        state.calls.add(self)

    def feed(self, message: bytes) -> None:
        """Take one serialized `ProcessingRequest`; its answers are sent within this step or later.

        Raises `ProtocolError` for what breaks the protocol: the transport ends the call with `INVALID_ARGUMENT`.
        """
        if self._closed:
            return
        try:
            if self._role is None:
                self._begin(message)
            else:
                self._role.feed(*_read(message))
        except ProtocolError:
            self.closed()
            raise
        except Exception as failure:  # the border of one call: a fault in it must not end the others
            log_failure("internal_error", failure)
            self.closed()
            raise ProtocolError("internal error of the picker; its log has more") from failure

    def closed(self) -> None:
        """End the call's part of its exchange: a half-close, reset or lost connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._state.calls.discard(self)
        if self._role is not None:
            self._role.closed()

    def _begin(self, message: bytes) -> None:
        heads = self._state.heads
        start = heads.read(message)
        if start is None:
            kind, request = _read(message)
            if kind in ("response_headers", "response_body"):
                self._role = FirstTokenCall(self._state, self._output)
                self._role.feed(kind, request)
                return
            if kind != "request_headers":
                expected = "expected request_headers, or a response of the filter of first tokens"
                raise ProtocolError(f"{expected}, before {kind}")
            start = heads.read_parsed(request)
        self._role = call = RequestCall(self._state, self._output, start)
        call.begin()


def _read(message: bytes) -> tuple[str, Any]:
    """Return the phase of a serialized `ProcessingRequest`, and it. Raises `ProtocolError`."""
    request = read_message(message)
    kind: str | None = request.WhichOneof("request")
    if kind is None:
        raise ProtocolError("expected a phase of an exchange in the message")
    return kind, request
