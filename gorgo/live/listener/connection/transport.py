"""The transport of a connection: what is written to it, the wait for a slow client, and its end.

Owns the order of bytes, the patience with a client that does not read, and the ways to end. What is written, and when
a connection ends, is `client_connection`'s and `cycle`'s.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import cast

from gorgo.live.turn_writes import TurnWrites, writes_of

#: A client that reads nothing of its response for this long is disconnected; proxies before it idle no longer, s.
LINGER_S = 30.0
#: `struct linger`: close at once, with a reset.
_NO_LINGERING = struct.pack("ii", 1, 0)
#: Bytes that may wait for a turn: nearly every answer and event. More are written at once.
_QUEUED_BYTES = 64 * 1024
#: Bytes that may wait where more come: all are copied for each further event; an event of an engine has some hundred.
MAX_JOINED_BYTES = 4096


class ClientTransport:
    """Writes to one client and closes its connection.

    `writes` are shared with other connections, by default with all of the loop.

    Its protocol passes on `connection_made`, `connection_lost`, `pause_writing` and `resume_writing`.

    `is_behind`: more bytes wait for the client than the transport's buffer should have (asyncio's and uvloop's default
    is 64 KiB). `is_closing`: nothing is written any more. `has_ended_writing`: that side alone is closed.
    """

    __slots__ = (
        "_closing",
        "_drained",
        "_is_paused",
        "_linger",
        "_transport",
        "_waiting",
        "_writes",
        "has_ended_writing",
        "is_behind",
        "is_lost",
        "loop",
    )

    def __init__(self, writes: TurnWrites | None = None) -> None:
        #: Looked up once: in Python 3.11 this is a system call.
        self.loop = asyncio.get_running_loop()
        self._writes = writes_of(self.loop) if writes is None else writes
        #: Bytes for the next turn.
        self._waiting = b""
        #: None until the connection is made, after a TLS handshake.
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self._linger: LingerTimeout | None = None
        self._is_paused = False
        self._closing = self.has_ended_writing = False
        self.is_behind = self.is_lost = False

    @property
    def is_made(self) -> bool:
        return self._transport is not None

    @property
    def is_closing(self) -> bool:
        # A transport closes itself after a failed write, a step before `connection_lost`.
        if self._closing or self.has_ended_writing:
            return True
        return self._transport is not None and self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self) -> None:
        self._closing = self.is_lost = True
        if self._linger is not None:
            self._linger.stop()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.is_behind = True

    def resume_writing(self) -> None:
        self.is_behind = False
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    def write(self, data: bytes) -> None:
        """Write bytes, or queue them for the next turn where the loop is busy; all in their order."""
        if self._waiting:
            data = self._waiting + data
            if len(data) <= MAX_JOINED_BYTES:
                self._waiting = data
                return
            self._waiting = b""
        elif len(data) <= _QUEUED_BYTES and self._writes.are_many(self.loop.time()):
            self._waiting = data
            self._writes.add(self)
            return
        assert self._transport is not None
        self._transport.write(data)

    def write_waiting(self) -> None:
        data, self._waiting = self._waiting, b""
        transport = self._transport
        # `is_closing` without a call: an event comes here.
        if data and transport is not None and not (self._closing or self.has_ended_writing or transport.is_closing()):
            transport.write(data)

    async def drained(self) -> None:
        """Wait until the client is no longer behind, or the connection has ended."""
        while self.is_behind:
            if self._drained is None:
                self._drained = self.loop.create_future()
            await asyncio.shield(self._drained)

    def pause_reading(self, pause: bool) -> None:
        """Pause or resume reading, unless that is so already."""
        if pause is not self._is_paused and not self.is_closing:
            assert self._transport is not None
            self._is_paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def end_writing(self) -> None:
        """Write nothing more, but read on: what a client still sends would reset a closed connection."""
        assert self._transport is not None
        self.write_waiting()
        self.has_ended_writing = True
        if self._transport.can_write_eof():  # not under TLS
            self._transport.write_eof()

    def close(self) -> None:
        """Close the connection once what was written is sent, or the client reads nothing of it for too long."""
        if self._transport is None or self._closing:
            return
        self.write_waiting()
        self._closing = True
        self._transport.close()
        if unsent_bytes(self._transport):
            self._linger = LingerTimeout(self.loop, self._transport)

    def abort_transport(self) -> None:
        """Close the connection at once; unsent bytes are dropped."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Reset the connection; unsent bytes are dropped."""
        assert self._transport is not None
        client = self._transport.get_extra_info("socket")
        with suppress(OSError):  # disconnected
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.abort_transport()


class LingerTimeout:
    """Aborts a connection whose client reads nothing of its response; an orderly end would wait for it for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._left = unsent_bytes(transport)
        self._timer = loop.call_later(LINGER_S, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        before, self._left = self._left, unsent_bytes(self._transport)
        if self._left >= before:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LINGER_S, self._check)


def unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """Return the size of the write buffer; 0 for a closed TLS transport of uvloop, which has no buffer."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0
