"""One listening socket and its connections.

Owns TLS handshakes, the number of open connections, and their end when the process stops. hypercorn's server accepts
connections without TLS (`hypercorn_server`). It shows one with TLS only after its handshake, too late to be counted, so
those are accepted here. A connection is `connection.client_connection`'s; there is no protocol but HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gorgo.live.event_loop import first_of
from gorgo.live.listener.connection.client_connection import ClientConnection, ServerSettings
from gorgo.live.listener.heads import AcceptLimits, PartialHeads
from gorgo.live.listener.hypercorn_server import ServerConfig, run_server
from gorgo.live.logs import log

#: Pause after a failed accept, as in asyncio's servers.
_ACCEPT_AGAIN_S = 1.0
#: Parts of a stop, each with its share of `graceful_timeout`: open requests end, their calls are cancelled, transports
#: are aborted.
_STAGES = 3


#: Connections by which a process may be ahead of another one before it leaves new ones to it, and for how long, s.
AHEAD, TURN_S = 2, 0.002


class OpenConnections(Protocol):
    """The open connections of the processes that share a listener."""

    def set_connections(self, count: int) -> None:
        """Say how many are open here."""
        ...

    def least_connections_of_others(self) -> int:
        """Return those of the other process that has the fewest."""
        ...


@dataclass(frozen=True, slots=True)
class SharedListener:
    """What the processes that share a listener know of each other.

    `retiring` is set when this process leaves the listener to the others: it ends each connection with its next
    response, and says so in it.
    """

    counts: OpenConnections
    retiring: asyncio.Event


async def serve_app(
    app: Any,
    config: ServerConfig,
    listener: socket.socket,
    closing: asyncio.Event,
    *,
    limits: Callable[[], AcceptLimits],
    tls: ssl.SSLContext | None = None,
    shared: SharedListener | None = None,
) -> None:
    """Serve connections until `closing` is set; then end idle ones at once and the others within
    the `graceful_timeout` of `config`. The listener is closed on return.

    `limits` is called for each connection. With `tls` the handshake has the timeout of a request's head, and its
    connection counts as open. `shared`: other processes accept from this listener too.
    """
    settings = ServerSettings(app, config, PartialHeads())
    connections = Connections(settings, limits)
    accepts_itself = tls is not None or shared is not None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_server(app, config, [] if accepts_itself else [listener], connections.serve, closing))
        accepting = tasks.create_task(connections.accept(listener, tls, shared)) if accepts_itself else None
        try:
            if shared is not None and accepting is not None:
                await first_of(closing, shared.retiring)
                accepting.cancel()
                settings.retiring = True
            await closing.wait()
        finally:
            if accepting is not None:
                accepting.cancel()
                await asyncio.wait((accepting,))  # it waits for the descriptor
                listener.close()
            await connections.end(config.graceful_timeout / _STAGES)


class Connections:
    """The open connections of one listener."""

    def __init__(self, settings: ServerSettings, limits: Callable[[], AcceptLimits]) -> None:
        self._settings = settings
        self._limits = limits
        #: Each with its TLS handshake while that lasts.
        self._open: dict[ClientConnection, asyncio.Task[None] | None] = {}
        #: Those without a request in progress, the one that is idle for longest first; none is evicted twice.
        self._idle: OrderedDict[ClientConnection, None] = OrderedDict()
        self._stopping = False
        self._changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one new connection without TLS until it has ended."""
        connection, transport = self._admit(), cast(asyncio.Transport, writer.transport)
        if connection is None:
            transport.abort()
            return
        # Under uvloop something may have been read before this task runs. Here `read` waits for nothing.
        at_eof = reader.at_eof()
        reader.feed_eof()
        received = b""
        with suppress(OSError):  # disconnected
            received = await reader.read()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if received:
            connection.data_received(received)
        if transport.is_closing():
            connection.connection_lost(None)
        elif at_eof or not transport.is_reading():
            connection.eof_received()
        try:
            await connection.ended
        finally:  # cancelled: hypercorn waits no longer
            if not connection.transport.is_lost:
                transport.abort()

    async def accept(
        self, listener: socket.socket, tls: ssl.SSLContext | None, shared: SharedListener | None = None
    ) -> None:
        """Accept connections with TLS, or from a shared listener.

        asyncio's server would count those with TLS only after the handshake, and take whole bursts from a listener
        that others share.
        """
        listener.setblocking(False)
        while True:
            client = await _accept(listener) if shared is None else await self._accept_in_turn(listener, shared)
            if client is not None:
                connection = self._admit()
                if connection is None:
                    client.close()
                else:
                    self._open[connection] = asyncio.create_task(self.handshake(connection, client, tls))
            await asyncio.sleep(0)  # other tasks run between two of a burst

    async def _accept_in_turn(self, listener: socket.socket, shared: SharedListener) -> socket.socket | None:
        """Return the next connection, and leave it to others while they have fewer; `None` if one has taken it."""
        shared.counts.set_connections(len(self._open))
        await _readable(listener)
        if len(self._open) > shared.counts.least_connections_of_others() + AHEAD:
            await asyncio.sleep(TURN_S)
        try:
            client, _ = listener.accept()
        except BlockingIOError:
            return None
        except OSError as failure:  # disconnected, or out of descriptors
            log("accept_failed", level=logging.WARNING, error=failure.strerror)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            return None
        client.setblocking(False)
        return client

    async def handshake(self, connection: ClientConnection, client: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Start an accepted connection; TLS on it within the time of a head."""
        limit_s, loop = None if tls is None else connection.limits.timeout_s, asyncio.get_running_loop()
        try:
            with suppress(OSError):  # disconnected, too slow, or another protocol
                await loop.connect_accepted_socket(lambda: connection, client, ssl=tls, ssl_handshake_timeout=limit_s)
        finally:
            if not connection.transport.is_made:
                self._forget(connection)
            elif connection in self._open:
                self._open[connection] = None

    async def end(self, limit_s: float) -> None:
        """Wait, then cancel, then abort: an orderly end waits for a client to read the rest, and some never do."""
        self._stopping = True
        for connection in tuple(self._open):
            connection.stop()
        await self._wait_closed(limit_s)
        for connection, handshake in tuple(self._open.items()):
            connection.cancel_calls()
            if handshake is not None:
                handshake.cancel()
        await self._wait_closed(limit_s)
        for connection in tuple(self._open):
            connection.abort_transport()
        await self._wait_closed(limit_s)

    def _admit(self) -> ClientConnection | None:
        """Return a new connection; None if there are too many, all with a request, or the process stops."""
        limits = self._limits()
        if self._stopping or (len(self._open) >= limits.connections and not self._evict()):
            return None
        connection = ClientConnection(self._settings, limits.head, on_idle=self._set_idle, on_end=self._forget)
        self._open[connection] = None
        self._idle[connection] = None
        return connection

    def _evict(self) -> bool:
        """End the connection that is idle for longest, which counts no longer; return whether there was one."""
        if not self._idle:
            return False
        connection, _ = self._idle.popitem(last=False)
        handshake = self._open.pop(connection)
        if handshake is None:
            connection.abort_transport()
        else:
            handshake.cancel()
        return True

    def _forget(self, connection: ClientConnection) -> None:
        self._open.pop(connection, None)
        self._idle.pop(connection, None)
        if self._stopping and not self._open:
            self._changed.set()

    def _set_idle(self, connection: ClientConnection, idle: bool) -> None:
        self._idle.pop(connection, None)
        if idle and connection in self._open:
            self._idle[connection] = None  # at the end

    async def _wait_closed(self, limit_s: float) -> None:
        if self._open:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), limit_s)


async def _readable(listener: socket.socket) -> None:
    """Wait until a connection can be accepted; another process may take it first."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def on_readable() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(listener.fileno(), on_readable)
    try:
        await readable
    finally:
        loop.remove_reader(listener.fileno())


async def _accept(listener: socket.socket) -> socket.socket:
    """Return the next connection."""
    while True:
        try:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as failure:  # disconnected, or out of descriptors
            log("accept_failed", level=logging.WARNING, error=failure.strerror)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
        else:
            return client
