"""One connection to a replica: bytes out under back-pressure, bytes in to the response that is being read.

Owns the pace of reading and of writing, and when the connection closes. Leaves the meaning of bytes to
`response`, the choice of a connection to `pool`.

Theory of operation. An ordinary read goes to its response in the call in which it arrives. A long one is passed
in slices, one per turn of the event loop, and reading pauses until the last of them: 256 KiB of small events or chunks
would stall every other stream for tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol, cast

import httpx

from gorgo.config.values import ASSUMED_RTT_S
from gorgo.core.latency.ttft import INITIAL_WINDOW_BYTES, SEGMENT_BYTES, Pacing, TcpWindows, windows_after_request
from gorgo.live.event_loop import writes_of

# The pooled connection that the next request to a replica takes, and its congestion window.
#
# Owns a mirror of the pool: idle connections in the order in which the pool hands them out, and for each connection
# the windows that its requests have opened (`core.latency.ttft`). Opens and closes nothing. For a paced sender the
# kernel's TCP_INFO is read instead, when the connection is released.
#
# Theory of operation. Windows and rate of a sender that paces come from Linux's socket option TCP_INFO; see
# `core.latency.ttft` for their effect on a body. Only paced senders are read: their rate depends on each
# acknowledgement. The windows of others follow from the bytes sent, by a rule that the simulator shares and that
# counts round trips better than the kernel's values (6 of 133 kinds of request wrong, against 14). Reading takes 3 us.
# On other systems no sender counts as paced.


#: Of linux/tcp.h, where fields are only ever added at the end: snd_mss, rtt (us), snd_cwnd (segments), pacing_rate
#: (bytes per second), data_segs_out, snd_wnd (bytes; since Linux 5.4).
_TCP_INFO = struct.Struct("=16xI48xI8xI20xQ44xI68xI")
#: Segments that a connection sends before its pacing begins.
_UNPACED = round(INITIAL_WINDOW_BYTES / SEGMENT_BYTES)
#: Longest name of a congestion control (TCP_CA_NAME_MAX).
_NAME_BYTES = 16
_SETTINGS = Path("/proc/sys/net/ipv4")


#: A connection that the server closed before a request fails within this, s: a round trip to anywhere. A replica that
#: fails later may have worked at the request; repeating it would double the load of a failing replica.
STALE_S = 0.5
#: Bytes of a body that its reader has yet to take, before the replica pauses. A read may come on top.
READ_BUFFER_BYTES = 64 * 1024


class NextConnectionState(NamedTuple):
    """The idle connection that the next request takes."""

    windows: TcpWindows
    #: Time since it last sent, s; below 0 where idling costs nothing.
    idle_s: float
    pacing: Pacing | None = None


#: Called at each change with the next connection, None where it has yet to be opened.
OnChange = Callable[[NextConnectionState | None], None]


class PooledConnection(Protocol):
    """A connection of the pool."""

    def is_connected(self) -> bool: ...


#: Reads the kernel's state of a connection; None where its sender does not pace.
ReadTcpInfo = Callable[[PooledConnection], tuple[TcpWindows, Pacing] | None]


@dataclass(slots=True)
class _LastUse:
    windows: TcpWindows
    last_s: float
    #: Not known before the first `ReadTcpInfo`.
    may_pace: bool = True
    #: None where its sender does not pace, and while it is in use.
    pacing: Pacing | None = None


class ConnectionTracker:
    """The pooled connections of one replica.

    Parameters
    ----------
    keep_alive_s:
        Time for which the pool keeps an idle one.
    idling_shrinks:
        Whether the kernel reduces an idle connection's window (`idling_shrinks`).
    read_tcp_info:
        Reads pacing from the kernel. Without it no sender paces.
    clock:
        Monotonic seconds.
    """

    def __init__(
        self,
        *,
        keep_alive_s: float,
        idling_shrinks: bool,
        read_tcp_info: ReadTcpInfo = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._keep_alive_s = keep_alive_s
        self._shrinks = idling_shrinks
        self._read_tcp_info = read_tcp_info
        self._clock = clock
        #: Of each connection that has carried a request, until it is lost.
        self._last_use: dict[PooledConnection, _LastUse] = {}
        #: Release time of each idle one; the pool hands out the last.
        self._idle: OrderedDict[PooledConnection, float] = OrderedDict()
        self.on_change: OnChange | None = None
        #: Called at the first change since `refresh`, which is then due; without it each change is reported at once.
        self.on_stale: Callable[[ConnectionTracker], None] | None = None
        self._is_stale = False

    def on_acquire(self, connection: PooledConnection, body_bytes: int) -> bool:
        """Record a request with such a body on `connection`; return whether the connection served another before.

        The caller reports the change with `report` in the same step, after the request's bytes are written.
        """
        now = self._clock()
        self._idle.pop(connection, None)
        last = self._last_use.get(connection)
        if last is None:
            windows = windows_after_request(TcpWindows(), body_bytes, idle_s=0.0, rtt_s=ASSUMED_RTT_S)
            self._last_use[connection] = _LastUse(windows, now)
            return False
        if last.pacing is None:  # else the kernel says at the release what they are
            idle_s = now - last.last_s if self._shrinks else 0.0
            last.windows = windows_after_request(last.windows, body_bytes, idle_s=idle_s, rtt_s=ASSUMED_RTT_S)
        last.last_s, last.pacing = now, None
        return True

    def on_lost(self, connection: PooledConnection) -> None:
        """Record that `connection` is closed for good."""
        self._idle.pop(connection, None)
        self._last_use.pop(connection, None)

    def on_release(self, connection: PooledConnection) -> None:
        """Record that `connection` is idle, or closed."""
        self._idle[connection] = self._clock()
        last = self._last_use[connection]
        if not last.may_pace:
            return
        tcp_state = self._read_tcp_info(connection)
        if tcp_state is None:
            last.may_pace = False
        else:
            last.windows, last.pacing = tcp_state

    def report(self) -> None:
        """Report a change, or say that one is to be reported before the next decision."""
        if self.on_stale is None:
            self.refresh()
        elif not self._is_stale:
            self._is_stale = True
            self.on_stale(self)

    def refresh(self) -> None:
        """Report the connection that the next request takes."""
        self._is_stale = False
        if self.on_change is not None:
            self.on_change(self.next())

    def next(self) -> NextConnectionState | None:
        """Return the connection that the next request takes, None if it has to open one."""
        now = self._clock()
        while self._idle and now - next(iter(self._idle.values())) > self._keep_alive_s:
            self._idle.popitem(last=False)
        while self._idle:
            connection = next(reversed(self._idle))
            if connection.is_connected():
                last = self._last_use[connection]
                shrinks = self._shrinks and last.pacing is None
                return NextConnectionState(last.windows, now - last.last_s if shrinks else float("-inf"), last.pacing)
            del self._idle[connection]
        return None

    @property
    def alive(self) -> int:
        """Number of open connections, in use or not."""
        return sum(connection.is_connected() for connection in self._last_use)


def idling_shrinks(settings: Path = _SETTINGS) -> bool:
    """Return whether this kernel resets an idle connection's window, if its sender does not pace (sysctl)."""
    try:
        return (settings / "tcp_slow_start_after_idle").read_text().strip() != "0"
    except OSError:
        return True


class Socket(Protocol):
    """A socket of a transport."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def bbr_state(connection: Socket, *, paces: bool = False) -> tuple[TcpWindows, Pacing] | None:
    """Return windows and pacing of a connection; None where its sender does not pace, or this is unknown.

    With `paces` it is known that the sender does, which saves a system call.
    """
    if sys.platform != "linux":
        return None
    try:
        if not paces:
            control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
            if not control.startswith(b"bbr"):
                return None
        return read_tcp_info(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except OSError:
        return None  # closed in the meantime, or an address family without TCP


def read_tcp_info(info: bytes) -> tuple[TcpWindows, Pacing] | None:
    """Parse TCP_INFO of a sender that paces; None from a kernel without its fields."""
    if len(info) < _TCP_INFO.size:
        return None
    segment, rtt_us, congestion, rate, sent, receive = _TCP_INFO.unpack_from(info)
    # At least one segment: a closed window opens before the next request, or the connection is lost.
    windows = TcpWindows(float(max(congestion, 1) * segment), float(max(receive, segment)))
    return windows, Pacing(max(rate * rtt_us / 1e6, float(segment)), float(max(_UNPACED - sent, 1) * segment))


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
        "peer",
        "retired",
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
        #: The address of its other end.
        self.peer: str | None = None
        #: It is closed after its response, and carries no other request.
        self.retired = False
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
