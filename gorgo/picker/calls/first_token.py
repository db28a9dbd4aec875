"""The call of the filter of first tokens: it has the beginning of an answer, and ends as soon as that says enough.

In observability mode Envoy waits for nothing: the answer's bytes have passed already.
"""

from __future__ import annotations

from typing import Any

from gorgo.picker.exchange.answer import BODY_BYTES
from gorgo.picker.exchange.lifetime import PickerExchange
from gorgo.picker.protocol.answers import UNCHANGED
from gorgo.picker.protocol.messages import OWN, ProtocolError, metadata_text, read_headers, read_served, read_status
from gorgo.picker.protocol.output import CallOutput
from gorgo.picker.state import PickerState

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
            found = None if exchange_id is None else self._state.open_exchanges.get(exchange_id)
            assert found is None or isinstance(found, PickerExchange), "calls add no other kind"
            self._exchange = found
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
            exchange.served_at(served, status)
        answer = exchange.answer
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
