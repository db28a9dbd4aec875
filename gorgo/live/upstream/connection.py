"""One connection to a replica: bytes out under back-pressure, bytes in to the response that is being read.

Owns the pace of reading and of writing, and when the connection closes. Leaves the meaning of bytes to
`response`, the choice of a connection to `pool`.

Theory of operation. An ordinary read goes to its response in the call in which it arrives. A long one is passed
in slices, one per turn of the event loop, and reading pauses until the last of them: 256 KiB of small events or chunks
would stall every other stream for tens of milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

import httpx

from gorgo.live.turn_writes import writes_of
from gorgo.live.upstream.connection_state import Socket

#: Largest part of a read that is parsed in one turn: some 5,400 chunks of one byte, half a millisecond.
SLICE_BYTES = 32 * 1024
#: Larger bodies are written in pieces of this; nearly all prompts fit into one.
WRITE_BYTES = 512 * 1024
#: Up to here head and body are joined: copying them costs less than a write of two parts.
_JOINED_BYTES = 64 * 1024


class Reader(Protocol):
    """A response that is being read. It ends its use of the connection with `ReplicaConnection.release`."""

    def feed(self, data: bytes) -> None:
        """Take what was read; may pause reading."""
        ...

    def on_lost(self, failure: Exception | None) -> None:
        """Take the end of the connection. No bytes follow."""
        ...


class ReplicaConnection(asyncio.Protocol):
    """A connection that carries one request at a time.

    Parameters
    ----------
    on_idle:
        Called when it may carry another request.
    on_lost:
        Called when it is closed, after its response.
    """

    __slots__ = (
        "__weakref__",
        "_can_write",
        "_end",
        "_on_idle",
        "_on_lost",
        "_reader",
        "_reading",
        "_slicing",
        "_stopped",
        "_unparsed",
        "_unsent",
        "_writer",
        "_writes",
        "loop",
        "paces",
        "socket",
        "transport",
    )

    def __init__(
        self, on_idle: Callable[[ReplicaConnection], None], on_lost: Callable[[ReplicaConnection], None]
    ) -> None:
        #: Looked up once: in Python 3.11 this is a system call.
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        #: For the kernel's options: uvloop makes an object for each question to its transport's.
        self.socket: Socket | None = None
        #: Its sender is known to pace.
        self.paces = False
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._reader: Reader | None = None
        #: Read, and not parsed yet.
        self._unparsed = b""
        #: A slice is due in the next turn.
        self._slicing = False
        #: The response takes no bytes at present.
        self._stopped = False
        #: The transport reads.
        self._reading = True
        #: The end of the connection, until all that was read before it is parsed.
        self._end: tuple[Exception | None] | None = None
        self._writes = writes_of(self.loop)
        #: Head and body of a request that waits for the next turn.
        self._unsent: tuple[bytes, bytes] | None = None
        #: Writes the rest of a large body.
        self._writer: asyncio.Task[None] | None = None
        self._can_write: asyncio.Future[None] | None = None

    def is_connected(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def write_request(self, head: bytes, body: bytes, reader: Reader) -> None:
        """Write a request, whose response goes to `reader`. Raises `httpx.WriteError` if the connection is closed.

        Head and body go in one write: a head alone is a segment of its own, and on a new connection to a far replica
        the window then ends one segment short of a body of 100 kB, which costs a round trip.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            raise httpx.WriteError("the connection is closed")
        self._reader = reader
        if len(body) <= WRITE_BYTES:
            self._unsent = (head, body)
            if self._writes.are_many(self.loop.time()):
                self._writes.add(self)
            else:
                self.write_waiting()
        else:
            pieces = memoryview(body)
            transport.writelines((head, pieces[:WRITE_BYTES]))
            self._writer = asyncio.create_task(self._write_pieces(pieces[WRITE_BYTES:]))

    def write_waiting(self) -> None:
        """Write the request that waits, unless the connection has ended."""
        unsent, self._unsent = self._unsent, None
        if unsent is None or self.transport is None or self.transport.is_closing():
            return
        head, body = unsent
        if len(body) <= _JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines(unsent)

    def stop(self) -> None:
        """Pass no more bytes to the response until `resume`. Reading pauses, so the replica has to wait."""
        self._stopped = True
        self._pause()

    def resume(self) -> None:
        """Pass bytes to the response again."""
        if self._stopped:
            self._stopped = False
            self._go_on()

    def release(self, *, reusable: bool) -> None:
        """End the use by a response: await another request, or close at once. Idempotent."""
        if self._reader is None:
            return
        self._reader = None
        self._stopped = False
        # A response before the whole body was sent: the rest must not be read as a request.
        is_sent = self._unsent is None and (self._writer is None or self._writer.done())
        if reusable and is_sent and not self._unparsed and self._end is None and self.is_connected():
            self._writer = None
            self._go_on()
            self._on_idle(self)
        else:
            self.close()

    def close(self) -> None:
        """Close at once: what is not sent yet is dropped, and the engine stops generating."""
        reader, self._reader = self._reader, None
        self._unparsed = b""
        self._unsent = None
        if self._writer is not None:
            self._writer.cancel()
        if self.transport is not None:
            self.transport.abort()
        if reader is not None:
            reader.on_lost(ConnectionAbortedError("the connection was closed on this side"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            self.close()  # bytes without a request
        elif not (self._unparsed or self._stopped) and len(data) <= SLICE_BYTES:
            reader.feed(data)
        else:
            self._unparsed += data
            self._pause()
            self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.resume_writing()
        if self._reader is not None:
            self._end = (exc,)
            self._go_on()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._can_write = self.loop.create_future()

    def resume_writing(self) -> None:
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    def _go_on(self) -> None:
        """Parse the next slice in the next turn, or read on."""
        if self._stopped or self._slicing:
            return
        if self._unparsed:
            self._slicing = True
            self.loop.call_soon(self._parse_slice)
        elif self._end is not None and self._reader is not None:
            self._reader.on_lost(*self._end)
        elif not self._reading and self.is_connected():
            self._reading = True
            cast(asyncio.Transport, self.transport).resume_reading()

    def _parse_slice(self) -> None:
        self._slicing = False
        reader = self._reader
        if reader is None or self._stopped:
            return
        piece, self._unparsed = self._unparsed[:SLICE_BYTES], self._unparsed[SLICE_BYTES:]
        if piece:
            reader.feed(piece)
        if self._reader is reader:
            self._go_on()

    def _pause(self) -> None:
        if self._reading and self.is_connected():
            self._reading = False
            cast(asyncio.Transport, self.transport).pause_reading()

    async def _write_pieces(self, body: memoryview) -> None:
        """Write a large body in pieces, so that other tasks run in between."""
        # A lost connection also fails the reader of the response.
        with suppress(OSError):
            for start in range(0, len(body), WRITE_BYTES):
                while self._can_write is not None:
                    await self._can_write
                if not self.is_connected():
                    return
                cast(asyncio.Transport, self.transport).write(bytes(body[start : start + WRITE_BYTES]))
