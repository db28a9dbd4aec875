"""The pooled connection that the next request to a replica takes, and its congestion window.

Owns a mirror of the pool: idle connections in the order in which the pool hands them out, and for each connection the
windows that its requests have opened (`core.latency.tcp`). Opens and closes nothing. For a paced sender the kernel's
TCP_INFO is read instead, when the connection is released.

Theory of operation. Windows and rate of a sender that paces come from Linux's socket option TCP_INFO; see
`core.latency.tcp` for their effect on a body. Only paced senders are read: their rate depends on each acknowledgement.
The windows of others follow from the bytes sent, by a rule that the simulator shares and that counts round trips better
than the kernel's values (6 of 133 kinds of request wrong, against 14). Reading takes 3 us. On other systems no sender
counts as paced.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol

from gorgo.config.values import ASSUMED_RTT_S
from gorgo.core.latency.tcp import INITIAL_WINDOW_BYTES, SEGMENT_BYTES, Pacing, TcpWindows, windows_after_request

#: Of linux/tcp.h, where fields are only ever added at the end: snd_mss, rtt (us), snd_cwnd (segments), pacing_rate
#: (bytes per second), data_segs_out, snd_wnd (bytes; since Linux 5.4).
_TCP_INFO = struct.Struct("=16xI48xI8xI20xQ44xI68xI")
#: Segments that a connection sends before its pacing begins.
_UNPACED = round(INITIAL_WINDOW_BYTES / SEGMENT_BYTES)
#: Longest name of a congestion control (TCP_CA_NAME_MAX).
_NAME_BYTES = 16
_SETTINGS = Path("/proc/sys/net/ipv4")


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
        found = self._read_tcp_info(connection)
        if found is None:
            last.may_pace = False
        else:
            last.windows, last.pacing = found

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
