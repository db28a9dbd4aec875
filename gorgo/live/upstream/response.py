"""The response to one request: its head, then its body by iteration or by a sink.

Owns buffering between the connection and the reader, and the end of the response's use of its connection.

Theory of operation. With a sink (`pipe`), bytes go from the socket's read to their destination in one call; the task of
the request sleeps. Without one they are buffered, and the replica pauses while the buffer is full. The connection
returns to the pool at the last byte of the body, even before all of it is consumed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import httpx
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gorgo.live.http.headers import Header
from gorgo.live.upstream.connection import READ_BUFFER_BYTES, ReplicaConnection

# One HTTP/1.1 response read by httptools: its head, its body, and whether its connection may carry another.
#
# Owns which responses are refused and the bounds of a head. Opens and reads nothing: bytes are fed, whatever their
# cuts.
#
# Theory of operation. httptools (llhttp) refuses bare line ends, folded lines, two lengths, and a length beside a
# coding. Refused here: a coding that would pass to the client without its label, a switch of protocols, a flood of
# interim answers, and heads without end. The parser calls `list.append` for each piece of a body: a response of
# one-byte chunks costs no Python per chunk.


#: Interim answers (1xx) before the final one, at most. Engines send one or none.
MAX_INTERIM = 8
#: Headers of a response with its interim answers and trailers. Engines send ten, gateways thirty.
MAX_HEADERS = 128
#: Bytes that bring no body: a head, trailers or the extensions of a chunk. Twice the longest head of common servers.
MAX_HEAD_BYTES = 64 * 1024
#: Headers that say where a body ends.
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class ResponseError(Exception):
    """The bytes are no response to the request, or one with two readings."""


class ResponseParser:
    """Parses one response.

    Parameters
    ----------
    head_only:
        The response has no body, whatever its headers say: it is that to HEAD.
    """

    __slots__ = (
        "_head_only",
        "_interim",
        "_lines",
        "_parser",
        "_pieces",
        "_without_body",
        "complete",
        "failure",
        "headers",
        "on_body",
        "reusable",
        "status",
        "until_eof",
    )

    def __init__(self, *, head_only: bool = False) -> None:
        #: 0 before the end of the final head.
        self.status = 0
        #: As they came, without trailers.
        self.headers: list[Header] = []
        self.complete = False
        #: The connection may carry another response. Known at the end.
        self.reusable = False
        #: The body ends with the connection.
        self.until_eof = False
        #: Why no byte after it is read.
        self.failure: ResponseError | None = None
        self._head_only = head_only
        self._interim = 0
        self._lines = 0
        self._without_body = 0
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self._parser: HttpResponseParser | None = HttpResponseParser(self)

    def feed(self, data: bytes) -> bytes:
        """Parse `data` and return the bytes of the body in it; sets `failure` at the first that are wrong."""
        parser, pieces = self._parser, self._pieces
        if parser is None:
            self.reusable = False  # more bytes than the response has
            return b""
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as failure:
            self._fail(failure)
        if self.complete:
            self.close()
        if pieces:
            self._without_body = 0
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            return b"" if self._head_only else body
        self._without_body += len(data)
        if self._without_body > MAX_HEAD_BYTES and self.failure is None:
            self.failure = ResponseError(f"more than {MAX_HEAD_BYTES} bytes without a body")
        return b""

    def feed_eof(self) -> bool:
        """Record the end of the connection; return whether the response is complete with it."""
        if self.until_eof and self.failure is None:
            self.complete = True
        self.reusable = False
        self.close()
        return self.complete

    def close(self) -> None:
        """Parse no more. The parser and this object refer to each other: without it they wait for the GC."""
        self._parser = None

    def on_message_begin(self) -> None:
        if self.complete:
            raise ResponseError("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        if self._lines > MAX_HEADERS:
            raise ResponseError(f"more than {MAX_HEADERS} headers")
        if not self.status:
            self.headers.append((name, value))
        elif name.lower() in _FRAMING:
            raise ResponseError("a trailer that says where the body ends")
        # Else a trailer, which no client of a stream waits for.

    def on_headers_complete(self) -> None:
        assert self._parser is not None, "it parses"
        status = self._parser.get_status_code()
        has_length = self._has_length()
        if status < 200:
            self._count_interim(status)
            return
        self.status = status
        if self._head_only:
            # The parser awaits a body, so the connection closes after this response.
            self.complete = True
        elif status not in (204, 304):
            self.until_eof = not has_length

    def on_message_complete(self) -> None:
        assert self._parser is not None, "it parses"
        if self.status and not self._head_only:
            self.complete = True
            # Before HTTP/1.1 neither keeping a connection nor chunks have one meaning.
            self.reusable = self._parser.should_keep_alive() and self._parser.get_http_version() == "1.1"

    def _count_interim(self, status: int) -> None:
        self._interim += 1
        if status == 101 or status < 100 or self._interim > MAX_INTERIM:
            raise ResponseError(f"a switch of protocols, or more than {MAX_INTERIM} interim answers")
        self.headers.clear()

    def _has_length(self) -> bool:
        """Return whether the head says where the body ends. Raises for any transfer coding but chunked."""
        has_length = False
        codings = 0
        for name, value in self.headers:
            size = len(name)
            if size == 14 and name.lower() == b"content-length":
                has_length = True
            elif size == 17 and name.lower() == b"transfer-encoding":
                codings += 1
                if codings > 1 or value.strip().lower() != b"chunked":
                    raise ResponseError("a transfer coding other than chunked")
                has_length = True
        return has_length

    def _fail(self, failure: Exception) -> None:
        self.reusable = False
        if self.complete:
            return  # what follows a response concerns the connection alone
        context = failure.__context__
        self.failure = context if isinstance(context, ResponseError) else ResponseError(str(failure))


class HttpResponse(httpx.AsyncByteStream):
    """One response, and the stream of its body. Failures are those of `httpx.TransportError`."""

    __slots__ = (
        "_buffer",
        "_buffered_bytes",
        "_connection",
        "_failure",
        "_loop",
        "_parser",
        "_raised",
        "_sink",
        "_waiter",
        "received",
    )

    def __init__(self, connection: ReplicaConnection, *, head_only: bool = False) -> None:
        self._parser = ResponseParser(head_only=head_only)
        #: None once the connection serves others, or is closed.
        self._connection: ReplicaConnection | None = connection
        self._loop = connection.loop
        self._buffer: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._failure: httpx.TransportError | None = None
        self._sink: Callable[[bytes], bool] | None = None
        #: What the sink raised.
        self._raised: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        #: A byte has come, so the replica has had the request.
        self.received = False

    @property
    def status(self) -> int:
        return self._parser.status

    @property
    def headers(self) -> list[Header]:
        """As they came, in their order and with duplicates."""
        return self._parser.headers

    async def read_head(self) -> None:
        """Return when status and headers are known."""
        while not self._parser.status:
            if self._failure is not None:
                raise self._failure
            await self._wait()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next bytes of the body, never decoded."""
        while not self._buffer:
            if self._is_ended():
                raise StopAsyncIteration
            await self._wait()
        return self._take()

    async def pipe(self, sink: Callable[[bytes], bool]) -> bool:
        """Pass the rest of the body to `sink` as it comes; see `client.ResponseSource`."""
        while self._buffer:
            if not sink(self._take()):
                return False
        self._sink = sink
        try:
            while not self._is_ended():
                await self._wait()
                if self._raised is not None:
                    raise self._raised
                if not self._is_piping():
                    return False
        finally:
            self._sink = self._raised = None
        return True

    def take_whole(self, limit: int) -> bytes | None:
        """Return the rest of a body that has come to its end, of at most `limit` bytes; `None` for any other."""
        if not self._parser.complete or self._failure is not None or self._buffered_bytes > limit:
            return None
        body = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        return body

    async def aclose(self) -> None:
        """Close the connection unless the response was received to its end. Idempotent."""
        if self._connection is not None:
            self._fail(httpx.ReadError("the response is closed"))

    def feed(self, data: bytes) -> None:
        self.received = True
        parser = self._parser
        had_head = parser.status
        body = parser.feed(data)
        if body:
            # Without a call of its own: an event comes here.
            sink = self._sink
            if sink is None:
                self._store(body)
            else:
                try:
                    if not sink(body):
                        self._end_piping()
                except BaseException as failure:  # noqa: BLE001 - raised in the task that pipes
                    self._raised = failure
                    self._end_piping()
        if parser.failure is not None:
            self._fail(httpx.RemoteProtocolError(str(parser.failure)))
        elif parser.complete:
            self._release(reusable=parser.reusable)
        elif not had_head and parser.status:
            self._wake()

    def on_lost(self, failure: Exception | None) -> None:
        if failure is None and self._parser.feed_eof():
            self._release(reusable=False)
        else:
            self._fail(httpx.ReadError(str(failure or "the connection ended before its response")))

    def _store(self, body: bytes) -> None:
        """Buffer bytes that no sink takes yet."""
        self._buffer.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > READ_BUFFER_BYTES:
            self._stop()
        self._wake()

    def _end_piping(self) -> None:
        self._sink = None
        self._stop()
        self._wake()

    def _is_piping(self) -> bool:
        return self._sink is not None

    def _take(self) -> bytes:
        chunk = self._buffer.popleft()
        self._buffered_bytes -= len(chunk)
        return chunk

    def _is_ended(self) -> bool:
        """Return whether the body is complete. Raises the failure of one that is not, and never will be."""
        if self._failure is not None:
            raise self._failure
        return self._parser.complete

    def _wait(self) -> asyncio.Future[None]:
        """Return what the next change resolves. Reading goes on: the buffer is empty."""
        self._waiter = waiter = self._loop.create_future()
        if self._connection is not None:
            self._connection.resume()
        return waiter

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.stop()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: httpx.TransportError) -> None:
        if self._failure is None:
            self._failure = failure
        self._release(reusable=False)

    def _release(self, *, reusable: bool) -> None:
        """End the use of the connection."""
        self._parser.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(reusable=reusable)
        self._wake()
