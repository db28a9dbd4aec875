"""The call of one request: its decision, its end, and where the gateway sends them the bytes of both bodies.

Owns the order of answers. Two modes, which the first message says: the body of an own Envoy comes whole (BUFFERED), and
Envoy has it; a gateway sends it in parts and has only what is sent back (FULL_DUPLEX_STREAMED).

Theory of operation. In both modes a request is decided once all of it has come. In the second mode nothing has been
answered until then: the headers' answer with the choice is sent first, and the body after it, in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.http.errors import HttpError, error_json
from gorgo.live.http.headers import KEYS, Header
from gorgo.live.request.refusals import record_early_refusal
from gorgo.live.request.routes import INFERENCE_ROUTES
from gorgo.picker.calls.carried_response import CarriedResponse
from gorgo.picker.calls.own_routes import OwnAnswer, own_answer, public_answer
from gorgo.picker.exchange.changes import choose
from gorgo.picker.exchange.lifetime import PickerExchange
from gorgo.picker.exchange.outcomes import outcome_of_answer
from gorgo.picker.exchange.pending import PendingRequest
from gorgo.picker.protocol.answers import UNCHANGED, chosen, refused, streamed
from gorgo.picker.protocol.heads import RequestHead, RequestStart
from gorgo.picker.protocol.messages import BUFFERED, FULL_DUPLEX_STREAMED, ProtocolError
from gorgo.picker.protocol.output import CallOutput
from gorgo.picker.state import PickerState

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
        self._response = CarriedResponse(start.mode.response_body, self._output)
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
        try:
            answer = None if self._duplex else public_answer(state, head)
            if answer is None:
                client = self._admit_client()
                answer = None if self._duplex else own_answer(state, head, client)
        except HttpError as error:
            body = error_json(error.status, error.code, error.message, error.details, path=head.path)
            self.refused(error.status, (_JSON, *error.headers), body, error.code)
            return
        if answer is not None:
            self._answer(answer)
            return
        subset = self._subset
        # A gateway sends whatever else it has on these paths to a replica.
        has_prompt = head.path in _INFERENCE and (head.method == "POST" or not self._duplex)
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
