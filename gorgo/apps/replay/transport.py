"""The proxy's HTTP client as a transport of httpx: `httpx.AsyncClient` over the pools of several origins.

Owns the translation of httpx's requests and timeouts. Speaks HTTP/1.1 only; proxies and redirects are the caller's.
The proxy calls a pool directly: httpx's objects cost a request tens of microseconds.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import httpx

from gorgo.config.constants import REPLICA_KEEP_ALIVE_S
from gorgo.live.http.headers import Header
from gorgo.live.upstream.pool import UpstreamPool, encode_head, request_line
from gorgo.live.upstream.response import HttpResponse

#: A request's body is collected before it is sent, because a repeated request needs it. Above any prompt.
MAX_BODY_BYTES = 256 * 1024 * 1024


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends the requests of an `httpx.AsyncClient`.

    Parameters
    ----------
    tls:
        Authorities and certificate for `https`; the system's authorities by default.
    keep_alive_s:
        Time for which an idle connection stays open.

    Example
    -------
    >>> transport = PoolTransport()
    >>> client = httpx.AsyncClient(transport=transport)
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None, keep_alive_s: float = REPLICA_KEEP_ALIVE_S) -> None:
        self._tls = tls
        self._keep_alive_s = keep_alive_s
        self._pools: dict[tuple[str, str, int | None], UpstreamPool] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeout = request.extensions.get("timeout", {})
        body = await _body_of(request)
        try:
            start = request_line(request.method.encode(), request.url.raw_path)
            head = encode_head(start, _with_length(request.headers.raw, body))
        except ValueError as failure:
            raise httpx.LocalProtocolError(str(failure)) from None
        read_s = timeout.get("read")
        limit_s = None if read_s is None else read_s + (timeout.get("connect") or 0.0)
        try:
            async with asyncio.timeout(limit_s):
                response = await self._pool(request.url).send(
                    head, body, connect_timeout_s=timeout.get("connect"), head_only=request.method == "HEAD"
                )
        except TimeoutError:
            raise httpx.ReadTimeout("no response") from None
        stream = response if read_s is None else _TimedStream(response, read_s)
        return httpx.Response(
            response.status, headers=response.headers, stream=stream, extensions={"http_version": b"HTTP/1.1"}
        )

    async def aclose(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()

    def _pool(self, url: httpx.URL) -> UpstreamPool:
        key = (url.scheme, url.host, url.port)
        pool = self._pools.get(key)
        if pool is None:
            if url.scheme not in ("http", "https"):
                raise httpx.UnsupportedProtocol(f"{url.scheme!r}: expected http or https")
            if self._tls is None:
                self._tls = ssl.create_default_context()
            pool = self._pools[key] = UpstreamPool(url, tls=self._tls, keep_alive_s=self._keep_alive_s)
        return pool


class _TimedStream(httpx.AsyncByteStream):
    """A response's body with a limit of the time between two reads."""

    def __init__(self, response: HttpResponse, limit_s: float) -> None:
        self._response = response
        self._limit_s = limit_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = aiter(self._response)
        while True:
            try:
                async with asyncio.timeout(self._limit_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise httpx.ReadTimeout(f"no bytes within {self._limit_s} s") from None
            if chunk is None:
                return
            yield chunk

    async def aclose(self) -> None:
        await self._response.aclose()


async def _body_of(request: httpx.Request) -> bytes:
    stream = request.stream
    if isinstance(stream, httpx.ByteStream):
        return b"".join(stream)
    assert isinstance(stream, httpx.AsyncByteStream), "the request of an asynchronous client"
    parts: list[bytes] = []
    size = 0
    async for part in stream:
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise httpx.LocalProtocolError(f"a body of more than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


def _with_length(headers: list[Header], body: bytes) -> list[Header]:
    """Return the headers with a length in the place of a transfer coding: the whole body is known."""
    others = [(name, value) for name, value in headers if name.lower() != b"transfer-encoding"]
    return headers if len(others) == len(headers) else [*others, (b"Content-Length", b"%d" % len(body))]
