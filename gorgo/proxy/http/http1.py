"""HTTP/1.1 from clients, checked: a request has one reading, or is rejected.

Owns the rejection of requests that two programs in a row could read differently, and of heads too large or too slow.
Leaves the grammar to h11 and everything after a valid head to hypercorn.

Theory of operation. A request is smuggled where the proxy and the program before it disagree on its end. h11 rejects
most forms (conflicting lengths, "+5", a blank before the colon, codings other than chunked). It accepts others: a
length beside a coding, a repeated length, folded lines, lines that end with a bare LF, also in trailers. h11 normalizes
these, so the bytes themselves are checked, once per head, before h11 parses it. After a rejection the connection reads
nothing: what follows is not a request.

Bytes behind a request wait for its response, and are read meanwhile up to the size of a head: the end of a connection
comes behind them, and an unread connection does not show that its client disconnected. Behind the last request of a
connection nothing is read as another.

An incomplete response shows by its chunks or its length. A client of HTTP/1.0 may have neither and takes an orderly end
for the end of the response, so its connection is reset.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol

from gorgo.proxy.http.errors import error_json
from gorgo.proxy.http.headers import CONTROLS, LENGTH
from gorgo.proxy.http.heads import HeadLimits, PartialHeads

#: Header lines of a request, or trailers; clients and load balancers send about 30.
MAX_HEADER_LINES = 128
#: The end of a head for h11, bare line feeds included.
_HEAD_END = re.compile(rb"\n\r?\n")
_REQUEST_LINE = re.compile(rb"(\S+) (\S+) HTTP/(\d\.\d)\r\n")
#: Bytes between two pieces of a chunked body: the end of the one before, in parts if it came so, and a size of at most
#: 64 bits. h11 also accepts blanks behind the size, lone CRs in its extension and larger sizes.
_BETWEEN_CHUNKS = re.compile(rb"\r?\n?(?:[0-9A-Fa-f]{1,16}(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n)?")
#: The last chunk's line, read as strictly.
_LAST_CHUNK = re.compile(rb"\r?\n?0{1,16}(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_LENGTHS = re.compile(rb"\r\ncontent-length[ \t]*:[ \t]*([^\r]*)", re.IGNORECASE)
_CODING = re.compile(rb"\r\ntransfer-encoding[ \t]*:", re.IGNORECASE)
#: HTTP/2 without TLS begins like this.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"

_CODES = {
    400: ("invalid_http", "expected HTTP/1.1, and an unambiguous request"),
    408: ("request_timeout", "expected the whole head of the request in time"),
    431: ("headers_too_large", "the request's head is too large"),
    501: ("transfer_encoding", "expected chunked as the only transfer coding"),
    503: ("buffers_full", "too many heads are incomplete; expected the whole head at once"),
    505: ("http_version", "expected HTTP/1.1; for HTTP/2, put a load balancer or Envoy in front"),
}
#: Chunks of one body that may be of any size, and the least mean size beyond: each takes some ten microseconds, and a
#: read could have ten thousand of one byte.
SMALL_CHUNKS, MEAN_CHUNK_BYTES = 512, 64


class StrictConnection(h11.Connection):
    """h11's connection of a server, without its leniency."""

    def __init__(self, limits: HeadLimits) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=limits.size_bytes)
        self._limits = limits
        self._chunked = False
        #: Chunks of the body, and its bytes.
        self._chunks = self._chunk_bytes = 0
        #: An incomplete line end behind a chunk.
        self._partial_end = b""
        self.refused = False
        self._has_had_request = False

    @property
    def unparsed_bytes(self) -> int:
        return len(self._receive_buffer)

    @property
    def has_more(self) -> bool:
        """Whether bytes of the next request may be parsed."""
        return self.their_state is h11.IDLE and bool(self.trailing_data[0])

    @property
    def has_begun(self) -> bool:
        """Whether a head is incomplete."""
        return not self.refused and self.has_more

    @property
    def awaits_first(self) -> bool:
        """Whether no request has come yet."""
        return not self.refused and not self._has_had_request

    def receive_data(self, data: bytes) -> None:
        if not data or self.their_state is not h11.MUST_CLOSE:
            super().receive_data(data)

    def next_event(self) -> Any:
        if self.refused:
            raise h11.RemoteProtocolError("the connection was refused")
        if self.their_state is h11.IDLE:
            self._check_head(self.trailing_data[0])
            event = super().next_event()
            if not isinstance(event, h11.Request):
                return event
            self._has_had_request = True
            return self._without_upgrade(event)
        if self._chunked and self.their_state is h11.SEND_BODY:
            return self._checked_chunk()
        if self.their_state is h11.MUST_CLOSE:
            return h11.NEED_DATA
        event = super().next_event()
        if event is h11.PAUSED and len(self.trailing_data[0]) <= self._limits.size_bytes:
            return h11.NEED_DATA
        return event

    def _checked_chunk(self) -> Any:
        """Return the next event of a chunked body, if its bytes have one reading."""
        before = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += 1
            self._chunk_bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS and self._chunk_bytes < self._chunks * MEAN_CHUNK_BYTES:
                self._reject("many small chunks")
        read = self._partial_end + before[: len(before) - len(self.trailing_data[0])]
        self._partial_end = read if event is h11.NEED_DATA else b""
        if isinstance(event, h11.EndOfMessage):
            self._check_lines(read)
            self._check_size(read)
            if not _LAST_CHUNK.match(read):
                self._reject("an ambiguous chunk")
        elif not _BETWEEN_CHUNKS.fullmatch(
            read[: len(read) - len(event.data)] if isinstance(event, h11.Data) else read
        ):
            self._reject("an ambiguous chunk")
        return event

    def _check_head(self, received: bytes) -> None:
        end = _HEAD_END.search(received)
        if end is None:
            return
        head = received[: end.end()]
        self._check_lines(head)
        self._check_size(head)
        line = _REQUEST_LINE.match(head)
        if line is None:
            return  # h11 rejects it
        if head == _PREFACE:
            self._reject("HTTP/2", 505)
        if not line[2].startswith(b"/"):
            self._reject("the target is not a path")
        if not line[3].startswith(b"1."):
            self._reject("another version")
        self._check_framing(head, line[3])

    def _check_size(self, text: bytes) -> None:
        if len(text) > self._limits.size_bytes or text.count(b"\n") - 2 > MAX_HEADER_LINES:
            self._reject("head or trailers too large", 431)

    def _check_lines(self, text: bytes) -> None:
        """Accept CR and LF only together, no control character, no folded line."""
        lines = text.count(b"\r\n")
        if text.count(b"\n") != lines or text.count(b"\r") != lines:
            self._reject("a line end other than CR LF")
        if len(text.translate(None, CONTROLS)) != len(text):  # a fifth of what a search takes
            self._reject("a control character")
        if b"\r\n " in text or b"\r\n\t" in text:
            self._reject("a folded line")

    def _check_framing(self, head: bytes, version: bytes) -> None:
        lengths = _LENGTHS.findall(head)
        coding = _CODING.search(head) is not None
        if len(lengths) > 1 or (lengths and coding):
            self._reject("several lengths of one body")
        if lengths and LENGTH.fullmatch(lengths[0].rstrip(b" \t")) is None:
            self._reject("a length that is not a number")
        if coding and version != b"1.1":
            self._reject("a transfer coding before HTTP/1.1")
        self._chunked = coding
        self._chunks = self._chunk_bytes = 0

    def _reject(self, why: str, status: int = 400) -> None:
        self.refused = True
        raise h11.RemoteProtocolError(why, error_status_hint=status)

    @staticmethod
    def _without_upgrade(request: h11.Request) -> h11.Request:
        """Return the request without `Upgrade`, which a server may ignore."""
        if not any(name == b"upgrade" for name, _ in request.headers):
            return request
        headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
        return h11.Request(
            method=request.method, headers=headers, target=request.target, http_version=request.http_version
        )


class StrictProtocol(H11Protocol):
    """hypercorn's protocol of one connection over a `StrictConnection`, with a timeout for heads."""

    def __init__(self, limits: HeadLimits, heads: PartialHeads, *hypercorn_args: Any) -> None:
        super().__init__(*hypercorn_args)
        self._limits = limits
        self._heads, self._counted_bytes = heads, 0
        self._strict = StrictConnection(limits)
        self.connection = self._strict
        self._timer: asyncio.TimerHandle | None = None
        self._disconnected = False
        #: Held by the task that parses: the connection's, or one for bytes that came early.
        self._reading = asyncio.Lock()

    async def initiate(self) -> None:
        await super().initiate()
        self._timer = asyncio.get_running_loop().call_later(self._limits.timeout_s, self._on_timeout)

    async def handle(self, event: Event) -> None:
        self._disconnected = self._disconnected or isinstance(event, Closed)
        try:
            await super().handle(event)
        finally:
            self._update_timer()
            self._count_head()

    def release(self) -> None:
        """Count no bytes of a connection that has ended."""
        self._heads.replace(self._counted_bytes, 0)
        self._counted_bytes = 0

    async def _handle_events(self) -> None:
        async with self._reading:
            await super()._handle_events()
        if self._disconnected:  # while it parsed a request
            await self._close_stream()

    async def _handle_early(self) -> None:
        """Parse bytes that came before their turn, unless the client has disconnected."""
        if not self._disconnected:
            await self._handle_events()
            self._update_timer()

    def _update_timer(self) -> None:
        """Set or cancel the head's timer. Nearly every head comes in one piece and has none."""
        strict = not self._disconnected and isinstance(self.connection, StrictConnection)
        begun = strict and (self._strict.has_begun or self._strict.awaits_first)
        if begun and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.timeout_s, self._on_timeout)
        elif not begun and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count_head(self) -> None:
        """Count the bytes of an incomplete head, and refuse it if all of them are too many."""
        before, now = self._counted_bytes, 0 if self._disconnected else self._strict.unparsed_bytes
        if now == before:
            return
        self._counted_bytes = now
        fits = self._heads.replace(before, self._counted_bytes)
        if not fits and self._counted_bytes > before and self._strict.has_begun:
            self._refuse(503)

    def _on_timeout(self) -> None:
        self._refuse(408)

    def _refuse(self, status: int) -> None:
        self._strict.refused = True
        self.task_group.spawn(self._send_refusal, status)

    async def _send_refusal(self, status: int) -> None:
        if self._strict.trailing_data[0]:  # a client that has sent nothing waits for nothing
            await self._send_error_response(status)
        await self.send(Closed())

    async def _maybe_recycle(self) -> None:
        if self.connection.our_state is h11.SEND_BODY and self._strict.their_http_version == b"1.0":
            self.connection_state["reset"]()
        await super()._maybe_recycle()
        if self._strict.has_more:
            self.task_group.spawn(self._handle_early)

    async def _send_h11_event(self, event: Any) -> None:
        """Send an event; after a refusal drop one that comes late, as a timeout of the app's own does."""
        try:
            await super()._send_h11_event(event)
        except h11.LocalProtocolError:
            if not self._strict.refused:
                raise

    async def _send_error_response(self, status_code: int) -> None:
        """Send an error in the proxy's form; h11's own message would repeat what the client sent."""
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
