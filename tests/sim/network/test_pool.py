"""The simulated pool against the proxy's own mirror of its connections, on random traffic."""

from __future__ import annotations

from typing import Any

import numpy as np

from gorgo.config.constants import REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.tcp import TcpWindows
from gorgo.core.messages.request import OpenConnection
from gorgo.live.upstream.connection_state import ConnectionTracker
from gorgo.sim.network.links import Link, Path
from gorgo.sim.network.pool import ConnectionPool, PooledSimConnection


class Wire:
    """A connection as the proxy's pool has it."""

    def is_connected(self) -> bool:
        return True


def test_the_router_is_told_what_the_proxy_would_tell_it() -> None:
    rng = np.random.default_rng(1)
    now = 0.0
    told: list[Any] = [None]
    theirs: list[Any] = [None]
    path = Path(Link(rtt_s=0.1), np.random.default_rng(0))
    pool = ConnectionPool(path, told.append)
    twin = ConnectionTracker(keep_alive_s=REPLICA_KEEP_ALIVE_S, idling_shrinks=True, clock=lambda: now)
    twin.on_change = lambda found: theirs.append(None if found is None else OpenConnection(found[0], now - found[1]))
    idle: list[Wire] = []
    in_use: list[tuple[PooledSimConnection, Wire]] = []
    for _ in range(2000):
        now += float(rng.exponential(0.4))
        if in_use and rng.random() < 0.5:
            kept, wire = in_use.pop(int(rng.integers(len(in_use))))
            pool.release(kept, now=now)
            twin.on_release(wire)
            twin.report()
            idle.append(wire)
        else:
            body_bytes = int(rng.integers(0, 200_000))
            kept, waits = pool.acquire(body_bytes, now=now)
            found = twin.next()
            wire = idle.pop() if found is not None else Wire()
            assert twin.on_acquire(wire, body_bytes) == kept.used == (found is not None)
            twin.report()
            assert waits >= (0 if kept.used else 1)
            in_use.append((kept, wire))
        assert _same(told[-1], theirs[-1])
    assert len({each.windows for each in told if each is not None}) > 50


def _same(one: OpenConnection | None, other: OpenConnection | None) -> bool:
    if one is None or other is None:
        return one == other
    return one.windows == other.windows and abs(one.sent_s - other.sent_s) < 1e-9


def test_the_connection_used_last_goes_first_and_an_idle_one_is_let_go() -> None:
    pool = ConnectionPool(Path(Link(rtt_s=0.1), np.random.default_rng(0)), lambda _: None)
    one, _ = pool.acquire(0, now=0.0)
    two, _ = pool.acquire(0, now=0.0)
    pool.release(one, now=1.0)
    pool.release(two, now=2.0)
    assert pool.acquire(0, now=3.0)[0] is two
    assert not pool.acquire(0, now=5.5)[0].used, "the other one has been idle for more than 4 s"


def test_an_idle_connection_is_kept_for_four_seconds_and_no_longer() -> None:
    for idle_s, used in ((4.0, True), (4.01, False)):
        pool = ConnectionPool(Path(Link(rtt_s=0.1), np.random.default_rng(0)), lambda _: None)
        one, _ = pool.acquire(0, now=0.0)
        pool.release(one, now=10.0)
        assert pool.acquire(0, now=10.0 + idle_s)[0].used is used


def test_the_router_hears_of_a_connection_that_is_given_back_taken_and_let_go() -> None:
    told: list[Any] = []
    pool = ConnectionPool(Path(Link(rtt_s=0.1), np.random.default_rng(0)), told.append)
    one, waits = pool.acquire(100_000, now=1.0)
    assert (waits, told) == (3, []), "a handshake and two flights more; that none is open is known"
    pool.release(one, now=1.5)
    assert told == [OpenConnection(TcpWindows(114_600.0, 65_535.0), 1.0)]
    again, waits = pool.acquire(0, now=1.7)
    assert (again is one, waits, told[1:]) == (True, 0, [None])
    pool.release(one, now=4.0)
    assert told[2:] == [OpenConnection(TcpWindows(28_650.0, 65_535.0), 1.7)], "0.7 s idle at 0.3 s each: two halvings"
    other, _ = pool.acquire(0, now=9.0)
    assert (other.used, told[3:]) == (False, [None])


def test_a_connection_that_was_given_up_is_not_used_again() -> None:
    pool = ConnectionPool(Path(Link(rtt_s=0.1), np.random.default_rng(0)), lambda _: None)
    one, _ = pool.acquire(0, now=0.0)
    pool.close(one)
    pool.release(one, now=0.1)
    assert one.lost
    fresh, waits = pool.acquire(0, now=0.2)
    assert (fresh is one, fresh.used, waits) == (False, False, 1)


def test_connections_that_were_reset_are_not_kept_and_not_told() -> None:
    told: list[Any] = []
    pool = ConnectionPool(Path(Link(rtt_s=0.1), np.random.default_rng(0)), told.append)
    busy, _ = pool.acquire(0, now=0.0)
    idle, _ = pool.acquire(0, now=0.0)
    pool.release(idle, now=0.1)
    assert told[-1] == OpenConnection(TcpWindows(), 0.0)
    pool.lose_all()
    pool.release(busy, now=0.2)
    assert told[-1] is None
    assert not pool.acquire(0, now=0.3)[0].used
