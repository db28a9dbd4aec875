"""One replica as a source of byte chunks: the only module that knows aiohttp's pool.

Owns connections: how many, how long they are kept, what happens when the server closed a kept one. Leaves what the
bytes mean to the relay, which sees `Source` and the errors below, and what goes over a connection to `call`.

Theory of operation: a kept connection that the server has closed in the meantime fails at once, with no byte of an
answer. That is nobody's fault, so the request is sent once more, on a connection made for it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Protocol, cast

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError
from yarl import URL

from gorgo.core.path import Pacing, Windows
from gorgo.proxy.call import FAILURES, Call, call, head_of
from gorgo.proxy.connections import KeptConnections, Told, idling_shrinks
from gorgo.proxy.headers import Header
from gorgo.proxy.tcp_info import paced_sender

#: Below the shortest keep-alive in use (uvicorn, hence SGLang and vLLM: 5 s), with room for a far replica's round trip.
KEEP_ALIVE_S = 4.0
#: Bodies of the proxy's own small requests (pings, metrics) are cut here: SGLang's /metrics is about 100 kB.
FETCH_LIMIT_BYTES = 8 * 1024 * 1024


class UpstreamError(Exception):
    """The replica gave no answer, or broke off in the middle of one. `reason` is a short stable word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Source(Protocol):
    """An answer that has begun: status, headers, then chunks as they come."""

    status: int
    headers: Sequence[Header]

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Bytes as they were sent, never decoded. The block raises `UpstreamError` when they break off."""
        ...

    async def aclose(self) -> None:
        """Keep the connection if the answer was read to its end, else close it at once."""
        ...


class Upstream(Protocol):
    """Where one replica's answers come from."""

    async def open(self, path: str, headers: Sequence[Header], body: bytes) -> Source:
        """POST `body`; returns at the answer's headers. Raises `UpstreamError`."""
        ...


class HttpSource:
    """A `Source` over HTTP; its own `chunks` block, since an answer is read once."""

    __slots__ = ("_call", "_closed", "_on_close", "headers", "status")

    def __init__(self, begun: Call, on_close: Callable[[], None]) -> None:
        self._call = begun
        self._on_close = on_close
        self._closed = False
        self.status = begun.status
        self.headers = begun.headers

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self._call.chunks()

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(failure, _BROKEN_OFF):
            # The answer keeps its failure: with the frames that it went through, the request's body would wait for the
            # garbage collector.
            raise UpstreamError(_reason(failure, begun=True)) from failure.with_traceback(None)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close()
        self._call.over()


class HttpUpstream:
    """One replica over HTTP.

    Parameters
    ----------
    base_url:
        As in regions.yaml; a path in it is kept in front of every route.
    connections:
        Most at once. A request beyond is refused here, as busy, and not queued.
    connect_timeout_s:
        For name resolution, TCP and TLS together.
    tls:
        Shared by all replicas: loading the certificates takes 20 ms.
    """

    def __init__(self, base_url: str, *, connections: int, connect_timeout_s: float, tls: ssl.SSLContext) -> None:
        self._base = base_url.rstrip("/")
        self._limit = connections
        self._timeout = _connect_within(connect_timeout_s)
        #: What the pool wants to know of whom a connection is for.
        self._asked = aiohttp.ClientRequest("GET", URL(self._base), loop=asyncio.get_running_loop())
        #: How heads begin, by method and path; few, because a path is a route or one of the dialect's.
        self._starts: dict[tuple[str, str], bytes] = {}
        self._pool = KeptConnections(keep_s=KEEP_ALIVE_S, idling_shrinks=idling_shrinks(), look=_look)
        self._connector = _Connector(self._pool, limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=tls)
        self._fresh_connector = _FreshConnector(limit=0, force_close=True, ssl=tls)
        self.open_sources = 0

    @property
    def connections(self) -> int:
        """Kept connections that are open, in use or not."""
        return self._pool.alive

    def tell_connection(self, told: Told) -> None:
        """Call `told` whenever the connection that the next request takes is another one, or in another state."""
        self._pool.told = told
        self._pool.tell()

    def set_limits(self, *, connections: int, connect_timeout_s: float) -> None:
        """Other limits from the next request on."""
        self._limit = connections
        self._timeout = _connect_within(connect_timeout_s)

    def set_tls(self, tls: ssl.SSLContext) -> None:
        """Whom to believe and who to be, on connections opened from now on."""
        self._connector.use(tls)
        self._fresh_connector.use(tls)

    async def open(self, path: str, headers: Sequence[Header], body: bytes) -> Source:
        if self.open_sources >= self._limit:
            raise UpstreamError("connections_exhausted")
        return await self._open("POST", path, headers, body)

    async def fetch(
        self, path: str, headers: Sequence[Header] = (), *, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """GET a small answer whole, or POST `body` for it, on a kept connection. Raises `UpstreamError`."""
        try:
            async with asyncio.timeout(timeout_s):
                source = await self._open("GET" if body is None else "POST", path, headers, body or b"")
                try:
                    return source.status, await _whole(source)
                finally:
                    await source.aclose()
        except TimeoutError:
            raise UpstreamError("timeout") from None

    async def aclose(self) -> None:
        await self._connector.close()
        await self._fresh_connector.close()

    async def _open(self, method: str, path: str, headers: Sequence[Header], body: bytes) -> HttpSource:
        self.open_sources += 1
        try:
            begun = await self._call(method, path, headers, body)
        except BaseException:
            self._release()
            raise
        return HttpSource(begun, self._release)

    def _release(self) -> None:
        self.open_sources -= 1

    async def _call(self, method: str, path: str, headers: Sequence[Header], body: bytes) -> Call:
        start = self._starts.get((method, path)) or self._start(method, path)
        length = len(body) if method == "POST" else None
        head = head_of(start, headers, length=length, close=False)
        reused = False
        try:
            connection, reused = await self._connector.take(self._asked, self._timeout, len(body))
            return await call(connection, head, body, sent=self._pool.tell)
        except FAILURES as failure:
            if not (reused and _is_stale(failure)):
                raise UpstreamError(_reason(failure, begun=False)) from failure.with_traceback(None)
        try:
            connection = await self._fresh_connector.connect(self._asked, [], self._timeout)
            return await call(connection, head_of(start, headers, length=length, close=True), body)
        except FAILURES as failure:
            raise UpstreamError(_reason(failure, begun=False)) from failure.with_traceback(None)

    def _start(self, method: str, path: str) -> bytes:
        url = httpx.URL(self._base + path)
        start = b"%s %s HTTP/1.1\r\nHost: %s\r\n" % (method.encode(), url.raw_path, url.netloc)
        self._starts[method, path] = start
        return start


def _connect_within(limit_s: float) -> aiohttp.ClientTimeout:
    """aiohttp's bound on one socket leaves the name out and begins anew with each address; its pool's has them all."""
    return aiohttp.ClientTimeout(total=None, connect=limit_s, sock_connect=limit_s)


class _Handler(ResponseHandler):
    """aiohttp's side of one connection, which tells the reader of a body too when its framing turns out to be nonsense.

    aiohttp 3.14 closes the connection and leaves the reader to its timeout.
    """

    def set_exception(self, exc: Any, *cause: Any) -> None:
        super().set_exception(exc, *cause)
        payload = self._payload
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("the body's framing is broken"))


class _FreshConnector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = cast("partial[ResponseHandler]", partial(_Handler, loop=self._loop))

    def use(self, tls: ssl.SSLContext) -> None:
        """aiohttp has no way to change it; it looks here for each connection that it opens."""
        self._ssl = tls


class _Connector(_FreshConnector):
    """Knows of each connection whether it had served another request before."""

    def __init__(self, pool: KeptConnections, **options: Any) -> None:
        super().__init__(**options)
        self._pool = pool

    async def take(
        self,
        asked: aiohttp.ClientRequest,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own
        body_bytes: int,
    ) -> tuple[Connection, bool]:
        """A connection for a request with such a body, and whether it had served another before."""
        connection = await self.connect(asked, [], timeout)
        while (protocol := connection.protocol) is not None and protocol.should_close:
            # Something came on it while nobody had asked: it would be taken for the answer to this request.
            connection.close()
            connection = await self.connect(asked, [], timeout)
        assert protocol is not None, "a connection just taken is open"
        reused = self._pool.taken(protocol, body_bytes)
        if not reused and protocol.closed is not None:
            protocol.closed.add_done_callback(self._lost)
        connection.add_callback(partial(self._given_back, protocol))
        return connection, reused

    def _given_back(self, protocol: Any) -> None:
        self._pool.given_back(protocol)
        # When the caller has got so far as to close it, if that is what it does.
        self._loop.call_soon(self._settle, protocol)

    def _lost(self, closed: asyncio.Future[None]) -> None:
        """The replica hung up, or the pool let it go: why is for whoever used it."""
        if not closed.cancelled():
            closed.exception()
        self._pool.tell()

    def _settle(self, protocol: Any) -> None:
        """Let the pool hand out first what was used last, so that few connections carry all and have open windows."""
        for kept in self._conns.values():
            if kept and kept[-1][0] is protocol:
                kept.rotate(1)
        self._pool.tell()


def _look(protocol: Any) -> tuple[Windows, Pacing] | None:
    """What the kernel tells of a connection of the pool; a closed one has no socket."""
    transport = protocol.transport
    return None if transport is None else paced_sender(transport.get_extra_info("socket"))


async def _whole(source: HttpSource) -> bytes:
    parts: list[bytes] = []
    size = 0
    async with source.chunks() as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > FETCH_LIMIT_BYTES:
                raise UpstreamError("answer_too_large")
            parts.append(chunk)
    return b"".join(parts)


#: As which an answer can break off; what else happens while it is read is the reader's.
_BROKEN_OFF = (aiohttp.ClientError, HttpProcessingError)


def _is_stale(failure: BaseException) -> bool:
    """The server had closed the connection: nothing came back."""
    return isinstance(failure, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))


def _reason(failure: BaseException, *, begun: bool) -> str:
    """A stable word."""
    if isinstance(failure, TimeoutError):
        return "connect_timeout"
    if isinstance(failure, aiohttp.ClientConnectorError):
        return "connect_failed"
    if begun or isinstance(failure, (aiohttp.ServerDisconnectedError, OSError, aiohttp.ClientPayloadError)):
        return "disconnected"
    return "protocol_error"
