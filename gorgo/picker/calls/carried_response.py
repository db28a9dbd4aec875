"""The response as it passes through the call of its request, where Envoy sends it there.

Owns what goes back: each byte once, but for the event of usage that only the picker has requested. An own Envoy sends
none of it, and so its client gets that event too.
"""

from __future__ import annotations

from typing import Any

from gorgo.core.stream import UsageEventFilter
from gorgo.live.http.headers import find
from gorgo.picker.exchange.changes import labels_of
from gorgo.picker.exchange.lifetime import PickerExchange
from gorgo.picker.protocol.answers import UNCHANGED, answered, streamed
from gorgo.picker.protocol.messages import LB, SERVED, metadata_text, read_headers, read_status
from gorgo.picker.protocol.output import CallOutput
from gorgo.picker.protocol.protos import ProcessingMode


class CarriedResponse:
    """The response of one call.

    Parameters
    ----------
    body_mode:
        How Envoy sends the body of the response; nothing comes before the choice.
    output:
        The transport's end of the call.
    """

    __slots__ = ("_filter", "_is_returned", "_output", "has_body", "removes_usage")

    def __init__(self, body_mode: int, output: CallOutput) -> None:
        self._output = output
        #: Whether the body passes through the call, and whether Envoy has only what is sent back of it.
        self.has_body = body_mode in (ProcessingMode.STREAMED, ProcessingMode.FULL_DUPLEX_STREAMED)
        self._is_returned = body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
        #: The client has not requested the usage that the replica was asked for.
        self.removes_usage = False
        self._filter: UsageEventFilter | None = None

    def feed(self, exchange: PickerExchange, kind: str, message: Any) -> None:
        """Take a part of the response, answer it, and then read it: the client waits for the answer alone."""
        served = metadata_text(message, LB, SERVED)
        if kind == "response_headers":
            served = self._take_head(exchange, message.response_headers) or served
        if served is not None:
            exchange.served_at(served, exchange.answer.status)
        if kind == "response_body":
            body = message.response_body
            self._send_body(body.body, end=body.end_of_stream)
            exchange.feed(body.body, end=body.end_of_stream)
        elif kind == "response_trailers":
            self._end_body()
            exchange.answer.complete = True
            self._output.send_message(UNCHANGED[kind])
        elif kind == "response_headers":
            labels = labels_of(exchange.dispatch)
            self._output.send_message(answered(labels, is_shortened=self._filter is not None))
        else:
            self._output.send_message(UNCHANGED[kind])

    def _take_head(self, exchange: PickerExchange, message: Any) -> str | None:
        """Read the head; return the address that has served, where a header says so."""
        headers, answer = read_headers(message), exchange.answer
        answer.read_head(read_status(headers), headers)
        answer.complete = message.end_of_stream
        if self.removes_usage and self._is_returned and answer.is_stream and not answer.complete:
            self._filter = UsageEventFilter()
        found = find(headers, SERVED.encode())
        return None if found is None else found.decode("latin-1")

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
