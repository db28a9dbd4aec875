"""The proxy's connections to one replica in virtual time: which one the next request takes, and what it can carry.

Owns the twin of `proxy.upstream.connection_state` and of the pool behind it. The connection used last is taken first;
an idle one stays for `REPLICA_KEEP_ALIVE_S`; `on_connection` of the Router gets each change. `links.SimConnection` is
the real state of a connection; the proxy's estimate of it stands beside, by the proxy's own rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gorgo.config.constants import ASSUMED_RTT_S, REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.tcp import TcpWindows, cwnd_after_idle, round_trips
from gorgo.core.messages.request import OpenConnection
from gorgo.sim.network.links import HasLink, SimConnection

OnChange = Callable[[OpenConnection | None], None]


class PooledSimConnection:
    """One connection, and what the proxy has noted of it."""

    __slots__ = ("connection", "lost", "released_s", "sent_s", "used", "windows")

    def __init__(self, path: HasLink) -> None:
        self.connection = SimConnection(path)
        self.windows = TcpWindows()
        self.sent_s = 0.0
        self.released_s = 0.0
        #: Had served another request before the latest one.
        self.used = False
        self.lost = False


class ConnectionPool:
    """Connections to one replica.

    Parameters
    ----------
    path:
        What they go over.
    told:
        Hears what the next request takes, whenever that changes.
    """

    def __init__(self, path: HasLink, told: OnChange) -> None:
        self._path = path
        self._tell = told
        self._idle: deque[PooledSimConnection] = deque()
        self._in_use: set[PooledSimConnection] = set()
        self._last_told: tuple[PooledSimConnection, float] | None = None

    def acquire(self, body_bytes: int, *, now: float) -> tuple[PooledSimConnection, int]:
        """The connection for a request with such a body, and the round trips that it waits before it is through."""
        self._discard(now)
        if self._idle:
            kept = self._idle.pop()
            kept.used = True
            left = cwnd_after_idle(kept.windows.cwnd, now - kept.sent_s, ASSUMED_RTT_S)
            if left != kept.windows.cwnd:
                kept.windows = kept.windows._replace(cwnd=left)
        else:
            kept = PooledSimConnection(self._path)
        if body_bytes:  # A ping opens no window.
            kept.windows = round_trips(body_bytes, kept.windows)[1]
        kept.sent_s = now
        self._in_use.add(kept)
        self._report_next()
        return kept, kept.connection.waits(body_bytes, now=now)

    def release(self, kept: PooledSimConnection, *, now: float) -> None:
        """Its answer was read to the end. A connection that was lost meanwhile is not kept."""
        self._in_use.discard(kept)
        if kept.lost:
            return
        self._discard(now)
        kept.released_s = now
        self._idle.append(kept)
        self._report_next()

    def close(self, kept: PooledSimConnection) -> None:
        """The proxy gave its answer up."""
        kept.lost = True
        self._in_use.discard(kept)

    def lose_all(self) -> None:
        """The replica has reset all of them."""
        for kept in self._in_use:
            kept.lost = True
        self._in_use.clear()
        self._idle.clear()
        self._report_next()

    def _discard(self, now: float) -> None:
        while self._idle and now - self._idle[0].released_s > REPLICA_KEEP_ALIVE_S:
            self._idle.popleft()

    def _report_next(self) -> None:
        told = None
        if self._idle:
            kept = self._idle[-1]
            told = kept, kept.sent_s
        # A connection's windows change only with a request on it, so with its time.
        if told != self._last_told:
            self._last_told = told
            self._tell(None if told is None else OpenConnection(told[0].windows, told[1]))
