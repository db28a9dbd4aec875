"""What of HTTP/1.1 is taken from a client: one reading of a request, or none.

Owns refusing what two programs in a row could read as two different requests, and heads that are too large or too slow.
Leaves the grammar itself to h11 and everything after a good head to hypercorn.

Theory of operation. A request is smuggled where the program in front of the proxy and the proxy disagree on where it
ends. h11 refuses most of that (conflicting lengths, "+5", a blank before the colon, codings other than chunked), but it
reads kindly what others read otherwise: a length beside a coding, a length that is given twice, folded lines, lines
that end with a bare LF, also in the trailers. It puts these right before anybody sees them, so they are looked for in
the bytes themselves, once per head, at the only moment at which h11 is about to read one. A refused connection reads
nothing any more: what follows on it is not a request.

What a client sends behind a request waits until that has its answer, and is read meanwhile up to the size of a head:
the end of a connection comes behind all that was sent, and who does not read does not see that its client has left.
Behind a request that was to be the last one nothing is read as another.

An answer that is cut shows it by its chunks or its length. A client of HTTP/1.0 may have neither and takes an orderly
end for the answer's, so its connection is reset.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

import h11
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol

from gorgo.proxy.http.errors import error_json
from gorgo.proxy.http.headers import CONTROLS, LENGTH

#: Header lines of a request, or trailers; clients and load balancers send about 30.
MAX_HEADER_LINES = 128
#: Where h11 sees the end of a head, bare line feeds included.
_HEAD_END = re.compile(rb"\n\r?\n")
_REQUEST_LINE = re.compile(rb"(\S+) (\S+) HTTP/(\d\.\d)\r\n")
#: What stands between two pieces of a chunked body: the end of the one before, in parts if it came so, and a size of at
#: most 64 bits. h11 also takes blanks behind the size, lone CRs in its extension and sizes that others cannot count.
_BETWEEN_CHUNKS = re.compile(rb"\r?\n?(?:[0-9A-Fa-f]{1,16}(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n)?")
_LENGTHS = re.compile(rb"\r\ncontent-length[ \t]*:[ \t]*([^\r]*)", re.IGNORECASE)
_CODING = re.compile(rb"\r\ntransfer-encoding[ \t]*:", re.IGNORECASE)
#: HTTP/2 without TLS begins like this.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"

_CODES = {
    400: ("invalid_http", "expected HTTP/1.1, and a request that has one meaning only"),
    408: ("request_timeout", "the request's head was not complete in time"),
    431: ("headers_too_large", "the request's head is too large"),
    501: ("transfer_encoding", "expected chunked as the only transfer coding"),
    505: ("http_version", "expected HTTP/1.1; for HTTP/2, put a load balancer or Envoy in front"),
}


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Bounds of a request's head: its bytes, and the time from its first byte to its last, s."""

    size_bytes: int
    timeout_s: float


class StrictConnection(h11.Connection):
    """h11's connection for a server, without its kindness."""

    def __init__(self, limits: HeadLimits) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=limits.size_bytes)
        self._limits = limits
        self._chunked = False
        #: Of the line end behind a chunk, what came without the rest.
        self._half = b""
        self.refused = False

    @property
    def has_more(self) -> bool:
        """Whether something of the next request is there, and it is its turn."""
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    @property
    def has_begun(self) -> bool:
        """Whether a head has begun and is not complete."""
        return not self.refused and self.has_more

    def receive_data(self, data: bytes) -> None:
        if not data or self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)

    def next_event(self) -> Any:
        if self.refused:
            raise h11.RemoteProtocolError("the connection was refused")
        if self.their_state is h11.IDLE:
            self._check_head(self.trailing_data[0])
            event = super().next_event()
            return self._without_upgrade(event) if isinstance(event, h11.Request) else event
        if self._chunked and self.their_state is h11.SEND_BODY:
            return self._checked_chunk()
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        event = super().next_event()
        if event is h11.PAUSED and len(self.trailing_data[0]) <= self._limits.size_bytes:
            return h11.NEED_DATA
        return event

    def _checked_chunk(self) -> Any:
        """The next event of a chunked body, if what it was read from can be read in one way only."""
        before = self.trailing_data[0]
        event = super().next_event()
        read = self._half + before[: len(before) - len(self.trailing_data[0])]
        self._half = read if event is h11.NEED_DATA else b""
        if isinstance(event, h11.EndOfMessage):
            self._check_lines(read)
            self._check_size(read)
        elif not _BETWEEN_CHUNKS.fullmatch(
            read[: len(read) - len(event.data)] if isinstance(event, h11.Data) else read
        ):
            self._refuse("a chunk that others read otherwise")
        return event

    def _check_head(self, seen: bytes) -> None:
        end = _HEAD_END.search(seen)
        if end is None:
            return
        head = seen[: end.end()]
        self._check_lines(head)
        self._check_size(head)
        line = _REQUEST_LINE.match(head)
        if line is None:
            return  # h11's affair
        if head == _PREFACE:
            self._refuse("HTTP/2", 505)
        if not line[2].startswith(b"/"):
            self._refuse("the target is not a path")
        if not line[3].startswith(b"1."):
            self._refuse("another version")
        self._check_framing(head, line[3])

    def _check_size(self, text: bytes) -> None:
        if len(text) > self._limits.size_bytes or text.count(b"\n") - 2 > MAX_HEADER_LINES:
            self._refuse("head or trailers too large", 431)

    def _check_lines(self, text: bytes) -> None:
        """CR and LF only together, no control character, no line that goes on in the next."""
        lines = text.count(b"\r\n")
        if text.count(b"\n") != lines or text.count(b"\r") != lines:
            self._refuse("a line ends with something else than CR LF")
        if len(text.translate(None, CONTROLS)) != len(text):  # a fifth of what a search takes
            self._refuse("a control character")
        if b"\r\n " in text or b"\r\n\t" in text:
            self._refuse("a folded line")

    def _check_framing(self, head: bytes, version: bytes) -> None:
        lengths = _LENGTHS.findall(head)
        coding = _CODING.search(head) is not None
        if len(lengths) > 1 or (lengths and coding):
            self._refuse("more than one statement of the body's length")
        if lengths and LENGTH.fullmatch(lengths[0].rstrip(b" \t")) is None:
            self._refuse("a length that is no number")
        if coding and version != b"1.1":
            self._refuse("a transfer coding before HTTP/1.1")
        self._chunked = coding

    def _refuse(self, why: str, status: int = 400) -> None:
        self.refused = True
        raise h11.RemoteProtocolError(why, error_status_hint=status)

    @staticmethod
    def _without_upgrade(request: h11.Request) -> h11.Request:
        """No other protocol is spoken here, and a server may leave the wish unanswered."""
        if not any(name == b"upgrade" for name, _ in request.headers):
            return request
        kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
        return h11.Request(
            method=request.method, headers=kept, target=request.target, http_version=request.http_version
        )


class StrictProtocol(H11Protocol):
    """hypercorn's side of one connection over a `StrictConnection`, with a time limit for heads.

    `made` are hypercorn's own arguments.
    """

    def __init__(self, limits: HeadLimits, *made: Any) -> None:
        super().__init__(*made)
        self._limits = limits
        self._strict = StrictConnection(limits)
        self.connection = self._strict
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        #: Who reads what has come: the connection's task, or one that goes on with what came early.
        self._reading = asyncio.Lock()

    async def handle(self, event: Event) -> None:
        self._over = self._over or isinstance(event, Closed)
        try:
            await super().handle(event)
        finally:
            self._watch(over=self._over)

    async def _handle_events(self) -> None:
        async with self._reading:
            await super()._handle_events()
        if self._over:  # since it began: the request that it found has nobody left
            await self._close_stream()

    async def _go_on(self) -> None:
        """With what came before its turn; nobody waits for an answer to it if the client has left."""
        if not self._over:
            await self._handle_events()
            self._watch(over=self._over)

    def _watch(self, *, over: bool) -> None:
        """Nearly every head comes in one piece and never has a timer."""
        begun = not over and isinstance(self.connection, StrictConnection) and self._strict.has_begun
        if begun and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.timeout_s, self._late)
        elif not begun and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._strict.refused = True
        self.task_group.spawn(self._end_late)

    async def _end_late(self) -> None:
        await self._send_error_response(408)
        await self.send(Closed())

    async def _maybe_recycle(self) -> None:
        if self.connection.our_state is h11.SEND_BODY and self._strict.their_http_version == b"1.0":
            self.connection_state["reset"]()
        await super()._maybe_recycle()
        if self._strict.has_more:
            self.task_group.spawn(self._go_on)

    async def _send_error_response(self, status_code: int) -> None:
        """As the proxy's other errors; h11's own words would repeat what the client sent."""
        code, message = _CODES.get(status_code, _CODES[400])
        body = b"" if self._is_head() else error_json(status_code, code, message)
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        if body:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    def _is_head(self) -> bool:
        scope = getattr(self.stream, "scope", None)
        return scope is not None and scope["method"] == "HEAD"
