"""Which kept connection to a replica the next request takes, and how much it can carry at once.

Owns the mirror of the pool: what is idle, in the order in which the pool hands it out, and for each connection the
windows that its requests have opened (`core.latency.tcp`). Opens and closes nothing. For a paced sender the kernel's
`tcp_info` is read instead, when the connection is released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from gorgo.config.constants import ASSUMED_RTT_S
from gorgo.core.latency.tcp import Pacing, TcpWindows, cwnd_after_idle, round_trips

_SETTINGS = Path("/proc/sys/net/ipv4")


class NextConnectionState(NamedTuple):
    """The idle connection that the next request takes."""

    windows: TcpWindows
    #: How long ago it last sent something, s; below 0 where idling costs nothing.
    idle_s: float
    pacing: Pacing | None = None


#: Told of each change: the next connection, `None` where it has yet to be opened.
OnChange = Callable[[NextConnectionState | None], None]


class PooledConnection(Protocol):
    """A connection as the pool has it."""

    def is_connected(self) -> bool: ...


#: What the kernel tells of a connection whose sender paces.
ReadTcpInfo = Callable[[PooledConnection], tuple[TcpWindows, Pacing] | None]


@dataclass(slots=True)
class _LastUse:
    windows: TcpWindows
    last_s: float
    #: Not known before the kernel was asked.
    may_pace: bool = True
    #: `None` where its sender does not pace, and while it is in use.
    pacing: Pacing | None = None


class ConnectionTracker:
    """The kept connections of one replica.

    Parameters
    ----------
    keep_s:
        How long the pool keeps an idle one.
    idling_shrinks:
        Whether the kernel takes an idle connection's window away (`idling_shrinks`).
    look:
        Asks the kernel for what it tells of a connection whose sender paces. Without it none does.
    clock:
        Monotonic seconds.
    """

    def __init__(
        self,
        *,
        keep_s: float,
        idling_shrinks: bool,
        look: ReadTcpInfo = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._keep_s = keep_s
        self._shrinks = idling_shrinks
        self._read_tcp_info = look
        self._clock = clock
        self._sent: WeakKeyDictionary[PooledConnection, _LastUse] = WeakKeyDictionary()
        #: When each idle one was given back; the pool hands out the last.
        self._idle: OrderedDict[PooledConnection, float] = OrderedDict()
        self.reported: OnChange | None = None

    def on_acquire(self, link: PooledConnection, body_bytes: int) -> bool:
        """A request with such a body goes out on `link`. Answers whether it had served another before.

        Who is told of changes hears of this one by `tell`, in the same step, but behind the request's bytes.
        """
        now = self._clock()
        self._idle.pop(link, None)
        sent = self._sent.get(link)
        windows = TcpWindows() if sent is None else sent.windows
        if sent is not None and self._shrinks:
            left = cwnd_after_idle(windows.cwnd, now - sent.last_s, ASSUMED_RTT_S)
            windows = windows._replace(cwnd=left)
        may_pace = sent is None or sent.may_pace
        self._sent[link] = _LastUse(round_trips(body_bytes, windows)[1], now, may_pace)
        return sent is not None

    def on_release(self, link: PooledConnection) -> None:
        """`link` is idle, or closed."""
        self._idle[link] = self._clock()
        sent = self._sent[link]
        if not sent.may_pace:
            return
        found = self._read_tcp_info(link)
        if found is None:
            sent.may_pace = False
        else:
            sent.windows, sent.pacing = found

    def report(self) -> None:
        if self.reported is not None:
            self.reported(self.next())

    def next(self) -> NextConnectionState | None:
        """The connection that the next request takes, `None` if it has to open one."""
        now = self._clock()
        while self._idle and now - next(iter(self._idle.values())) > self._keep_s:
            self._idle.popitem(last=False)
        while self._idle:
            link = next(reversed(self._idle))
            if link.is_connected():
                sent = self._sent[link]
                shrinks = self._shrinks and sent.pacing is None
                return NextConnectionState(sent.windows, now - sent.last_s if shrinks else float("-inf"), sent.pacing)
            del self._idle[link]
        return None

    @property
    def alive(self) -> int:
        """Open ones, in use or not."""
        return sum(link.is_connected() for link in self._sent)


def idling_shrinks(settings: Path = _SETTINGS) -> bool:
    """Whether this kernel starts an idle connection over, if its sender does not pace: not with the sysctl off."""
    try:
        return (settings / "tcp_slow_start_after_idle").read_text().strip() != "0"
    except OSError:
        return True
