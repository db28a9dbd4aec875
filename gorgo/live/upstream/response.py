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

from gorgo.live.http.headers import Header
from gorgo.live.upstream.connection import ReplicaConnection
from gorgo.live.upstream.response_parser import ResponseParser

#: Bytes of a body that its reader has yet to take, before the replica pauses. A read may come on top.
READ_BUFFER_BYTES = 64 * 1024


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
            self._pass_on(body)
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

    def _pass_on(self, body: bytes) -> None:
        sink = self._sink
        if sink is None:
            self._buffer.append(body)
            self._buffered_bytes += len(body)
            if self._buffered_bytes > READ_BUFFER_BYTES:
                self._stop()
            self._wake()
            return
        try:
            takes_more = sink(body)
        except BaseException as failure:  # noqa: BLE001 - raised in the task that pipes
            self._raised = failure
            takes_more = False
        if not takes_more:
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
