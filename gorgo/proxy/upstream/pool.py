"""Connections to one replica: aiohttp's pool, and requests on its connections.

Owns which connection a request takes and how long an idle one stays open. Leaves the bytes of a request to
`http1_call`, the number of requests to `client`.

Theory of operation: a pooled connection that the server has closed fails at once, without a byte of a response. That is
no failure of the replica, so the request is sent once more, on a new connection. After a later failure the replica may
have had the request, so it is not repeated.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import lru_cache, partial
from time import monotonic
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from yarl import URL

from gorgo.config.constants import REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.tcp import Pacing, TcpWindows
from gorgo.proxy.http.headers import Header
from gorgo.proxy.upstream.connection_state import ConnectionTracker, idling_shrinks
from gorgo.proxy.upstream.http1_call import FAILURES, HttpCall, encode_head, send
from gorgo.proxy.upstream.paced import PacedHandler
from gorgo.proxy.upstream.tcp_info import bbr_state

#: A connection that the server closed before a request fails within this, s: a round trip to anywhere. A replica that
#: fails later may have worked at the request; repeating it would double the load of a failing replica.
STALE_S = 0.5


class UpstreamPool:
    """HTTP/1.1 to one origin.

    Parameters
    ----------
    origin:
        Scheme, host and port.
    tls:
        Shared by all replicas: loading the certificates takes 20 ms.
    """

    def __init__(self, origin: str, *, tls: ssl.SSLContext) -> None:
        #: The key of the origin in aiohttp's pool.
        self._key = aiohttp.ClientRequest("GET", URL(origin), loop=asyncio.get_running_loop())
        self.tracker = ConnectionTracker(
            keep_alive_s=REPLICA_KEEP_ALIVE_S, idling_shrinks=idling_shrinks(), read_tcp_info=_read_tcp_info
        )
        self._connector = _TrackedConnector(self.tracker, limit=0, keepalive_timeout=REPLICA_KEEP_ALIVE_S, ssl=tls)
        self._fresh_connector = _Connector(limit=0, force_close=True, ssl=tls)

    def set_tls(self, tls: ssl.SSLContext) -> None:
        """Use `tls` for connections opened from now on."""
        self._connector.use(tls)
        self._fresh_connector.use(tls)

    async def send(
        self, start: bytes, headers: Sequence[Header], body: bytes, *, connect_timeout_s: float | None
    ) -> HttpCall:
        """Send a request; return at the head of its response. Raises one of `http1_call.FAILURES`.

        `start` is the request line, its end included. Headers are sent as they are, `Host` and the length included.
        """
        reused, begun_s, timeout = False, monotonic(), _connect_within(connect_timeout_s)
        try:
            connection, reused = await self._connector.acquire(self._key, timeout, len(body))
            return await send(connection, encode_head(start, headers), body, sent=self.tracker.report)
        except FAILURES as failure:
            if not (reused and _is_stale(failure) and monotonic() - begun_s < STALE_S):
                raise
        connection = await self._fresh_connector.connect(self._key, [], timeout)
        return await send(connection, encode_head(start, headers, close=True), body)

    async def aclose(self) -> None:
        await self._connector.close()
        await self._fresh_connector.close()


@lru_cache(maxsize=64)
def _connect_within(limit_s: float | None) -> aiohttp.ClientTimeout:
    """Return aiohttp's form of a connect timeout: `connect` covers name resolution and all addresses.

    Cached for more limits than there are regions: making one costs as much as the whole head.
    """
    return aiohttp.ClientTimeout(total=None, connect=limit_s, sock_connect=limit_s)


def _is_stale(failure: BaseException) -> bool:
    """Whether the server had closed the connection: no byte came back."""
    return isinstance(failure, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError))


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = cast("partial[ResponseHandler]", partial(PacedHandler, loop=self._loop))

    def use(self, tls: ssl.SSLContext) -> None:
        """Set the context that aiohttp reads for each connection that it opens; it has no method for this."""
        self._ssl = tls


class _TrackedConnector(_Connector):
    """Reports acquired and released connections to a `ConnectionTracker`."""

    def __init__(self, tracker: ConnectionTracker, **options: Any) -> None:
        super().__init__(**options)
        self._tracker = tracker

    async def acquire(
        self,
        key: aiohttp.ClientRequest,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own
        body_bytes: int,
    ) -> tuple[Connection, bool]:
        """Return a connection for a request with such a body, and whether it served another before."""
        connection = await self.connect(key, [], timeout)
        while (protocol := connection.protocol) is not None and protocol.should_close:
            # It received bytes while idle: they would be taken for the response to this request.
            connection.close()
            connection = await self.connect(key, [], timeout)
        assert protocol is not None, "an acquired connection is open"
        reused = self._tracker.on_acquire(protocol, body_bytes)
        if not reused and protocol.closed is not None:
            protocol.closed.add_done_callback(self._on_closed)
        connection.add_callback(partial(self._on_release, protocol))
        return connection, reused

    def _on_release(self, protocol: Any) -> None:
        self._tracker.on_release(protocol)
        # After the caller's step, in which it may still close the connection.
        self._loop.call_soon(self._move_first, protocol)

    def _on_closed(self, closed: asyncio.Future[None]) -> None:
        """Report the change. The failure itself concerns the request on the connection."""
        if not closed.cancelled():
            closed.exception()
        self._tracker.report()

    def _move_first(self, protocol: Any) -> None:
        """Make the pool hand out the last used connection first: few connections then carry all, with open windows."""
        for idle in self._conns.values():
            if idle and idle[-1][0] is protocol:
                idle.rotate(1)
        self._tracker.report()


def _read_tcp_info(protocol: Any) -> tuple[TcpWindows, Pacing] | None:
    """Return the kernel's state of a pooled connection; None for a closed one, which has no socket."""
    transport = protocol.transport
    return None if transport is None else bbr_state(transport.get_extra_info("socket"))
