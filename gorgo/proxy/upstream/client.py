"""One replica as a source of byte chunks, by httpx's requests and responses.

Owns how many answers may be open, and the words for what a replica does wrong. Leaves what the bytes mean to the relay,
which sees `Source` and the errors below, and connections to `transport`.

`httpx.Client` is left out on purpose: building a request through it and sending it costs 60 us that buy nothing here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, cast

import httpx

from gorgo.proxy.http.headers import Header
from gorgo.proxy.upstream.connection_state import OnChange
from gorgo.proxy.upstream.http1_call import CUT_OFF
from gorgo.proxy.upstream.transport import Body, PoolTransport

#: Bodies of the proxy's own small requests (pings, metrics) are cut here: SGLang's /metrics is about 100 kB.
FETCH_LIMIT_BYTES = 8 * 1024 * 1024
#: No connection was left for a request: as many are open as may be, or the process has no descriptor for one more.
POOL_EXHAUSTED = "connections_exhausted"
#: The engine's process may be gone, and another in its place soon.
CONNECTION_LOST = frozenset({"connect_failed", "disconnected"})


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


class UpstreamResponse:
    """A `Source` over HTTP; its own `chunks` block, since an answer is read once."""

    __slots__ = ("_closed", "_on_close", "_stream", "headers", "status")

    def __init__(self, response: httpx.Response, on_close: Callable[[], None]) -> None:
        self._stream = cast(httpx.AsyncByteStream, response.stream)
        self._on_close = on_close
        self._closed = False
        self.status = response.status_code
        self.headers: Sequence[Header] = response.headers.raw

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(failure, CUT_OFF):
            # The answer keeps its failure: with the frames that it went through, the request's body would wait for the
            # garbage collector.
            raise UpstreamError("disconnected") from failure.with_traceback(None)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._on_close()
        await self._stream.aclose()


class UpstreamClient:
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
        self._transport = PoolTransport(self._base, tls=tls)
        self.open_responses = 0

    @property
    def connections(self) -> int:
        """Kept connections that are open, in use or not."""
        return self._transport.connections

    def tell_connection(self, told: OnChange) -> None:
        """Call `told` whenever the connection that the next request takes is another one, or in another state."""
        self._transport.tell_connection(told)

    def set_limits(self, *, connections: int, connect_timeout_s: float) -> None:
        """Other limits from the next request on."""
        self._limit = connections
        self._extensions = _connect_within(connect_timeout_s)

    def set_tls(self, tls: ssl.SSLContext) -> None:
        """Whom to believe and who to be, on connections opened from now on."""
        self._transport.set_tls(tls)

    async def open(self, path: str, headers: Sequence[Header], body: bytes) -> Source:
        if self.open_responses >= self._limit:
            raise UpstreamError(POOL_EXHAUSTED)
        return await self._open("POST", path, headers, body)

    async def fetch(self, path: str, headers: Sequence[Header] = (), *, timeout_s: float) -> tuple[int, bytes]:
        """GET a small answer whole, on a kept connection. Raises `UpstreamError`."""
        try:
            async with asyncio.timeout(timeout_s):
                source = await self._open("GET", path, headers, b"")
                try:
                    return source.status, await _whole(source)
                finally:
                    await source.aclose()
        except TimeoutError:
            raise UpstreamError("timeout") from None

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _open(self, method: str, path: str, headers: Sequence[Header], body: bytes) -> UpstreamResponse:
        self.open_responses += 1
        try:
            response = await self._send(method, path, headers, body)
        except BaseException:
            self._release()
            raise
        return UpstreamResponse(response, self._release)

    def _release(self) -> None:
        self.open_responses -= 1

    async def _send(self, method: str, path: str, headers: Sequence[Header], body: bytes) -> httpx.Response:
        url = self._urls.get(path)
        if url is None:
            # Few, because a path is a route or one of the dialect's.
            url = self._urls[path] = httpx.URL(self._base + path)
        named = [(b"Host", url.netloc), *headers]
        if method == "POST":
            named.append((b"Content-Length", b"%d" % len(body)))
        # With a stream, because then httpx adds no headers of its own: what the client left out stays out.
        request = httpx.Request(method, url, headers=named, stream=Body(body), extensions=self._extensions)
        try:
            return await self._transport.handle_async_request(request)
        except httpx.TransportError as failure:
            # Without the frames that it went through: the request's body would wait for the garbage collector.
            raise UpstreamError(_reason(failure)) from failure.with_traceback(None)


def _connect_within(limit_s: float) -> dict[str, dict[str, float]]:
    return {"timeout": {"connect": limit_s}}


async def _whole(source: UpstreamResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async with source.chunks() as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > FETCH_LIMIT_BYTES:
                raise UpstreamError("answer_too_large")
            parts.append(chunk)
    return b"".join(parts)


#: Stable words for httpx's failures, the more special first.
_REASONS: tuple[tuple[type[httpx.TransportError], str], ...] = (
    (httpx.PoolTimeout, POOL_EXHAUSTED),
    (httpx.ConnectTimeout, "connect_timeout"),
    (httpx.ConnectError, "connect_failed"),
    (httpx.NetworkError, "disconnected"),
    (httpx.TransportError, "protocol_error"),
)


def _reason(failure: httpx.TransportError) -> str:
    return next(word for kind, word in _REASONS if isinstance(failure, kind))
