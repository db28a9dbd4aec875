"""The network of a simulation: round trips between regions, and the proxy's connections to a replica.

Owns one-way delays, the order of what travels on one stream, and the pool of connections in virtual time. The simulated
engine adds delays in wall time, the simulator in virtual time. All delays are from one seed.

Theory of operation. A one-way trip takes half of the mean RTT, plus an exponential with mean `jitter` x RTT, plus, once
in `1 / spike_probability` trips, a whole RTT more: a lost segment that the ones behind it make the sender repeat.
Setting up a connection costs one round trip (`connect_s`) before the first request on it can leave. A body larger than
the connection's window leaves in flights a round trip apart (`core.latency.ttft`); a `SimConnection` remembers its
windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from types import MappingProxyType
from typing import Protocol

import numpy as np

from gorgo.config.values import ASSUMED_RTT_S, REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.ttft import LARGEST_WINDOW_BYTES, TcpWindows, exchange, windows_after_request
from gorgo.core.messages.request import AttemptResult, OpenConnection, Outcome

#: Of a field that came after runs were stored: their digests are of the other fields, so it counts where it is set.
LATER: Mapping[str, bool] = MappingProxyType({"later": True})
#: Of a connection whose windows bound nothing.
OPEN_WINDOWS = TcpWindows(LARGEST_WINDOW_BYTES, LARGEST_WINDOW_BYTES)
#: Mean jitter of a one-way trip as a share of the RTT: 2 ms on 100 ms.
JITTER = 0.02
#: Delays per draw: a single draw costs 20 times as much.
_DRAWS = 2048
#: Entries of a run's table of draws: as many as a window of 7,000 requests uses, so that few are used twice. 4 MB.
TABLE_SIZE = 1 << 16
#: Between the places of two neighbouring keys; odd, so that every key has a place of its own.
_STRIDE = 40_503


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Mean properties of the network between two places.

    Parameters
    ----------
    rtt_s:
        Mean round trip without jitter.
    jitter:
        Mean of the exponential added to each one-way trip, as a share of the RTT.
    spike_probability:
        Share of one-way trips that take an RTT more.
    bytes_per_s:
        At which the body of a request is sent, whatever else is on its way. None: no body takes time.
    tcp_windows:
        Whether a body waits for the windows of its connection.
    """

    rtt_s: float
    jitter: float = JITTER
    spike_probability: float = 1e-4
    bytes_per_s: float | None = field(default=None, metadata=LATER)
    tcp_windows: bool = field(default=True, metadata=LATER)

    def __post_init__(self) -> None:
        assert min(self.rtt_s, self.jitter) >= 0, "no trip takes less than nothing"
        assert 0 <= self.spike_probability <= 1, "a probability"

    def transfer_s(self, body_bytes: int) -> float:
        """Return the time in which a body leaves, s."""
        return 0.0 if self.bytes_per_s is None else body_bytes / self.bytes_per_s


class Path:
    """The trips over one link, in the order of the draws.

    Example
    -------
    >>> path = Path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0), np.random.default_rng(0))
    >>> path.one_way_s(), path.request_s(new_connection=True)
    (0.05, 0.15000000000000002)
    """

    def __init__(self, link: Link, rng: np.random.Generator) -> None:
        self.link = link
        self._rng = rng
        self._drawn: list[float] = []

    def one_way_s(self) -> float:
        """How long one trip in either direction takes."""
        if not self.link.rtt_s:
            return 0.0
        if not self._drawn:
            self._drawn = self._draw()
        return self._drawn.pop()

    def connect_s(self) -> float:
        """The round trip that sets up a connection."""
        return self.one_way_s() + self.one_way_s()

    def request_s(self, *, new_connection: bool, body_round_trips: int = 1) -> float:
        """From the client's send to the engine's receipt of the last byte."""
        waits = body_round_trips - 1 + new_connection
        return self.one_way_s() + sum(self.connect_s() for _ in range(waits))

    def arrival_s(self, sent_s: float, last_arrival_s: float) -> float:
        """Return the arrival time of data sent now, never before that of earlier data on the same stream."""
        return max(last_arrival_s, sent_s + self.one_way_s())

    def _draw(self) -> list[float]:
        link = self.link
        trips = link.rtt_s / 2 + self._rng.exponential(link.jitter * link.rtt_s, _DRAWS)
        trips += link.rtt_s * (self._rng.random(_DRAWS) < link.spike_probability)
        drawn: list[float] = trips.tolist()
        return drawn


class RandomTable:
    """Random numbers of a simulated run, by key and number of the trip rather than by the order of calls.

    With common random numbers two policies can be compared on one seed: the jitter that a request meets is the same
    whatever was sent where before it, and scales with the link that it takes.

    Example
    -------
    >>> link, draws = Link(rtt_s=0.1), RandomTable(seed=0)
    >>> first, again = TripDelays(draws, key=7), TripDelays(draws, key=7)
    >>> first.one_way_s(link) == again.one_way_s(link), 0.05 <= first.one_way_s(link) < 0.1
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0x6E6574])
        self.exponential: list[float] = rng.exponential(1.0, TABLE_SIZE).tolist()
        self.uniform: list[float] = rng.random(TABLE_SIZE).tolist()


@lru_cache(maxsize=2)
def random_table(seed: int) -> RandomTable:
    """Return the table of `seed`, which nothing changes: runs of one process share it."""
    return RandomTable(seed)


class TripDelays:
    """One key's way through the table: each trip takes the next entry."""

    __slots__ = ("_at", "_draws")

    def __init__(self, draws: RandomTable, key: int) -> None:
        self._draws = draws
        self._at = key * _STRIDE % TABLE_SIZE

    def one_way_s(self, link: Link) -> float:
        at = self._at
        self._at = (at + 1) % TABLE_SIZE
        share = 0.5 + link.jitter * self._draws.exponential[at]
        if self._draws.uniform[at] < link.spike_probability:
            share += 1.0
        return link.rtt_s * share

    def round_trip_s(self, link: Link) -> float:
        return self.one_way_s(link) + self.one_way_s(link)

    def out_s(self, link: Link, waits: int) -> float:
        """From the first byte's departure to the last one's arrival, behind so many round trips, s."""
        seconds = self.one_way_s(link)
        for _ in range(waits):
            seconds += self.round_trip_s(link)
        return seconds

    def uniform(self) -> float:
        """A number in [0, 1) that no trip depends on."""
        at = self._at
        self._at = (at + 1) % TABLE_SIZE
        return self._draws.uniform[at]


class HasLink(Protocol):
    """Whatever a connection goes over."""

    @property
    def link(self) -> Link: ...


class SimConnection:
    """One connection over a path, with its window.

    Example
    -------
    >>> path = Path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0), np.random.default_rng(0))
    >>> connection = SimConnection(path)
    >>> [round(connection.request_s(40_000, now=now), 3) for now in (0.0, 0.2, 9.0)]  # new, warm, idle
    [0.25, 0.05, 0.15]
    """

    def __init__(self, path: HasLink) -> None:
        self._path = path
        self._windows = TcpWindows()
        self._sent_s: float | None = None

    def request_s(self, body_bytes: int, *, now: float) -> float:
        """How long a request with such a body takes to reach the engine; the first one sets the connection up."""
        assert isinstance(self._path, Path), "a path that draws its own delays"
        new = self._sent_s is None
        return self._path.request_s(new_connection=new, body_round_trips=1 + self.waits(body_bytes, now=now) - new)

    def waits(self, body_bytes: int, *, now: float) -> int:
        """Round trips that a request with such a body waits for before its last flight leaves, set-up included."""
        sent_s, self._sent_s = self._sent_s, now
        new = sent_s is None
        if not self._path.link.tcp_windows:
            return int(new)
        idle_s = 0.0 if sent_s is None else now - sent_s
        trips, self._windows = exchange(self._windows, body_bytes, idle_s=idle_s, rtt_s=self._path.link.rtt_s)
        return trips - 1 + new


def error_outcome(status: int) -> Outcome:
    """Return the outcome of an error status, as the proxy judges it."""
    error = f"status_{status}"
    if status in (429, 503):
        return Outcome(AttemptResult.BUSY, status=status, error=error)
    if status < 500:
        return Outcome(AttemptResult.UPSTREAM_4XX, status=status, unsent=True)
    return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=status, error=error)


# The proxy's connections to one replica in virtual time: which one the next request takes, and what it can carry.
#
# It is the twin of `live.upstream.connection` and of the pool behind it. The last used connection is taken first;
# an idle one stays for `REPLICA_KEEP_ALIVE_S`; `on_connection` of the Router gets each change. `SimConnection` is the
# real state of a connection; the proxy's estimate follows the rule of the proxy.


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
        if self._path.link.tcp_windows:
            idle_s = now - pooled.sent_s
            pooled.windows = windows_after_request(pooled.windows, body_bytes, idle_s=idle_s, rtt_s=ASSUMED_RTT_S)
            pooled.sent_s = now
        else:
            pooled.windows, pooled.sent_s = OPEN_WINDOWS, inf  # as the Router has it where idling costs nothing
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
