"""Which kept connection to a replica the next request takes, and how much it can carry at once.

Owns the mirror of the pool: what is idle, in the order in which the pool hands it out, and for each connection the
windows that its requests have opened (`core.path`). Opens and closes nothing. The kernel knows its own window exactly,
but not what a simulated path makes of it, and the model's counts are the kernel's; so nothing is asked of a socket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol
from weakref import WeakKeyDictionary

from gorgo.core.path import Windows, congestion_now, flights

_SETTINGS = Path("/proc/sys/net/ipv4")
#: For the kernel's retransmission time-out, which is 0.2 to 0.4 s on any path: what it does differs for a second only.
_TYPICAL_RTT_S = 0.1

#: Told of each change: the windows of the next connection and how long ago it last sent something, s; `None` where it
#: has yet to be opened. Idle time is below 0 where idling costs nothing.
Told = Callable[[tuple[Windows, float] | None], None]


class Link(Protocol):
    """A connection as the pool has it."""

    def is_connected(self) -> bool: ...


@dataclass(slots=True)
class _Sent:
    windows: Windows
    last_s: float


class KeptConnections:
    """The kept connections of one replica.

    Parameters
    ----------
    keep_s:
        How long the pool keeps an idle one.
    idling_shrinks:
        Whether the kernel takes an idle connection's window away (`idling_shrinks`).
    clock:
        Monotonic seconds.
    """

    def __init__(self, *, keep_s: float, idling_shrinks: bool, clock: Callable[[], float] = monotonic) -> None:
        self._keep_s = keep_s
        self._shrinks = idling_shrinks
        self._clock = clock
        self._sent: WeakKeyDictionary[Link, _Sent] = WeakKeyDictionary()
        #: When each idle one was given back; the pool hands out the last.
        self._idle: OrderedDict[Link, float] = OrderedDict()
        self.told: Told | None = None

    def taken(self, link: Link, body_bytes: int) -> bool:
        """A request with such a body goes out on `link`. Answers whether it had served another before."""
        now = self._clock()
        self._idle.pop(link, None)
        sent = self._sent.get(link)
        windows = Windows() if sent is None else sent.windows
        if sent is not None and self._shrinks:
            left = congestion_now(windows.congestion, now - sent.last_s, _TYPICAL_RTT_S)
            windows = windows._replace(congestion=left)
        self._sent[link] = _Sent(flights(body_bytes, windows)[1], now)
        self.tell()
        return sent is not None

    def given_back(self, link: Link) -> None:
        """`link` is idle, or closed."""
        self._idle[link] = self._clock()

    def tell(self) -> None:
        if self.told is not None:
            self.told(self.next())

    def next(self) -> tuple[Windows, float] | None:
        """Windows and idle time of the connection that the next request takes, `None` if it has to open one."""
        now = self._clock()
        while self._idle and now - next(iter(self._idle.values())) > self._keep_s:
            self._idle.popitem(last=False)
        while self._idle:
            link = next(reversed(self._idle))
            if link.is_connected():
                sent = self._sent[link]
                return sent.windows, now - sent.last_s if self._shrinks else float("-inf")
            del self._idle[link]
        return None

    @property
    def alive(self) -> int:
        """Open ones, in use or not."""
        return sum(link.is_connected() for link in self._sent)


def idling_shrinks(settings: Path = _SETTINGS) -> bool:
    """Whether this kernel starts an idle connection over: not with the sysctl off, nor under BBR. Unknown is yes."""
    try:
        restarts = (settings / "tcp_slow_start_after_idle").read_text().strip() != "0"
        control = (settings / "tcp_congestion_control").read_text().strip()
    except OSError:
        return True
    return restarts and not control.startswith("bbr")
