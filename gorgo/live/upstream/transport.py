"""Requests to a replica by a transport of httpx, in the place of the own pool.

Owns what the pool does beside sending: the report of connections to the tracker, and the request that a kept connection
lost. `PlainTransport` is what `gorgo serve --plain` sends by, on systems without httptools.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import reduce
from http.cookiejar import CookieJar, DefaultCookiePolicy
from time import monotonic
from typing import Any, cast

import httpx

from gorgo.config.values import REPLICA_KEEP_ALIVE_S
from gorgo.live.upstream.connection import READ_BUFFER_BYTES, STALE_S, ConnectionTracker

#: Makes a transport whose connections have this TLS.
NewTransport = Callable[[ssl.SSLContext], httpx.AsyncBaseTransport]


class TrackedTransport:
    """A transport instead of the pool, with what the pool does for its connections beside sending.

    It reports to `tracker` the connections that httpx's transports name in the extensions of a response, repeats a
    request that a kept connection lost, and closes the transport after its last response once it is retired. httpx does
    not say whether a part of a head had come, so a request is repeated where the pool would see one.
    """

    def __init__(self, wrapped: httpx.AsyncBaseTransport, tracker: ConnectionTracker) -> None:
        self.wrapped = wrapped
        #: Says why no request may go to an address, where the replica's name is not to be trusted.
        self.refuses: Callable[[str], str | None] | None = None
        self._tracker = tracker
        self._links: dict[int, _Link] = {}
        self._open = 0
        self._is_retired = False
        self._closing: asyncio.Task[None] | None = None

    async def send_request(
        self,
        request: Callable[[], httpx.Request],
        body_bytes: int,
        on_sent: Callable[[], None] | None,
        *,
        repeatable: bool,
    ) -> tuple[httpx.Response, Callable[[], None]]:
        """Return the response at its head, and what is to be called at its end."""
        self._open += 1
        try:
            begun_s = monotonic()
            sending = _Sending(on_sent, self.refuses)
            response: httpx.Response | None = None
            try:
                response = await self.wrapped.handle_async_request(sending.traced(request()))
            except httpx.NetworkError as failure:
                is_stale = not sending.has_connected and monotonic() - begun_s < STALE_S
                if not repeatable or not is_stale or isinstance(failure, httpx.ConnectError):
                    raise
            if response is None:
                sending = _Sending(on_sent, self.refuses)
                response = await self.wrapped.handle_async_request(sending.traced(request()))
        except BaseException:
            self._forget_closed()  # which of them it had is not known
            self._tracker.report()
            self._ended(None)
            raise
        link = self._link_of(response.extensions.get("network_stream"))
        if link is not None:
            link.in_use = True
            self._tracker.on_acquire(link, body_bytes)
            self._tracker.report()
        return response, lambda: self._ended(link)

    def retire(self) -> None:
        """Close the transport after its last response."""
        self._is_retired = True
        self._close_if_done()

    def _link_of(self, stream: object) -> _Link | None:
        """Return the connection of a response."""
        if stream is None:
            return None
        link = self._links.get(id(stream))
        if link is None:
            self._forget_closed()
            link = self._links[id(stream)] = _Link(stream)
        return link

    def _forget_closed(self) -> None:
        for key, link in [*self._links.items()]:
            if not link.is_connected():
                del self._links[key]
                self._tracker.on_lost(link)

    def _ended(self, link: _Link | None) -> None:
        self._open -= 1
        if link is not None:
            link.in_use = False
            self._tracker.on_release(link)
            self._tracker.report()
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_retired and not self._open and self._closing is None:
            for link in self._links.values():
                self._tracker.on_lost(link)
            self._closing = asyncio.create_task(self.wrapped.aclose())


class _Link:
    """A connection of httpx, as the tracker sees it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        #: For the kernel's options.
        self.socket: Any = stream.get_extra_info("socket")
        #: Its sender is known to pace.
        self.paces = False
        self.in_use = False

    def is_connected(self) -> bool:
        """Return whether it is open: between two responses only the end of a connection can be read from it."""
        return self.in_use or not self._stream.get_extra_info("is_readable")


class _Sending:
    """One request by httpcore, as its trace tells."""

    def __init__(self, on_sent: Callable[[], None] | None, refuses: Callable[[str], str | None] | None) -> None:
        #: A connection was opened for it.
        self.has_connected = False
        self._on_sent, self._refuses = on_sent, refuses

    def traced(self, request: httpx.Request) -> httpx.Request:
        request.extensions["trace"] = self._trace
        return request

    async def _trace(self, name: str, info: Mapping[str, Any]) -> None:
        if name == "connection.connect_tcp.started":
            self.has_connected = True
        elif name == "connection.connect_tcp.complete" and self._refuses is not None:
            stream = info["return_value"]
            reason = self._refuses(str(stream.get_extra_info("server_addr")[0]))
            if reason is not None:
                await stream.aclose()
                raise httpx.ConnectError(f"its name stands for another place: {reason}")
        elif name == "http11.send_request_body.complete" and self._on_sent is not None:
            self._on_sent()


class PlainTransport(httpx.AsyncBaseTransport):
    """Requests to one replica by `httpx.AsyncClient`, which reads no environment and stores no cookie.

    Parameters
    ----------
    tls:
        Of connections to the replica.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        # Open responses are bounded by their caller.
        limits = httpx.Limits(keepalive_expiry=REPLICA_KEEP_ALIVE_S)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            trust_env=False,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request as it is. Raises `httpx.TransportError`, as the own pool does."""
        try:
            response = await self._client.send(request, stream=True)
        except httpx.RemoteProtocolError as failure:
            import httpcore  # httpx has loaded it; without `--plain` nothing needs its 32 modules

            cause = failure.__cause__
            if isinstance(cause, httpcore.RemoteProtocolError) and cause.__cause__ is None:
                # No error of h11: the connection ended before the head of a response.
                raise httpx.ReadError(str(failure)) from failure
            raise
        if {b"content-length", b"transfer-encoding"} <= {name.lower() for name, _ in response.headers.raw}:
            await response.aclose()
            raise httpx.RemoteProtocolError("a length and a coding: h11 takes the second and passes both on")
        response.stream = _OneAnswer(cast(httpx.AsyncByteStream, response.stream), response.extensions)
        return response

    async def aclose(self) -> None:
        await self._client.aclose()


#: From the stream of httpx to the parser of its connection. Where a name is missing, no connection is used twice.
_TO_PARSER = ("_stream", "_httpcore_stream", "_stream", "_connection", "_h11_state")


class _OneAnswer(httpx.AsyncByteStream):
    """The body of a response, whose connection carries another request only if nothing else came on it.

    h11 would read bytes behind a body as the response to the next request, which may be another client's. What came of
    the body and is not wanted is read at the end, as far as that needs no wait: as in the own pool, the connection then
    stays open.
    """

    def __init__(self, stream: httpx.AsyncByteStream, extensions: Mapping[str, Any]) -> None:
        self._stream = stream
        self._chunks: AsyncIterator[bytes] | None = None
        self._network: Any = extensions.get("network_stream")
        self._parser = reduce(lambda layer, name: getattr(layer, name, None), _TO_PARSER, cast(Any, stream))

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._chunks is None:
            self._chunks = aiter(self._stream)
        return self._chunks

    async def aclose(self) -> None:
        await self._drop_rest()
        if self._network is not None and (self._parser is None or self._parser.trailing_data[0]):
            await self._network.aclose()
        await self._stream.aclose()

    async def _drop_rest(self) -> None:
        left = READ_BUFFER_BYTES
        with suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(0):
                async for chunk in self:
                    left -= len(chunk)
                    if left < 0:
                        return
