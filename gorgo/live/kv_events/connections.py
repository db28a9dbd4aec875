"""EventConnections to the publishers of one address: opened again while they break, and their messages in order.

Owns reconnects, heartbeats and the bound on messages that wait. See `zmtp` for the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import cast

from gorgo.engines.kv_events import MAX_MESSAGE_BYTES
from gorgo.engines.kv_sources import KvEventSource
from gorgo.live.kv_events.zmtp import PING, ZmtpError, ZmtpSubscriber
from gorgo.live.logs import log

#: Pause before a broken connection is tried again; it doubles up to the second one.
RETRY_S = 1.0
MAX_RETRY_S = 5.0
#: A peer that is silent for so long is not there: a firewall may drop a connection without an end.
HEARTBEAT_S = 5.0
HEARTBEAT_TIMEOUT_S = 10.0
#: Messages and bytes that wait; with more nothing is read, so the publisher drops messages, which a replay repairs.
WAITING_MESSAGES = 1000
WAITING_BYTES = 2 * MAX_MESSAGE_BYTES


class Change(Enum):
    """What becomes of a connection, in the order of its messages."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"


Item = Change | list[bytes]


class EventConnections:
    """The connections of one source."""

    def __init__(self, source: KvEventSource) -> None:
        self._source = source
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._peers: set[PublisherConnection] = set()
        self._is_closed = False
        self._has_refused = False

    async def receive(self) -> Item:
        """Return the next message as its frames, or the next change of a connection."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, list):
            self._bytes -= sum(map(len, item))
            if not self._is_full():
                for peer in self._peers:
                    peer.resume()
        return item

    async def keep(self) -> None:
        """Connect, again after each break, until cancelled."""
        loop, pause_s = asyncio.get_running_loop(), RETRY_S
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    peer = await _connect(self._source.endpoint, self.peer)
            except (OSError, UnicodeError):  # a timeout is an OSError; a name of no host is the other
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                continue
            began_s = loop.time()
            await peer.ended
            # One that was accepted and ends at once is tried as one that was refused.
            pause_s = RETRY_S if peer.was_ready else min(2 * pause_s, MAX_RETRY_S)
            await asyncio.sleep(max(0.0, began_s + pause_s - loop.time()))

    def close(self) -> None:
        """End all connections, of which nothing more is reported."""
        self._is_closed = True
        for peer in list(self._peers):
            peer.end_connection()

    def peer(self) -> PublisherConnection:
        """Return the protocol of one more connection."""
        return PublisherConnection(self)

    # -- of a connection

    def add(self, item: Item) -> None:
        """Append a message or a change."""
        if self._is_closed:
            return
        self._items.append(item)
        if isinstance(item, list):
            self._bytes += sum(map(len, item))
            if self._is_full():
                for peer in self._peers:
                    peer.pause()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add_connection(self, peer: PublisherConnection) -> ZmtpSubscriber:
        """Add a connection; return its protocol."""
        self._peers.add(peer)
        return ZmtpSubscriber(self._source.topic, max_bytes=MAX_MESSAGE_BYTES)

    def remove_connection(self, peer: PublisherConnection) -> None:
        self._peers.discard(peer)

    def log_refusal(self, error: ZmtpError) -> None:
        """Log the first reason why a peer is none."""
        if not self._has_refused:
            self._has_refused = True
            log("kv_events_refused", level=logging.WARNING, endpoint=self._source.endpoint, error=str(error))

    def _is_full(self) -> bool:
        return len(self._items) >= WAITING_MESSAGES or self._bytes >= WAITING_BYTES


class PublisherConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, connections: EventConnections) -> None:
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.was_ready = False
        self._is_paused = False
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._zmtp = self._connections.add_connection(self)
        self._transport.write(self._zmtp.opening())
        self._timer = self._loop.call_later(HEARTBEAT_S, self._send_ping)

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            messages = self._zmtp.received(data)
        except ZmtpError as error:
            self._connections.log_refusal(error)
            self.end_connection()
            return
        if replies := self._zmtp.take_replies():
            self._transport.write(replies)
        if self._zmtp.is_ready and not self.was_ready:
            self.was_ready = True
            self._connections.add(Change.CONNECTED)
        for message in messages:
            self._connections.add(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - a protocol's signature
        if self._timer is not None:
            self._timer.cancel()
        self._connections.remove_connection(self)
        if self.was_ready:
            self._connections.add(Change.DISCONNECTED)
        if not self.ended.done():
            self.ended.set_result(None)

    def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._heard_s = self._loop.time()
            self._transport.resume_reading()

    def end_connection(self) -> None:
        self._transport.abort()

    def _send_ping(self) -> None:
        """Send a heartbeat, unless the last ones had no answer."""
        if not self._is_paused and self._loop.time() - self._heard_s > HEARTBEAT_TIMEOUT_S:
            self.end_connection()
            return
        if self.was_ready:
            self._transport.write(PING)
        self._timer = self._loop.call_later(HEARTBEAT_S, self._send_ping)


@asynccontextmanager
async def connections(source: KvEventSource) -> AsyncIterator[EventConnections]:
    """Connect to the publisher of a source, or accept it. Raises `OSError` for an address that is taken."""
    found = EventConnections(source)
    try:
        if source.mode == "bind":
            server = await _accept(source.endpoint, found.peer)
            async with server:
                yield found
            return
        keeping = asyncio.create_task(found.keep())
        try:
            yield found
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))
    finally:
        found.close()


def _address(endpoint: str) -> tuple[str, int] | str:
    """Return host and port, or the path of a socket.

    >>> _address("tcp://[::1]:5557"), _address("ipc:///run/events")
    (('::1', 5557), '/run/events')
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return rest
    host, _, port = rest.rpartition(":")
    return host.strip("[]"), int(port)


async def _connect(endpoint: str, peer: Callable[[], PublisherConnection]) -> PublisherConnection:
    loop, address = asyncio.get_running_loop(), _address(endpoint)
    if isinstance(address, str):
        _, made = await loop.create_unix_connection(peer, address)
    else:
        _, made = await loop.create_connection(peer, *address)
    return made


async def _accept(endpoint: str, peer: Callable[[], PublisherConnection]) -> asyncio.Server:
    loop, address = asyncio.get_running_loop(), _address(endpoint)
    if isinstance(address, str):
        return await loop.create_unix_server(peer, address)
    host, port = address
    return await loop.create_server(peer, None if host == "*" else host, port)
