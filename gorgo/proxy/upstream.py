"""One replica as a source of byte chunks: the only module that knows httpx and aiohttp.

Owns connections: how many, how long they are kept, what happens when the server closed a kept one. Leaves what the
bytes mean to the relay, which sees `Source` and the errors below.

Theory of operation: a kept connection that the server has closed in the meantime fails at once, with no byte of an
answer. That is nobody's fault, so the request is sent once more, on a connection made for it. Whether the connection
had been kept is noted by the connector in a context variable, because the request that asks is in the same task; so is
the size of the body for `connections`, which knows what the next request travels on.
`httpx.Client` is left out on purpose: building a request through it and sending it costs 60 us that buy nothing here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, cast

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from httpx_aiohttp import AiohttpTransport

from gorgo.core.path import Pacing, Windows
from gorgo.proxy.connections import KeptConnections, Told, idling_shrinks
from gorgo.proxy.headers import Header
from gorgo.proxy.tcp_info import paced_sender

#: Below the shortest keep-alive in use (uvicorn, hence SGLang and vLLM: 5 s), with room for a far replica's round trip.
KEEP_ALIVE_S = 4.0
#: What one answer may hold in memory before its replica is told to wait (twice this, by aiohttp's rule).
READ_BUFFER_BYTES = 64 * 1024
#: Larger bodies are written in pieces of this; nearly all prompts fit into one.
PIECE_BYTES = 512 * 1024
#: Bodies of the proxy's own small requests (pings, metrics) are cut here: SGLang's /metrics is about 100 kB.
FETCH_LIMIT_BYTES = 8 * 1024 * 1024

#: aiohttp would add these; the client's own absence of them has to reach the replica.
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

_reused: ContextVar[bool] = ContextVar("gorgo_connection_reused", default=False)
_body_bytes: ContextVar[int] = ContextVar("gorgo_body_bytes", default=0)


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
    """A `Source` over httpx's response."""

    __slots__ = ("_closed", "_on_close", "_response", "headers", "status")

    def __init__(self, response: httpx.Response, on_close: Callable[[], None]) -> None:
        self._response = response
        self._on_close = on_close
        self._closed = False
        self.status = response.status_code
        self.headers: Sequence[Header] = response.headers.raw

    @asynccontextmanager
    async def chunks(self) -> AsyncGenerator[AsyncIterator[bytes], None]:
        # The library's own iterator, not one around it: a layer costs each event of a stream a microsecond.
        stream = cast(httpx.AsyncByteStream, self._response.stream)
        async with aclosing(cast(AsyncGenerator[bytes, None], stream.__aiter__())) as parts:
            try:
                yield parts
            except (httpx.HTTPError, aiohttp.ClientError) as failure:
                raise UpstreamError(_reason(failure, begun=True)) from failure

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close()
        # A broken connection is closed by the attempt to close it: there is nothing left to act on.
        with suppress(*_FAILURES):
            await cast(httpx.AsyncByteStream, self._response.stream).aclose()


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
        self._extensions = _connect_within(connect_timeout_s)
        self._urls: dict[str, httpx.URL] = {}
        self._pool = KeptConnections(keep_s=KEEP_ALIVE_S, idling_shrinks=idling_shrinks(), look=_look)
        self._connector = _Connector(self._pool, limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=tls)
        self._kept = _transport(self._connector, tls)
        self._fresh_connector = _FreshConnector(limit=0, force_close=True, ssl=tls)
        self._fresh = _transport(self._fresh_connector, tls)
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
        self._extensions = _connect_within(connect_timeout_s)

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
        await self._kept.aclose()
        await self._fresh.aclose()

    async def _open(self, method: str, path: str, headers: Sequence[Header], body: bytes) -> HttpSource:
        self.open_sources += 1
        try:
            response = await self._send(method, path, headers, body)
        except BaseException:
            self._release()
            raise
        return HttpSource(response, self._release)

    def _request(self, method: str, url: httpx.URL, headers: list[Header], body: bytes) -> httpx.Request:
        if len(body) <= PIECE_BYTES:
            return httpx.Request(method, url, headers=headers, content=body, extensions=self._extensions)
        headers.append((b"content-length", b"%d" % len(body)))
        return httpx.Request(method, url, headers=headers, stream=_Pieces(body), extensions=self._extensions)

    def _release(self) -> None:
        self.open_sources -= 1

    async def _send(self, method: str, path: str, headers: Sequence[Header], body: bytes) -> httpx.Response:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self._base + path)
        request = self._request(method, url, list(headers), body)
        _reused.set(False)
        _body_bytes.set(len(body))
        try:
            return await self._kept.handle_async_request(request)
        except _FAILURES as failure:
            if not (_reused.get() and _is_stale(failure)):
                raise UpstreamError(_reason(failure, begun=False)) from failure
        try:
            return await self._fresh.handle_async_request(request)
        except _FAILURES as failure:
            raise UpstreamError(_reason(failure, begun=False)) from failure


def _connect_within(limit_s: float) -> dict[str, dict[str, float]]:
    """aiohttp's bound on one socket leaves the name out and begins anew with each address; its pool's has them all."""
    return {"timeout": {"connect": limit_s, "pool": limit_s}}


class _Pieces(httpx.AsyncByteStream):
    """A large body in pieces, so that the loop breathes while it is written; can be sent again."""

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), PIECE_BYTES):
            yield bytes(self._body[start : start + PIECE_BYTES])


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
    """Notes for the asking task whether its connection had served another request before."""

    def __init__(self, pool: KeptConnections, **options: Any) -> None:
        super().__init__(**options)
        self._pool = pool

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:  # noqa: ASYNC109 - aiohttp's own signature
        connection = await super().connect(req, traces, timeout)
        while (protocol := connection.protocol) is not None and protocol.should_close:
            # Something came on it while nobody had asked: it would be taken for the answer to this request.
            connection.close()
            connection = await super().connect(req, traces, timeout)
        assert protocol is not None, "a connection just taken is open"
        reused = self._pool.taken(protocol, _body_bytes.get())
        _reused.set(reused)
        if not reused and protocol.closed is not None:
            protocol.closed.add_done_callback(self._lost)
        connection.add_callback(partial(self._given_back, protocol))
        return connection

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


def _transport(connector: aiohttp.TCPConnector, tls: ssl.SSLContext) -> AiohttpTransport:
    session = aiohttp.ClientSession(
        connector=connector,
        # No jar: a replica's cookie must not go to another client.
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_ADDED,
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=READ_BUFFER_BYTES,
        trust_env=False,
    )
    return AiohttpTransport(verify=tls, trust_env=False, client=session)


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


#: Everything by which the two libraries say that a peer or the network failed; `OSError` includes timeouts.
_FAILURES = (httpx.HTTPError, aiohttp.ClientError, OSError)


def _is_stale(failure: BaseException) -> bool:
    """The server had closed the connection: nothing came back."""
    cause = failure.__cause__ or failure
    return isinstance(cause, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))


def _reason(failure: BaseException, *, begun: bool) -> str:
    """A stable word. The transport maps a server that hung up to a timeout, so the cause is asked first."""
    cause = failure.__cause__ or failure
    if isinstance(cause, TimeoutError):
        return "connect_timeout"
    if isinstance(cause, aiohttp.ClientConnectorError):
        return "connect_failed"
    if begun or isinstance(cause, (aiohttp.ServerDisconnectedError, OSError, aiohttp.ClientPayloadError)):
        return "disconnected"
    return "protocol_error"
