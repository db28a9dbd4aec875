"""Windows and rate of a TCP connection whose sender paces, from Linux's `struct tcp_info`.

See `core.latency.tcp` for their effect on a body and `connection_state` for the time of reading. Only paced senders are
read: their rate depends on each acknowledgement. The windows of others follow from the bytes sent, by a rule that the
simulator shares and that counts round trips better than the kernel's values (6 of 133 kinds of request wrong, against
14). Reading takes 3 us. On other systems no sender counts as paced.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import Protocol

from gorgo.core.latency.tcp import INITIAL_WINDOW_BYTES, SEGMENT_BYTES, Pacing, TcpWindows

#: Of linux/tcp.h, where fields are only ever added at the end: snd_mss, rtt (us), snd_cwnd (segments), pacing_rate
#: (bytes per second), data_segs_out, snd_wnd (bytes; since Linux 5.4).
_TCP_INFO = struct.Struct("=16xI48xI8xI20xQ44xI68xI")
#: Segments that a connection sends before its pacing begins.
_UNPACED = round(INITIAL_WINDOW_BYTES / SEGMENT_BYTES)
#: Longest name of a congestion control (TCP_CA_NAME_MAX).
_NAME_BYTES = 16


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
    """Parse `tcp_info` of a sender that paces; None from a kernel without its fields."""
    if len(info) < _TCP_INFO.size:
        return None
    segment, rtt_us, congestion, rate, sent, receive = _TCP_INFO.unpack_from(info)
    # At least one segment: a closed window opens before the next request, or the connection is lost.
    windows = TcpWindows(float(max(congestion, 1) * segment), float(max(receive, segment)))
    return windows, Pacing(max(rate * rtt_us / 1e6, float(segment)), float(max(_UNPACED - sent, 1) * segment))
