"""One call of Envoy: serialized messages in, serialized messages out, without any transport.

Owns which of two roles a call has, by its first message, and that whatever ends a call ends its part of an exchange.
"""

from __future__ import annotations

from typing import Any, Protocol

from gorgo.live.logs import log_failure
from gorgo.picker.calls.first_token import FirstTokenCall
from gorgo.picker.calls.request import RequestCall
from gorgo.picker.protocol.messages import ProtocolError, read_message
from gorgo.picker.protocol.output import CallOutput
from gorgo.picker.state import PickerState

__all__ = ["CallOutput", "PickerCall", "ProtocolError"]


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
