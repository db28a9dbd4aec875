"""Connections to one replica: which one a request takes, how long an idle one stays open, and the repeated request.

Owns the bytes of a request's head too, which its callers encode: most lines of it never change. Leaves the bytes of a
response to `response`, the number of requests to `client`.

Theory of operation. The connection used last is taken first: few connections then carry all, with open windows. A kept
connection that the server has closed fails at once, without a byte of a response. That is no failure of the replica, so
the request is sent once more, on a new connection. If that one is refused, the replica may have died of the request, so
the failure is that of the first connection. After a later failure the replica may have had the request, so it is
not repeated.
"""

from __future__ import annotations

import asyncio
import errno
import re
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import cast

import httpx

from gorgo.config.values import REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.tcp import Pacing, TcpWindows
from gorgo.live.http.headers import Header, UpstreamHeaders, encode_lines
from gorgo.live.upstream.address import Address
from gorgo.live.upstream.connection import ReplicaConnection
from gorgo.live.upstream.connection_state import ConnectionTracker, PooledConnection, bbr_state, idling_shrinks
from gorgo.live.upstream.response import HttpResponse

#: A connection that the server closed before a request fails within this, s: a round trip to anywhere. A replica that
#: fails later may have worked at the request; repeating it would double the load of a failing replica.
STALE_S = 0.5
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

    def set_tls(self, tls: ssl.SSLContext) -> None:
        """Use `tls` for connections opened from now on."""
        self._tls = tls

    async def send(
        self,
        head: bytes,
        body: bytes,
        *,
        connect_timeout_s: float | None,
        head_only: bool = False,
        on_sent: Callable[[], None] | None = None,
    ) -> HttpResponse:
        """Send a request; return at the head of its response. Raises `httpx.TransportError`.

        `head_only` is for HEAD, whose response has no body. `on_sent` is called when the request is written, before
        the wait for its response; again for a repeated request.
        """
        stale: httpx.NetworkError | None = None
        connection = self._take_idle()
        if connection is not None:
            loop = connection.loop
            begun_s = loop.time()
            response = HttpResponse(connection, head_only=head_only)
            try:
                return await self._exchange(connection, response, head, body, on_sent)
            except httpx.NetworkError as failure:
                if response.received or loop.time() - begun_s >= STALE_S:
                    raise
                stale = failure
        try:
            connection = await self._connect(connect_timeout_s)
        except httpx.ConnectError:
            if stale is None:
                raise
            raise stale.with_traceback(None) from None
        return await self._exchange(connection, HttpResponse(connection, head_only=head_only), head, body, on_sent)

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
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: ReplicaConnection(self._on_idle, self._on_lost), sock=socket, ssl=tls, server_hostname=name
            )
        except BaseException:
            socket.close()
            raise
        if not connection.is_connected():
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        connection.socket = socket
        self._open.add(connection)
        if self._is_closed:
            connection.close()
        return connection

    def _on_idle(self, connection: ReplicaConnection) -> None:
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


def request_line(method: bytes, target: bytes) -> bytes:
    """Return the first line of a head. Raises `ValueError` for what does not stay within it."""
    if _METHOD.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise ValueError("a method or a target that is not one word")
    return b"%b %b HTTP/1.1\r\n" % (method, target)


def encode_head(start: bytes, headers: Sequence[Header], *, length: int | None = None) -> bytes:
    """Return a request's head, with the `length` of its body if there is one.

    `start` is the request line, and lines of headers that never change. Raises `ValueError` for a control character.
    """
    lines = headers.lines if isinstance(headers, UpstreamHeaders) else encode_lines(headers)
    if length is None:
        return b"%b%b\r\n" % (start, lines)
    return b"%b%bContent-Length: %d\r\n\r\n" % (start, lines, length)


def _read_tcp_info(connection: PooledConnection) -> tuple[TcpWindows, Pacing] | None:
    """Return the kernel's state of a pooled connection."""
    link = cast(ReplicaConnection, connection)
    if link.socket is None:
        return None
    found = bbr_state(link.socket, paces=link.paces)
    link.paces = found is not None
    return found
