"""httpx's transport to one replica: its requests and responses, on aiohttp's pool of connections and parser.

Owns connections: how long they are kept, which is taken, what happens when the server closed a kept one. Leaves what
goes over a connection to `call`, and how many there may be to `upstream`.

Theory of operation: a kept connection that the server has closed in the meantime fails at once, with no byte of an
answer. That is nobody's fault, so the request is sent once more, on a connection made for it. One that fails later had
the request: then it is the replica's failure, and to have it once more is not for this one.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator
from functools import lru_cache, partial
from time import monotonic
from typing import Any, cast

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from yarl import URL

from gorgo.config.constants import REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.tcp import Pacing, TcpWindows
from gorgo.proxy.upstream.connection_state import ConnectionTracker, OnChange, idling_shrinks
from gorgo.proxy.upstream.http1_call import FAILURES, HttpCall, encode_head, send
from gorgo.proxy.upstream.tcp_info import bbr_state

#: A connection that was closed before a request came on it says so within this, s: a round trip to anywhere. What takes
#: longer may have been worked at, and a replica that fails everything would have each request twice.
STALE_S = 0.5
#: Why a connection could not be opened though nobody has asked its peer: descriptors, memory.
_OWN_WANT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Body(httpx.AsyncByteStream):
    """A request's body that is there: the transport takes it as it is, since asking a stream for it costs more."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.data


class PoolTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 to one origin.

    A request is sent with the headers that it has, in their order and nothing added; so it names its host and its
    body's length itself, as httpx's own do. Of its extensions `timeout` is heeded (`connect`, seconds: for name
    resolution, TCP and TLS together). The response's stream is not decoded, and closing it early closes its connection.

    Parameters
    ----------
    origin:
        Scheme, host and port.
    tls:
        Shared by all replicas: loading the certificates takes 20 ms.
    """

    def __init__(self, origin: str, *, tls: ssl.SSLContext) -> None:
        #: What aiohttp's pool wants to know of whom a connection is for.
        self._asked = aiohttp.ClientRequest("GET", URL(origin), loop=asyncio.get_running_loop())
        self._pool = ConnectionTracker(keep_s=REPLICA_KEEP_ALIVE_S, idling_shrinks=idling_shrinks(), look=_look)
        self._connector = _Connector(self._pool, limit=0, keepalive_timeout=REPLICA_KEEP_ALIVE_S, ssl=tls)
        self._fresh_connector = _FreshConnector(limit=0, force_close=True, ssl=tls)

    @property
    def connections(self) -> int:
        """Kept connections that are open, in use or not."""
        return self._pool.alive

    def tell_connection(self, told: OnChange) -> None:
        """Call `told` whenever the connection that the next request takes is another one, or in another state."""
        self._pool.reported = told
        self._pool.report()

    def set_tls(self, tls: ssl.SSLContext) -> None:
        """Whom to believe and who to be, on connections opened from now on."""
        self._connector.use(tls)
        self._fresh_connector.use(tls)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.TransportError`: `ConnectTimeout`, `ConnectError`, `PoolTimeout` (this process can open no more
        connections), `ReadError` (the peer hung up) or `RemoteProtocolError`; once the response has begun, its stream
        raises one of `call.BROKEN_OFF`.
        """
        stream = request.stream
        begun = await self._call(request, stream.data if isinstance(stream, Body) else await request.aread())
        return httpx.Response(begun.status, headers=begun.headers, stream=begun)

    async def aclose(self) -> None:
        await self._connector.close()
        await self._fresh_connector.close()

    async def _call(self, request: httpx.Request, body: bytes) -> HttpCall:
        headers, reused, begun_s = request.headers.raw, False, monotonic()
        timeout = _connect_within(request.extensions.get("timeout", {}).get("connect"))
        start = b"%s %s HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)
        try:
            connection, reused = await self._connector.take(self._asked, timeout, len(body))
            return await send(connection, encode_head(start, headers), body, sent=self._pool.report)
        except FAILURES as failure:
            if not (reused and _is_stale(failure) and monotonic() - begun_s < STALE_S):
                raise _as_httpx(failure) from failure.with_traceback(None)
        try:
            connection = await self._fresh_connector.connect(self._asked, [], timeout)
            return await send(connection, encode_head(start, headers, close=True), body)
        except FAILURES as failure:
            raise _as_httpx(failure) from failure.with_traceback(None)


@lru_cache(maxsize=64)
def _connect_within(limit_s: float | None) -> aiohttp.ClientTimeout:
    """aiohttp's bound on one socket leaves the name out and begins anew with each address; its pool's has them all.

    Kept for as many limits as there are likely to be (one per region): making one costs as much as the whole head.
    """
    return aiohttp.ClientTimeout(total=None, connect=limit_s, sock_connect=limit_s)


def _is_stale(failure: BaseException) -> bool:
    """The server had closed the connection: nothing came back."""
    return isinstance(failure, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))


def _as_httpx(failure: BaseException) -> httpx.TransportError:
    text = str(failure)
    if isinstance(failure, TimeoutError):
        return httpx.ConnectTimeout(text)
    if isinstance(failure, aiohttp.ClientConnectorError):
        return httpx.PoolTimeout(text) if failure.errno in _OWN_WANT else httpx.ConnectError(text)
    if isinstance(failure, (aiohttp.ServerDisconnectedError, OSError, aiohttp.ClientPayloadError)):
        return httpx.ReadError(text)
    return httpx.RemoteProtocolError(text)


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

    def __init__(self, pool: ConnectionTracker, **options: Any) -> None:
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
        reused = self._pool.on_acquire(protocol, body_bytes)
        if not reused and protocol.closed is not None:
            protocol.closed.add_done_callback(self._lost)
        connection.add_callback(partial(self._given_back, protocol))
        return connection, reused

    def _given_back(self, protocol: Any) -> None:
        self._pool.on_release(protocol)
        # When the caller has got so far as to close it, if that is what it does.
        self._loop.call_soon(self._settle, protocol)

    def _lost(self, closed: asyncio.Future[None]) -> None:
        """The replica hung up, or the pool let it go: why is for whoever used it."""
        if not closed.cancelled():
            closed.exception()
        self._pool.report()

    def _settle(self, protocol: Any) -> None:
        """Let the pool hand out first what was used last, so that few connections carry all and have open windows."""
        for kept in self._conns.values():
            if kept and kept[-1][0] is protocol:
                kept.rotate(1)
        self._pool.report()


def _look(protocol: Any) -> tuple[TcpWindows, Pacing] | None:
    """What the kernel tells of a connection of the pool; a closed one has no socket."""
    transport = protocol.transport
    return None if transport is None else bbr_state(transport.get_extra_info("socket"))
