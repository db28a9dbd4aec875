"""The client to one replica: requests out, responses in as byte chunks.

Owns how many responses may be open, the stable words for failures, and the pool of connections. Leaves the meaning
of the bytes to the relay, which sees `ResponseSource` and `UpstreamError`.

Any `httpx.AsyncBaseTransport` can stand in place of the pool, as in `gorgo serve --plain`. The pool itself is called
without httpx's objects, which would cost each request tens of microseconds, and with the head's fixed lines as bytes.
Its reader of responses is loaded with its first request, so that a transport does not need it.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

import httpx

from gorgo.config.values import REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.ttft import Pacing, TcpWindows
from gorgo.core.limits import BufferBudget
from gorgo.core.record import mutable_record
from gorgo.live.http.headers import EncodedHeaders, Header, encode_lines
from gorgo.live.upstream.address import Address, connect_cause
from gorgo.live.upstream.connection import (
    STALE_S,
    ConnectionTracker,
    OnChange,
    PooledConnection,
    ReplicaConnection,
    bbr_state,
    idling_shrinks,
)
from gorgo.live.upstream.transport import NewTransport, TrackedTransport

if TYPE_CHECKING:
    from gorgo.live.upstream.response import HttpResponse

# Connections to one replica: which one a request takes, how long an idle one stays open, and the repeated request.
#
# Owns the bytes of a request's head too, which its callers encode: most lines of it never change. Leaves the bytes of
# a response to `response`, the number of requests to `client`.
#
# Theory of operation. The connection used last is taken first: few connections then carry all, with open windows. A
# kept connection that the server has closed fails at once, without a byte of a response. That is no failure of the
# replica, so the request is sent once more, on a new connection. If that one is refused, the replica may have died of
# the request, so the failure is that of the first connection. After a later failure the replica may have had the
# request, so it is not repeated.


_METHOD = re.compile(rb"[A-Za-z]+")
_TARGET = re.compile(rb"[\x21-\x7e]+")


class UpstreamPool:
    """HTTP/1.1 to one origin.

    Parameters
    ----------
    origin:
        Scheme, host and port.
    tls:
        Shared by all replicas: loading the certificates takes 20 ms.
    keep_alive_s:
        Time for which an idle connection stays open.
    """

    def __init__(self, origin: httpx.URL, *, tls: ssl.SSLContext, keep_alive_s: float = REPLICA_KEEP_ALIVE_S) -> None:
        self._is_tls = origin.scheme == "https"
        self._address = Address(origin.raw_host.decode(), origin.port or (443 if self._is_tls else 80))
        self._tls = tls
        self._keep_alive_s = keep_alive_s
        self.tracker = ConnectionTracker(
            keep_alive_s=keep_alive_s, idling_shrinks=idling_shrinks(), read_tcp_info=_read_tcp_info
        )
        #: All that are open, and of those the idle ones with the time of their last response, the newest last.
        self._open: set[ReplicaConnection] = set()
        self._idle: OrderedDict[ReplicaConnection, float] = OrderedDict()
        self._expiry: asyncio.TimerHandle | None = None
        self._is_closed = False
        #: Loaded by the first request.
        self._response: type[HttpResponse] | None = None
        #: Called with the old and the new address when another process has taken the replica's place.
        self.on_replaced: Callable[[str, str], None] | None = None

    def set_tls(self, tls: ssl.SSLContext) -> None:
        """Use `tls` for connections opened from now on."""
        self._tls = tls

    @property
    def has_idle(self) -> bool:
        """Return whether an open connection is free for a request."""
        self._close_expired()
        return any(connection.is_connected() for connection in self._idle)

    @property
    def has_name(self) -> bool:
        """Return whether the origin's host is a name, which may move."""
        return self._address.is_name

    def refuse_addresses(self, refuses: Callable[[str], str | None] | None) -> None:
        """Connect to no address of the name for which `refuses` has a reason, from now on."""
        self._address.refuses = refuses

    @property
    def checked_peer(self) -> str | None:
        """Return the address of the last connection where those of the name are checked."""
        return None if self._address.refuses is None else self._address.peer

    async def resolve_name(self) -> frozenset[str]:
        """Look the name up, and return its addresses. Raises `OSError`.

        Connections to an address that has left carry no other request.
        """
        await self._address.resolve_name()
        addresses = self._address.addresses
        for connection in [*self._open]:
            if connection.peer is not None and connection.peer not in addresses:
                connection.retired = True
                if self._idle.pop(connection, None) is not None:
                    connection.close()
        return addresses

    async def send(
        self,
        head: bytes,
        body: bytes,
        *,
        connect_timeout_s: float | None,
        head_only: bool = False,
        repeatable: bool = True,
        on_sent: Callable[[], None] | None = None,
    ) -> HttpResponse:
        """Send a request; return at the head of its response. Raises `httpx.TransportError`.

        `head_only` is for HEAD, whose response has no body. `on_sent` is called when the request is written, before
        the wait for its response; again for a repeated request. Only what is `repeatable` may reach the replica twice.
        """
        stale: httpx.NetworkError | None = None
        new_response = self._response
        if new_response is None:
            new_response = self._response = _response_type()
        connection = self._take_idle()
        if connection is not None:
            loop = connection.loop
            begun_s = loop.time()
            response = new_response(connection, head_only=head_only)
            try:
                return await self._exchange(connection, response, head, body, on_sent)
            except httpx.NetworkError as failure:
                if not repeatable or response.received or loop.time() - begun_s >= STALE_S:
                    raise
                stale = failure
        try:
            connection = await self._connect(connect_timeout_s)
        except httpx.ConnectError:
            if stale is None:
                raise
            raise stale.with_traceback(None) from None
        return await self._exchange(connection, new_response(connection, head_only=head_only), head, body, on_sent)

    async def aclose(self) -> None:
        """Close every connection at once, those in use too."""
        self._is_closed = True
        for connection in [*self._open]:
            connection.close()
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.sleep(0)  # transports close their sockets in the next turn

    async def _exchange(
        self,
        connection: ReplicaConnection,
        response: HttpResponse,
        head: bytes,
        body: bytes,
        on_sent: Callable[[], None] | None,
    ) -> HttpResponse:
        try:
            connection.write_request(head, body, response)
            # The records come second: the replica does not wait for them.
            self.tracker.on_acquire(connection, len(body))
            self.tracker.report()
            if on_sent is not None:
                on_sent()
            await response.read_head()
        except BaseException:
            await response.aclose()
            raise
        return response

    def _take_idle(self) -> ReplicaConnection | None:
        self._close_expired()
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_connected():
                return connection
        return None

    async def _connect(self, timeout_s: float | None) -> ReplicaConnection:
        """Open a connection; name resolution, all addresses and TLS within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open_connection()
        except OSError as failure:
            if isinstance(failure, TimeoutError) and failure.errno is None:
                raise httpx.ConnectTimeout(f"no connection within {timeout_s} s") from failure
            raise httpx.ConnectError(str(failure)) from failure

    async def _open_connection(self) -> ReplicaConnection:
        socket = await self._address.open_socket()
        tls, name = (self._tls, self._address.host) if self._is_tls else (None, None)
        try:
            peer = str(socket.getpeername()[0])
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: ReplicaConnection(self._on_idle, self._on_lost), sock=socket, ssl=tls, server_hostname=name
            )
        except BaseException:
            socket.close()
            raise
        if not connection.is_connected():
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        connection.socket, connection.peer = socket, peer
        self._open.add(connection)
        self._note_peer(peer)
        if self._is_closed:
            connection.close()
        return connection

    def _note_peer(self, peer: str) -> None:
        before = self._address.peer
        if self._address.is_replaced(peer) and before is not None:
            for connection in self._open:
                if connection.peer == before:
                    connection.retired = True
            for connection in [each for each in self._idle if each.retired]:
                del self._idle[connection]
                connection.close()
            if self.on_replaced is not None:
                self.on_replaced(before, peer)

    def _on_idle(self, connection: ReplicaConnection) -> None:
        if connection.retired:
            connection.close()
            return
        self._idle[connection] = connection.loop.time()
        if self._expiry is None:
            self._await_expiry(self._keep_alive_s)
        self.tracker.on_release(connection)
        self.tracker.report()

    def _on_lost(self, connection: ReplicaConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self.tracker.on_lost(connection)
        self.tracker.report()

    def _await_expiry(self, delay_s: float) -> None:
        self._expiry = asyncio.get_running_loop().call_later(delay_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry = None
        self._close_expired()
        if self._idle:
            since_s = next(iter(self._idle.values()))
            self._await_expiry(max(since_s + self._keep_alive_s - asyncio.get_running_loop().time(), 0.0))

    def _close_expired(self) -> None:
        while self._idle:
            connection = next(iter(self._idle))
            if self._idle[connection] > connection.loop.time() - self._keep_alive_s:
                return
            del self._idle[connection]
            connection.close()


def _response_type() -> type[HttpResponse]:
    from gorgo.live.upstream.response import HttpResponse

    return HttpResponse


def request_line(method: bytes, target: bytes) -> bytes:
    """Return the first line of a head. Raises `ValueError` for what does not stay within it."""
    if _METHOD.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise ValueError("a method or a target that is not one word")
    return b"%b %b HTTP/1.1\r\n" % (method, target)


def encode_head(start: bytes, headers: Sequence[Header], *, length: int | None = None) -> bytes:
    """Return a request's head, with the `length` of its body if there is one.

    `start` is the request line, and lines of headers that never change. Raises `ValueError` for a control character.
    """
    lines = headers.lines if isinstance(headers, EncodedHeaders) else encode_lines(headers)
    if length is None:
        return b"%b%b\r\n" % (start, lines)
    return b"%b%bContent-Length: %d\r\n\r\n" % (start, lines, length)


def _read_tcp_info(connection: PooledConnection) -> tuple[TcpWindows, Pacing] | None:
    """Return the kernel's state of a pooled connection."""
    link = cast(ReplicaConnection, connection)
    if link.socket is None:
        return None
    tcp_state = bbr_state(link.socket, paces=link.paces)
    link.paces = tcp_state is not None
    return tcp_state


#: No connection was left for a request: the limit is reached, or the process has no descriptor for one more.
POOL_EXHAUSTED = "connections_exhausted"
#: The engine's process may have ended, and another may start in its place.
CONNECTION_LOST = frozenset({"connect_failed", "disconnected"})
#: Reasons that have a cause.
_NOT_CONNECTED = frozenset({"connect_failed", "connect_timeout"})
#: Errors of this process, not of its peer: it can open no more descriptors, or has no memory.
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Of the bodies of the proxy's own small requests: pings, metrics, lists of models.
#: Bodies are cut here: SGLang's /metrics is about 100 kB.
FETCH_LIMIT_BYTES = 4 * 1024 * 1024
#: Up to here a body is not reserved: a full proxy probes its replicas all the same.
SMALL_FETCH_BYTES = 256 * 1024
#: The client that large bodies of all replicas count for.
FETCHES = "fetches of the proxy"

#: Takes a chunk; returns whether it takes more at once.
PassChunk = Callable[[bytes], bool]


class UpstreamError(Exception):
    """The replica sent no response, or an incomplete one.

    `reason` is a short stable word; `cause` says in words why there is no connection, `None` where there was one.
    """

    def __init__(self, reason: str, cause: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cause = cause


class ResponseSource(Protocol):
    """A response that has begun: status, headers, then chunks as they come."""

    status: int
    headers: Sequence[Header]

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Iterate over the bytes as they were sent. The block raises `UpstreamError` for an incomplete body."""
        ...

    async def pipe(self, sink: PassChunk) -> bool:
        """Pass the rest of the body to `sink`, a chunk per read; return whether its end is reached.

        False as soon as `sink` returned False: it has had that chunk, and reading pauses. Raises `UpstreamError` for an
        incomplete body, and what `sink` raises.
        """
        ...

    def take_whole(self, limit: int) -> bytes | None:
        """Return the rest of the body if its end has come, and it has at most `limit` bytes; else `None`."""
        ...

    async def aclose(self) -> None:
        """Release the connection if the response was read to its end, else close it at once."""
        ...


@mutable_record
class UpstreamResponse:
    """A `ResponseSource` over HTTP; its own `chunks` block, since a response is read once."""

    status: int
    headers: Sequence[Header]
    stream: httpx.AsyncByteStream
    on_close: Callable[[], None]
    #: The same stream, if it can pass chunks by itself.
    piped: HttpResponse | None = None
    _chunks: AsyncIterator[bytes] | None = None
    _closed: bool = False

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self._rest()

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(failure, httpx.TransportError):
            # Without the frames of the failure: with them the request's body would wait for the garbage collector.
            raise UpstreamError("disconnected") from failure.with_traceback(None)

    async def pipe(self, sink: PassChunk) -> bool:
        try:
            if self.piped is not None:
                return await self.piped.pipe(sink)
            async for chunk in self._rest():
                if not sink(chunk):
                    return False
        except httpx.TransportError as failure:
            raise UpstreamError("disconnected") from failure.with_traceback(None)
        return True

    def take_whole(self, limit: int) -> bytes | None:
        return None if self.piped is None else self.piped.take_whole(limit)

    def _rest(self) -> AsyncIterator[bytes]:
        # One iterator: a stream of another transport may be iterated once.
        if self._chunks is None:
            self._chunks = aiter(self.stream)
        return self._chunks

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.on_close()
        await self.stream.aclose()


class UpstreamClient:
    """One replica over HTTP.

    Parameters
    ----------
    base_url:
        As in regions.yaml; a path in it precedes every route.
    connections:
        Most open at once. A request beyond is rejected as busy, not queued.
    connect_timeout_s:
        For name resolution, TCP and TLS together.
    tls:
        Shared by all replicas: loading the certificates takes 20 ms.
    buffers:
        Bounds large responses of `fetch` in sum; by default each has its own bound alone.
    new_transport:
        Makes what sends the requests instead of the pool, for given TLS.
    """

    def __init__(
        self,
        base_url: str,
        *,
        connections: int,
        connect_timeout_s: float,
        tls: ssl.SSLContext,
        buffers: BufferBudget | None = None,
        new_transport: NewTransport | None = None,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._urls: dict[str, httpx.URL] = {}
        #: The fixed lines of a head, by method and path.
        self._starts: dict[tuple[str, str], bytes] = {}
        self._pool = UpstreamPool(httpx.URL(self._base), tls=tls)
        self._new_transport = new_transport
        self._transport = None if new_transport is None else TrackedTransport(new_transport(tls), self._pool.tracker)
        self._buffers = buffers
        self.set_limits(connections=connections, connect_timeout_s=connect_timeout_s)
        self.open_responses = 0

    @property
    def host(self) -> str:
        """Return the name or address of the replica's machine."""
        return httpx.URL(self._base).host

    @property
    def checked_host(self) -> str:
        """Return the host, for other connections: an address where those of its name are checked, once there is one."""
        return self._pool.checked_peer or self.host

    @property
    def connections(self) -> int:
        """Pooled connections that are open, in use or not."""
        return self._pool.tracker.alive

    @property
    def has_idle(self) -> bool:
        """Return whether an open connection is free for a request."""
        return self._pool.has_idle if self._transport is None else self._pool.tracker.next() is not None

    @property
    def has_name(self) -> bool:
        """Return whether the URL has a name, which may move, in the place of an address."""
        return self._transport is None and self._pool.has_name

    def refuse_addresses(self, refuses: Callable[[str], str | None] | None) -> None:
        """Connect to no address of the URL's name for which `refuses` has a reason, from now on."""
        self._pool.refuse_addresses(refuses)
        if self._transport is not None:
            self._transport.refuses = refuses

    async def resolve_name(self) -> frozenset[str]:
        """Look the name up, and return its addresses; connections to others carry no new request. Raises `OSError`."""
        return await self._pool.resolve_name()

    def on_replaced(self, report: Callable[[str, str], None]) -> None:
        """Call `report` with the old and the new address when another process has taken the replica's place."""
        self._pool.on_replaced = report

    def on_connection_change(self, report: OnChange, on_stale: Callable[[ConnectionTracker], None]) -> None:
        """Call `report` with the connection of the next request: now, and at each `refresh` of what `on_stale` got."""
        tracker = self._pool.tracker
        tracker.on_change, tracker.on_stale = report, on_stale
        tracker.refresh()

    def set_limits(self, *, connections: int, connect_timeout_s: float) -> None:
        """Set the limits of requests from now on."""
        self._limit = connections
        self._connect_timeout_s = connect_timeout_s

    def set_tls(self, tls: ssl.SSLContext) -> None:
        """Use `tls` for connections opened from now on."""
        self._pool.set_tls(tls)
        if self._transport is not None and self._new_transport is not None:
            self._transport.retire()
            refuses, self._transport = (
                self._transport.refuses,
                TrackedTransport(self._new_transport(tls), self._pool.tracker),
            )
            self._transport.refuses = refuses

    def open(
        self,
        path: str,
        headers: Sequence[Header],
        body: bytes,
        *,
        repeatable: bool = True,
        on_sent: Callable[[], None] | None = None,
    ) -> Coroutine[Any, Any, ResponseSource]:
        """POST `body`; return at the head of the response. Raises `UpstreamError`.

        `on_sent` is called when the request is written, before the wait for its response; again for a repeated
        request. Only what is `repeatable` may reach the replica twice.
        """
        if self.open_responses >= self._limit:
            raise UpstreamError(POOL_EXHAUSTED)
        return self._open("POST", path, headers, body, on_sent, repeatable)

    async def fetch(
        self, path: str, headers: Sequence[Header] = (), *, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """GET a small response whole, or POST `body` for it, on a pooled connection. Raises `UpstreamError`."""
        try:
            async with asyncio.timeout(timeout_s):
                source = await self._open("GET" if body is None else "POST", path, headers, body or b"")
                try:
                    async with source.chunks() as chunks:
                        answer = await _read_all(chunks, self._buffers)
                    if answer is None:
                        raise UpstreamError("answer_too_large")
                    return source.status, answer
                finally:
                    await source.aclose()
        except TimeoutError:
            raise UpstreamError("timeout") from None

    async def aclose(self) -> None:
        await self._pool.aclose()
        if self._transport is not None:
            await self._transport.wrapped.aclose()

    async def _open(
        self,
        method: str,
        path: str,
        headers: Sequence[Header],
        body: bytes,
        on_sent: Callable[[], None] | None = None,
        repeatable: bool = True,
    ) -> UpstreamResponse:
        self.open_responses += 1
        try:
            if self._transport is not None:
                return await self._send_by(self._transport, method, path, headers, body, on_sent, repeatable)
            length = len(body) if method == "POST" else None
            head = encode_head(self._start(method, path), headers, length=length)
            response = await self._pool.send(
                head, body, connect_timeout_s=self._connect_timeout_s, repeatable=repeatable, on_sent=on_sent
            )
            return UpstreamResponse(response.status, response.headers, response, self._release, response)
        except BaseException as failure:
            self._release()
            if isinstance(failure, httpx.TransportError):
                # Without its frames: with them the request's body would wait for the garbage collector.
                reason = _reason(failure)
                cause = connect_cause(failure) if reason in _NOT_CONNECTED else None
                raise UpstreamError(reason, cause) from failure.with_traceback(None)
            raise

    def _release(self) -> None:
        self.open_responses -= 1

    async def _send_by(
        self,
        transport: TrackedTransport,
        method: str,
        path: str,
        headers: Sequence[Header],
        body: bytes,
        on_sent: Callable[[], None] | None,
        repeatable: bool,
    ) -> UpstreamResponse:
        url = self._url(path)
        # With a stream, because then httpx adds no headers.
        named = [(b"Host", url.netloc), *headers]
        if method == "POST":
            named.append((b"Content-Length", b"%d" % len(body)))

        def request() -> httpx.Request:
            extensions = {"timeout": {"connect": self._connect_timeout_s}}
            return httpx.Request(method, url, headers=named, stream=_Body(body), extensions=extensions)

        response, ended = await transport.send_request(request, len(body), on_sent, repeatable=repeatable)

        def on_close() -> None:
            self._release()
            ended()

        stream = cast(httpx.AsyncByteStream, response.stream)
        return UpstreamResponse(response.status_code, response.headers.raw, stream, on_close)

    def _start(self, method: str, path: str) -> bytes:
        start = self._starts.get((method, path))
        if start is None:
            url = self._url(path)
            start = request_line(method.encode(), url.raw_path) + encode_lines([(b"Host", url.netloc)])
            self._starts[method, path] = start
        return start

    def _url(self, path: str) -> httpx.URL:
        url = self._urls.get(path)
        if url is None:
            # Few, because a path is a route or one of the dialect's.
            url = self._urls[path] = httpx.URL(self._base + path)
        return url


class _Body(httpx.AsyncByteStream):
    """A request's body for another transport."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


async def _read_all(chunks: AsyncIterator[bytes], buffers: BufferBudget | None) -> bytes | None:
    """Return a body whole, `None` if it is too large or `buffers` has no space for it."""
    buffer = None if buffers is None else buffers.new_buffer(FETCHES, now=monotonic())
    parts: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            size += len(chunk)
            if size > FETCH_LIMIT_BYTES:
                return None
            # The parts and their join.
            if buffers is not None and buffer is not None and size > SMALL_FETCH_BYTES:
                may_grow = buffers.reserve(buffer, 2 * size, now=monotonic())
                if not may_grow:
                    return None
            parts.append(chunk)
        return b"".join(parts)
    finally:
        parts.clear()
        if buffers is not None and buffer is not None:
            buffers.close(buffer)


def _reason(failure: httpx.TransportError) -> str:
    """Return the stable word for a failure before the response's head."""
    if isinstance(failure, httpx.PoolTimeout):
        return POOL_EXHAUSTED
    if isinstance(failure, httpx.ConnectTimeout):
        return "connect_timeout"
    if isinstance(failure, httpx.ConnectError):
        cause = failure.__cause__
        return POOL_EXHAUSTED if isinstance(cause, OSError) and cause.errno in _LOCAL_ERRORS else "connect_failed"
    return "disconnected" if isinstance(failure, httpx.NetworkError) else "protocol_error"
