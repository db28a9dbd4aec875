"""The picker's services on an HTTP/2 of the project's own, on asyncio's protocols.

Owns the listening port, its TLS with the reload of changed files, and the protocol that moves bytes between a socket
and a `Connection`. Leaves what the bytes mean to `gorgo.picker.transport.connection`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from contextlib import ExitStack
from typing import cast

from gorgo.config.model import PickerTlsConfig
from gorgo.core.limits import Buffer, BufferBudget
from gorgo.live.http.tls import ServedTls, follow_files, served_tls
from gorgo.live.listener.sockets import BACKLOG, address_of, listening
from gorgo.live.logs import log
from gorgo.picker.transport.connection import Connection
from gorgo.picker.transport.frames import Code, Http2Error
from gorgo.picker.transport.services import (
    CLOSE_S,
    HANDSHAKE_S,
    KEEPALIVE_ANSWER_S,
    KEEPALIVE_S,
    MAX_CONNECTIONS,
    Services,
    TransportLimits,
)

#: Place of the files in errors.
PLACE = "picker.tls"
#: HTTP/2 alone: gRPC has no other form.
ALPN = ("h2",)


def picker_tls(files: PickerTlsConfig) -> ServedTls | None:
    """Return TLS of the listener, `None` without a certificate. Raises `ConfigError`."""
    return served_tls(files, place=PLACE, alpn=ALPN, client_ca=files.client_ca)


#: Between two records of full places, s: a flood of connections is no flood of lines.
LOG_S = 10.0
#: Bytes in the transport that stop further DATA, and other frames beyond them that end a connection: its client sends
#: and reads nothing.
HIGH_BYTES = 256 * 1024
UNREAD_BYTES = 4 * 1024 * 1024
#: Longest time for which a client reads nothing of what waits for it, s.
UNREAD_S = 60.0


class Http2Server:
    """One listening port."""

    def __init__(self, services: Services, limits: TransportLimits, buffers: BufferBudget) -> None:
        self._services = services
        self._limits = limits
        self._buffers = buffers
        #: When full places were logged last, and how many connections met them since.
        self._logged_s = -LOG_S
        self._refused = 0
        self._sockets = ExitStack()
        self._listener: socket.socket | None = None
        #: `None` before `bind`, and without a certificate.
        self.tls: ServedTls | None = None
        self._files = PickerTlsConfig()
        self.connections: set[ServerProtocol] = set()

    def bind(self, bind: str, tls: PickerTlsConfig) -> tuple[str, int]:
        """Listen; return host and actual port. Raises `ConfigError`."""
        self._files, self.tls = tls, picker_tls(tls)
        self._listener = self._sockets.enter_context(listening(bind, "picker.bind"))
        return address_of(self._listener)

    async def serve_calls(self, closing: asyncio.Event) -> None:
        """Serve until `closing` is set; then end all calls with OK."""
        loop = asyncio.get_running_loop()
        assert self._listener is not None, "bound before"
        context = None if self.tls is None else self.tls.context
        handshake_s = None if context is None else HANDSHAKE_S
        with self._sockets:
            server = await loop.create_server(
                self._protocol,
                sock=self._listener,
                backlog=BACKLOG,
                ssl=context,
                ssl_handshake_timeout=handshake_s,
            )
            renewing = None if self.tls is None else asyncio.create_task(follow_files(self.tls, lambda: self._files))
            try:
                await closing.wait()
            finally:
                if renewing is not None:
                    renewing.cancel()
                server.close()
                await self._end()

    def start_drain(self) -> None:
        """Ask Envoy to open new calls on other connections.

        Calls that come on these before Envoy has read that are served: Envoy closes each connection after its last
        one. So are calls on new connections: there may be no other picker.
        """
        for connection in tuple(self.connections):
            connection.announce_end()

    def _protocol(self) -> ServerProtocol:
        return ServerProtocol(self, self._services, self._limits, self._buffers)

    def admit_connection(self, host: str) -> bool:
        """Return whether a new connection of `host` has a place, for which another one may have been evicted.

        That one is of the host with most connections: the one without a call for longest, or one with calls if the
        new one's host has fewer.
        """
        if len(self.connections) < MAX_CONNECTIONS:
            return True
        counts = Counter(each.host for each in self.connections)
        most = max(counts.values())
        crowd = [each for each in self.connections if counts[each.host] == most]
        victims = [each for each in crowd if each.is_idle] or (crowd if counts[host] + 1 < most else [])
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_s >= LOG_S:
            fields = {
                "host": host,
                "most_of_host": crowd[0].host,
                "of_host": most,
                "connections": len(self.connections),
            }
            log("picker_connections_full", level=logging.WARNING, evicted_or_refused=self._refused, **fields)
            self._logged_s, self._refused = now, 0
        if not victims:
            return False
        victim = min(victims, key=lambda each: each.active_s)
        self.connections.discard(victim)
        victim.abort()
        return True

    async def _end(self) -> None:
        self._services.release_all()
        for connection in tuple(self.connections):
            connection.close_in_order()
        waiting = [connection.closed for connection in self.connections]
        if waiting:
            await asyncio.wait(waiting, timeout=CLOSE_S)
        for connection in tuple(self.connections):
            connection.abort()


class ServerProtocol(asyncio.Protocol):
    """One connection on its transport."""

    def __init__(self, server: Http2Server, services: Services, limits: TransportLimits, buffers: BufferBudget) -> None:
        self._server = server
        #: Address of the peer.
        self.host = ""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._flush_due = self._turn_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._received_s = self.active_s = self._loop.time()
        self._pinged = False
        #: Done once the connection is lost.
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._connection = Connection(services, limits, self._wake, buffers)
        self._buffers = buffers
        #: What waits for the client, among the bytes of all connections, and when it has read of it last.
        self._unread: Buffer | None = None
        self._read_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Return whether no call is open."""
        return self._connection.is_idle

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tls = transport.get_extra_info("ssl_object")
        wrong = isinstance(tls, ssl.SSLObject) and tls.selected_alpn_protocol() != "h2"
        peer = transport.get_extra_info("peername")
        self.host = self._connection.client = str(peer[0]) if isinstance(peer, tuple) else ""
        if wrong or not self._server.admit_connection(self.host):
            self._transport.abort()
            return
        self._server.connections.add(self)
        self._transport.set_write_buffer_limits(high=HIGH_BYTES)
        self._timer = self._loop.call_later(HANDSHAKE_S, self._check_greeting)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._received_s, self._pinged = self._loop.time(), False
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        """Act on received bytes; read no more before the frames that are left have had their turns."""
        try:
            was_behind = self._connection.is_behind
            self._connection.receive(data)
            if not self._connection.is_idle:
                self.active_s = self._loop.time()
            if self._connection.is_behind:
                if not was_behind and self._transport is not None:
                    self._transport.pause_reading()
                if not self._turn_due:
                    self._turn_due = True
                    self._loop.call_soon(self._go_on)
            elif was_behind and self._transport is not None:
                self._transport.resume_reading()
        except Http2Error as error:
            log("connection_refused", error=str(error))
            self._write(self._connection.take_output() + self._connection.goaway_for(error))
            self._close()
            return
        self._flush()

    def _go_on(self) -> None:
        self._turn_due = False
        if self._transport is not None and not self._transport.is_closing():
            self._receive(b"")

    def pause_writing(self) -> None:
        self._connection.set_full(True)

    def resume_writing(self) -> None:
        self._connection.set_full(False)
        self._receive(b"")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._timer is not None:
            self._timer.cancel()
        self._server.connections.discard(self)
        self._connection.close()
        self._count(0)
        if not self.closed.done():
            self.closed.set_result(None)

    # -- the server

    def announce_end(self) -> None:
        """Ask for new streams elsewhere."""
        self._connection.announce_end()
        self._flush()

    def close_in_order(self) -> None:
        """Close after what is written."""
        self._connection.announce_last_stream()
        self._flush()
        self._close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _wake(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._transport is not None:  # else `connection_made` will
            self._write(self._connection.take_output())
            self._count_unread(self._transport)

    def _write(self, output: bytes) -> None:
        transport = self._transport
        if not output or transport is None or transport.is_closing():
            return
        transport.write(output)
        if transport.get_write_buffer_size() > UNREAD_BYTES:
            log("connection_refused", error="the client does not read")
            transport.abort()

    def _count_unread(self, transport: asyncio.Transport) -> None:
        """Count what waits for the client with the bytes of all connections, and end the one that has no place."""
        if transport.is_closing():
            return
        size = self._connection.unsent_bytes + transport.get_write_buffer_size()
        if (size or self._unread is not None) and not self._count(size):
            self._end_unread()

    def _count(self, size: int) -> bool:
        counted, now = self._unread, self._loop.time()
        if not size:
            if counted is not None:
                self._unread = counted.on_evict = None
                self._buffers.close(counted)
            return True
        if counted is None:
            counted = self._unread = self._buffers.new_buffer(self.host, now=now)
            counted.make_evictable(self._end_unread, now=now)
            self._read_s = now
        if size < counted.size:
            counted.received(counted.size - size, now=now)
            self._buffers.shrink(counted, size)
            self._read_s = now
            return True
        return self._buffers.reserve(counted, size, now=now)

    def _end_unread(self) -> None:
        size = 0 if self._unread is None else self._unread.size
        log("picker_client_does_not_read", level=logging.WARNING, host=self.host, bytes=size)
        self.abort()

    # -- time

    def _check_greeting(self) -> None:
        if not self._connection.is_greeted:
            self._write(self._connection.goaway_for(Http2Error(Code.SETTINGS_TIMEOUT, "expected SETTINGS")))
            self._close()
            return
        self._keep_alive()

    def _keep_alive(self) -> None:
        """Ask a silent client for a sign of life; close the connection of one that does not answer."""
        self._connection.renew_budget()
        if self._transport is not None:
            self._count_unread(self._transport)
        if self._unread is not None and self._loop.time() - self._read_s >= UNREAD_S:
            self._end_unread()
            return
        silent_s = self._loop.time() - self._received_s
        if self._pinged and silent_s >= KEEPALIVE_ANSWER_S:
            self.abort()
            return
        if not self._pinged and silent_s >= KEEPALIVE_S:
            self._pinged = True
            self._received_s = self._loop.time()
            self._connection.ping()
            silent_s = 0.0
        limit_s = KEEPALIVE_ANSWER_S if self._pinged else KEEPALIVE_S
        self._timer = self._loop.call_later(max(limit_s - silent_s, 0.01), self._keep_alive)
