"""The proxy's connections to one replica in virtual time: which one the next request takes, and what it can carry.

Owns the twin of `live.upstream.connection_state` and of the pool behind it. The last used connection is taken first;
an idle one stays for `REPLICA_KEEP_ALIVE_S`; `on_connection` of the Router gets each change. `links.SimConnection` is
the real state of a connection; the proxy's estimate follows the rule of the proxy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gorgo.config.constants import ASSUMED_RTT_S, REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.tcp import TcpWindows, windows_after_request
from gorgo.core.messages.request import OpenConnection
from gorgo.sim.network.links import HasLink, SimConnection

OnChange = Callable[[OpenConnection | None], None]


class PooledSimConnection:
    """One connection, and the proxy's estimate of it."""

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
        The network path.
    on_change:
        Called with the connection that the next request takes, whenever it changes.
    """

    def __init__(self, path: HasLink, on_change: OnChange) -> None:
        self._path = path
        self._on_change = on_change
        self._idle: deque[PooledSimConnection] = deque()
        self._in_use: set[PooledSimConnection] = set()
        self._last_reported: tuple[PooledSimConnection, float] | None = None

    def acquire(self, body_bytes: int, *, now: float) -> tuple[PooledSimConnection, int]:
        """The connection for a request with such a body, and the round trips that it waits before it is through."""
        self._discard(now)
        if self._idle:
            pooled = self._idle.pop()
            pooled.used = True
        else:
            pooled = PooledSimConnection(self._path)
            pooled.sent_s = now
        idle_s = now - pooled.sent_s
        pooled.windows = windows_after_request(pooled.windows, body_bytes, idle_s=idle_s, rtt_s=ASSUMED_RTT_S)
        pooled.sent_s = now
        self._in_use.add(pooled)
        self._report_next()
        return pooled, pooled.connection.waits(body_bytes, now=now)

    def release(self, pooled: PooledSimConnection, *, now: float) -> None:
        """Return a connection after its answer; a lost one is dropped."""
        self._in_use.discard(pooled)
        if pooled.lost:
            return
        self._discard(now)
        pooled.released_s = now
        self._idle.append(pooled)
        self._report_next()

    def close(self, pooled: PooledSimConnection) -> None:
        """The proxy gave its answer up."""
        pooled.lost = True
        self._in_use.discard(pooled)

    def lose_all(self) -> None:
        """The replica has reset all of them."""
        for pooled in self._in_use:
            pooled.lost = True
        self._in_use.clear()
        self._idle.clear()
        self._report_next()

    def _discard(self, now: float) -> None:
        while self._idle and now - self._idle[0].released_s > REPLICA_KEEP_ALIVE_S:
            self._idle.popleft()

    def _report_next(self) -> None:
        state = None
        if self._idle:
            pooled = self._idle[-1]
            state = pooled, pooled.sent_s
        # A connection's windows change only with a request on it, so with its time.
        if state != self._last_reported:
            self._last_reported = state
            self._on_change(None if state is None else OpenConnection(state[0].windows, state[1]))
