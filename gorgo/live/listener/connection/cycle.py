"""One request and its response as an ASGI application sees them: scope, `receive` and `send`.

The scope has three extensions, for what would cost an event or a request a coroutine or a task:

- `gorgo.write`, a `TryWrite`: a chunk of a body goes to the connection in one call that never waits, and from there to
  the socket at once or, in a busy loop, with others (`TurnWrites`). It declines where something would have to wait;
  `send` is the way then.
- `gorgo.take_body`: returns the whole body, if all of it came with the head. `receive` has none of it afterwards.
- `gorgo.on_disconnect`: registers a function that is called once the client disconnects before it has its response.

A response's head is written with the first bytes of its body, or in the loop's next turn if these are not there yet.
The key `gorgo.body_follows` of `http.response.start` says that they come in the same step: no turn is needed then. Its
body is framed by a length, by chunks, or by the end of the connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol, cast

from gorgo.live.event_loop import TurnWrites, writes_of
from gorgo.live.http.errors import Message
from gorgo.live.http.headers import EncodedHeaders, Header
from gorgo.live.listener.connection.reader import Head

# The transport of a connection: what is written to it, the wait for a slow client, and its end.
#
# Owns the order of bytes, the patience with a client that does not read, and the ways to end. What is written, and
# when a connection ends, is `client_connection`'s and `cycle`'s.


#: A client that reads nothing of its response for this long is disconnected; proxies before it idle no longer, s.
LINGER_S = 30.0
#: `struct linger`: close at once, with a reset.
_NO_LINGERING = struct.pack("ii", 1, 0)
#: Bytes that may wait for a turn: nearly every answer and event. More are written at once.
_QUEUED_BYTES = 64 * 1024
#: Bytes that may wait where more come: all are copied for each further event; an event of an engine has some hundred.
MAX_JOINED_BYTES = 4096


class ClientTransport:
    """Writes to one client and closes its connection.

    `writes` are shared with other connections, by default with all of the loop.

    Its protocol passes on `connection_made`, `connection_lost`, `pause_writing` and `resume_writing`.

    `is_behind`: more bytes wait for the client than the transport's buffer should have (asyncio's and uvloop's default
    is 64 KiB). `is_closing`: nothing is written any more. `has_ended_writing`: that side alone is closed.
    """

    __slots__ = (
        "_closing",
        "_drained",
        "_is_paused",
        "_linger",
        "_transport",
        "_waiting",
        "_writes",
        "has_ended_writing",
        "is_behind",
        "is_lost",
        "loop",
    )

    def __init__(self, writes: TurnWrites | None = None) -> None:
        #: Looked up once: in Python 3.11 this is a system call.
        self.loop = asyncio.get_running_loop()
        self._writes = writes_of(self.loop) if writes is None else writes
        #: Bytes for the next turn.
        self._waiting = b""
        #: None until the connection is made, after a TLS handshake.
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self._linger: LingerTimeout | None = None
        self._is_paused = False
        self._closing = self.has_ended_writing = False
        self.is_behind = self.is_lost = False

    @property
    def is_made(self) -> bool:
        return self._transport is not None

    @property
    def is_closing(self) -> bool:
        # A transport closes itself after a failed write, a step before `connection_lost`.
        if self._closing or self.has_ended_writing:
            return True
        return self._transport is not None and self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self) -> None:
        self._closing = self.is_lost = True
        if self._linger is not None:
            self._linger.stop()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.is_behind = True

    def resume_writing(self) -> None:
        self.is_behind = False
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def write(self, data: bytes) -> None:
        """Write bytes, or queue them for the next turn where the loop is busy; all in their order."""
        if self._waiting:
            data = self._waiting + data
            if len(data) <= MAX_JOINED_BYTES:
                self._waiting = data
                return
            self._waiting = b""
        elif len(data) <= _QUEUED_BYTES and self._writes.are_many(self.loop.time()):
            self._waiting = data
            self._writes.add(self)
            return
        assert self._transport is not None
        self._transport.write(data)

    def write_waiting(self) -> None:
        data, self._waiting = self._waiting, b""
        transport = self._transport
        # `is_closing` without a call: an event comes here.
        if data and transport is not None and not (self._closing or self.has_ended_writing or transport.is_closing()):
            transport.write(data)

    async def drained(self) -> None:
        """Wait until the client is no longer behind, or the connection has ended."""
        while self.is_behind:
            if self._drained is None:
                self._drained = self.loop.create_future()
            await asyncio.shield(self._drained)

    def pause_reading(self, pause: bool) -> None:
        """Pause or resume reading, unless that is so already."""
        if pause is not self._is_paused and not self.is_closing:
            assert self._transport is not None
            self._is_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def end_writing(self) -> None:
        """Write nothing more, but read on: what a client still sends would reset a closed connection."""
        assert self._transport is not None
        self.write_waiting()
        self.has_ended_writing = True
        if self._transport.can_write_eof():  # not under TLS
            self._transport.write_eof()

    def close(self) -> None:
        """Close the connection once what was written is sent, or the client reads nothing of it for too long."""
        if self._transport is None or self._closing:
            return
        self.write_waiting()
        self._closing = True
        self._transport.close()
        if unsent_bytes(self._transport):
            self._linger = LingerTimeout(self.loop, self._transport)

    def abort_transport(self) -> None:
        """Close the connection at once; unsent bytes are dropped."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Reset the connection; unsent bytes are dropped."""
        assert self._transport is not None
        client = self._transport.get_extra_info("socket")
        with suppress(OSError):  # disconnected
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.abort_transport()


class LingerTimeout:
    """Aborts a connection whose client reads nothing of its response; an orderly end would wait for it for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._left = unsent_bytes(transport)
        self._timer = loop.call_later(LINGER_S, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        before, self._left = self._left, unsent_bytes(self._transport)
        if self._left >= before:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LINGER_S, self._check)


def unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """Return the size of the write buffer; 0 for a closed TLS transport of uvloop, which has no buffer."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0


#: Bytes of a request's body that wait for the application before reading is paused.
BODY_BYTES = 256 * 1024

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
#: Statuses whose responses have no body, whatever the headers say.
_WITHOUT_BODY = frozenset({204, 304})
#: Headers that say how the response ends; the connection writes the last two itself.
_FRAMING = frozenset({b"content-length", b"connection", b"transfer-encoding"})
_ASGI = {"spec_version": "2.1", "version": "3.0"}


class RequestConnection(Protocol):
    """The connection, as a request uses it beside its transport."""

    def own_headers(self) -> bytes:
        """Return the lines of the server's own headers."""

    def must_close(self) -> bool:
        """Return whether the response that begins is the connection's last."""

    def body_taken(self) -> None:
        """The application took what was received of the body."""

    def response_ended(self) -> None: ...


class RequestCycle:
    """One request and its response.

    `ended`: the whole response was written. `started`: its head has been decided.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_expects_continue",
        "_left",
        "_on_disconnect",
        "_parts",
        "_request",
        "_taken",
        "_transport",
        "_unsent_head",
        "_waiters",
        "_writable",
        "body_bytes",
        "complete",
        "disconnected",
        "ended",
        "persistent",
        "started",
    )

    def __init__(self, connection: RequestConnection, transport: ClientTransport, request: Head) -> None:
        self._connection = connection
        self._transport = transport
        self._request = request
        self._expects_continue = request.expects_continue
        self.persistent = request.persistent
        #: The body: pieces that the application has not taken, their size, whether all have come and were taken.
        self._parts: list[bytes] = []
        self.body_bytes = 0
        self.complete = self._taken = False
        #: Calls of `receive` that wait; a second one discards what the first leaves.
        self._waiters: list[asyncio.Future[None]] = []
        self.disconnected = False
        self._on_disconnect: Callable[[], None] | None = None
        self.started = self.ended = False
        #: Whether the response may have body bytes now, and how they are framed: its length, chunks, or neither.
        self._writable = self._chunked = False
        self._left: int | None = None
        self._unsent_head = b""

    @property
    def is_head(self) -> bool:
        return self._request.method == "HEAD"

    @property
    def ends_with_connection(self) -> bool:
        """Whether the end of the connection is the end of the response: only a reset shows that it was cut."""
        return self._writable and not self._chunked and self._left is None

    def scope(self, addresses: tuple[object, object], scheme: str, root_path: str, state: dict[str, Any]) -> Message:
        """Return the scope of the application's call."""
        request = self._request
        extensions: dict[str, Any] = {"gorgo.write": self.try_write, "gorgo.on_disconnect": self.on_disconnect}
        if self.complete:
            extensions["gorgo.take_body"] = self.take_body
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": request.version,
            "method": request.method,
            "scheme": scheme,
            "path": request.path,
            "raw_path": request.raw_path,
            "query_string": request.query,
            "root_path": root_path,
            "headers": request.headers,
            "client": addresses[0],
            "server": addresses[1],
            "state": state,
            "extensions": extensions,
        }

    # -- the request

    def feed(self, part: bytes, *, complete: bool) -> None:
        """Take bytes of the body; `complete` with the last."""
        if part and not self.ended:
            self._parts.append(part)
            self.body_bytes += len(part)
        self.complete = complete
        self._wake()

    def disconnect(self) -> None:
        """The client has disconnected, or was refused."""
        if self.disconnected:
            return
        self.disconnected = True
        self._wake()
        call, self._on_disconnect = self._on_disconnect, None
        if call is not None:
            call()

    def on_disconnect(self, call: Callable[[], None]) -> None:
        """Register the function that a disconnect before the end of the response calls."""
        if self.disconnected:
            self._transport.loop.call_soon(call)
        elif not self.ended:
            self._on_disconnect = call

    def returned(self) -> None:
        """The application's call has ended."""
        self._on_disconnect = None

    def take_body(self) -> bytes:
        """Return the whole body, all of which has come."""
        body = b"".join(self._parts)
        self._parts, self.body_bytes, self._taken = [], 0, True
        return body

    async def receive(self) -> Message:
        """Return the next part of the body, and after the last a disconnect as soon as there is one."""
        if self._expects_continue and not (self.complete or self._parts or self.started or self.disconnected):
            self._expects_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._parts or self.disconnected or self.ended or (self.complete and not self._taken)):
            await self._wait()
        if self._taken or self.ended or not (self._parts or self.complete):
            return {"type": "http.disconnect"}
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        self.body_bytes = 0
        self._taken = self.complete
        if not self._taken:
            self._connection.body_taken()
        return {"type": "http.request", "body": body, "more_body": not self._taken}

    async def _wait(self) -> None:
        waiter = self._transport.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- the response

    async def send_message(self, message: Message) -> None:
        """Send one message of the application. After the end of the connection it has no effect."""
        kind = message["type"]
        if kind == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            if "gorgo.body_follows" not in message:
                self._transport.loop.call_soon(self.flush_head)
        elif kind == "http.response.body":
            await self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected message {kind}")

    def try_write(self, chunk: bytes) -> bool:
        """Write a chunk of a body without a length; False if that is not possible now."""
        if not self._writable or self._left is not None or not chunk:
            return False
        transport = self._transport
        if transport.is_behind or transport.is_closing:
            return False
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        transport.write(self._with_head(chunk) if self._unsent_head else chunk)
        return True

    def flush_head(self) -> None:
        """Write a head whose body is yet to come."""
        if self._unsent_head and not self._transport.is_closing:
            self._transport.write(self._with_head(b""))

    def refuse(self) -> None:
        """End the response: the connection has written another."""
        self.disconnect()
        self.ended = True
        self._writable = False
        self._unsent_head = b""

    def _start(self, status: int, headers: Iterable[Header]) -> None:
        if self.started:
            if self.ended:
                return
            raise RuntimeError("the response has begun")
        last, own_headers = self._connection.must_close(), self._connection.own_headers()
        head = ResponseHead(status, headers, self._request, last=last, own_headers=own_headers)
        self.started = True
        self.persistent = head.persistent
        self._writable, self._chunked, self._left = head.has_body, head.chunked, head.length
        self._unsent_head = head.text

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.ended:
            return
        if not self.started:
            raise RuntimeError("a body before its head")
        data = self._framed(body, more=more)
        transport = self._transport
        if self._unsent_head:
            data = self._with_head(data)
        if data and not transport.is_closing:
            transport.write(data)
        if transport.is_behind:
            await transport.drained()
        if not more and not self.ended:
            self.ended = True
            self._writable = False
            self._on_disconnect = None
            self._wake()
            self._connection.response_ended()

    def _framed(self, body: bytes, *, more: bool) -> bytes:
        if not self._writable:
            return b""
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk if more else chunk + b"0\r\n\r\n"
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("a body of another size than its length")
        return body

    def _with_head(self, data: bytes) -> bytes:
        head, self._unsent_head = self._unsent_head, b""
        return head + data


class ResponseHead:
    """A head that can be written.

    `length`: of the body, None if it is not declared. `chunked`: the body has chunks. `persistent`: another request may
    follow. `has_body`: bytes of a body are written; for HEAD, 204 and 304 they are not.
    """

    __slots__ = ("chunked", "has_body", "length", "persistent", "text")

    def __init__(
        self, status: int, headers: Iterable[Header], request: Head, *, last: bool, own_headers: bytes
    ) -> None:
        closes = last or not request.persistent
        if isinstance(headers, EncodedHeaders):
            self.length, fields = headers.length, headers.lines
        else:
            self.length, fields, ends = _encoded(headers)
            closes = closes or ends
        # Without a length, a client of HTTP/1.0 reads to the end of the connection, which is not persistent.
        self.chunked = self.length is None and status not in _WITHOUT_BODY and request.version == "1.1"
        self.has_body = status not in _WITHOUT_BODY and request.method != "HEAD"
        self.persistent = not closes
        self.text = b"".join(
            (
                _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
                fields,
                b"transfer-encoding: chunked\r\n" if self.chunked else b"",
                own_headers,
                b"connection: close\r\n\r\n" if closes else b"\r\n",
            )
        )


def _encoded(headers: Iterable[Header]) -> tuple[int | None, bytes, bool]:
    """Return the declared length, the lines, and whether the application ends the connection."""
    length: int | None = None
    closes = False
    parts: list[bytes] = []
    for name, value in headers:
        lower = name.lower()
        if lower in _FRAMING:
            if lower == b"content-length":
                length = int(value)
            elif lower == b"connection":
                closes = closes or b"close" in value.lower()
                continue
            else:
                continue
        parts += (lower, b": ", value, b"\r\n")
    fields, count = b"".join(parts), len(parts) // 4
    if not fields.count(b"\r\n") == fields.count(b"\n") == fields.count(b"\r") == count or b"\0" in fields:
        raise RuntimeError("a header with a line end or a NUL")
    return length, fields, closes
