""""""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gorgo.config.values import REPLICA_KEEP_ALIVE_S
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.messages.request import OpenConnection
from gorgo.lab.sim import network as links
from gorgo.lab.sim.network import (
    TABLE_SIZE,
    ConnectionPool,
    Link,
    Path,
    PooledSimConnection,
    RandomTable,
    SimConnection,
    TripDelays,
)
from gorgo.live.upstream.connection import ConnectionTracker


def path(link: Link, seed: int = 0) -> Path:
    return Path(link, np.random.default_rng(seed))


def test_trips_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    link = Link(rtt_s=0.1)
    one, same, other = path(link), path(link), path(link, seed=1)
    trips = [one.one_way_s() for _ in range(5_000)]
    assert trips == [same.one_way_s() for _ in range(5_000)]
    assert trips != [other.one_way_s() for _ in range(5_000)]


def test_mean_trip_is_half_the_rtt_and_the_jitter() -> None:
    far = path(Link(rtt_s=0.1, jitter=0.05, spike_probability=0.0))
    trips = [far.one_way_s() for _ in range(20_000)]
    assert min(trips) >= 0.05
    assert np.mean(trips) == pytest.approx(0.055, rel=0.01)


def test_spikes_are_rare_and_cost_a_round_trip() -> None:
    far = path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.01))
    trips = np.array([far.one_way_s() for _ in range(20_000)])
    assert set(np.round(trips, 9)) == {0.05, 0.15}
    assert 0.005 < (trips > 0.1).mean() < 0.02


def test_a_new_connection_costs_one_round_trip_more() -> None:
    far = path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0))
    assert far.request_s(new_connection=True) - far.request_s(new_connection=False) == pytest.approx(0.1)


def test_a_large_body_takes_a_round_trip_per_flight_until_its_connection_is_warm() -> None:
    connection = SimConnection(path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)))
    delays = [connection.request_s(100_000, now=now) for now in (0.0, 0.2, 0.4, 10.0)]
    # A handshake and three flights, two until the receiver has opened its window too, one; three after idling.
    assert delays == pytest.approx([0.35, 0.15, 0.05, 0.25])


def test_a_ping_takes_one_trip_on_an_open_connection() -> None:
    connection = SimConnection(path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)))
    assert [connection.request_s(0, now=now) for now in (0.0, 60.0)] == pytest.approx([0.15, 0.05])


def test_nothing_overtakes_on_one_stream() -> None:
    far = path(Link(rtt_s=0.1, jitter=0.5))
    arrival_s, arrivals = 0.0, []
    for number in range(1_000):
        arrival_s = far.arrival_s(number * 0.001, arrival_s)
        arrivals.append(arrival_s)
    assert arrivals == sorted(arrivals)


def test_bytes_of_a_stream_arrive_a_trip_later_or_with_the_ones_before() -> None:
    far = path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0))
    assert [far.arrival_s(1.0, 0.0), far.arrival_s(1.0, 9.0)] == [1.05, 9.0]


@pytest.mark.parametrize(
    ("new", "trips", "seconds"), [(False, 1, 0.05), (True, 1, 0.15), (False, 3, 0.25), (True, 3, 0.35)]
)
def test_each_flight_but_the_last_and_a_handshake_take_a_round_trip(new: bool, trips: int, seconds: float) -> None:
    far = path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0))
    assert far.request_s(new_connection=new, body_round_trips=trips) == pytest.approx(seconds)


def test_a_trip_of_a_run_takes_half_a_round_trip_its_own_jitter_and_a_rare_spike() -> None:
    """An exponential of 5 % of the round trip, and a whole one more in a hundredth of trips."""
    link, draws = Link(rtt_s=0.2, jitter=0.05, spike_probability=0.01), RandomTable(3)
    trips = np.array([TripDelays(draws, key).one_way_s(link) for key in range(20_000)])
    spiked = trips > 0.1 + 0.2
    assert spiked.mean() == pytest.approx(0.01, abs=0.004)
    assert (trips[~spiked].min(), trips[~spiked].mean()) == pytest.approx((0.1, 0.11), rel=0.01)
    assert (trips[spiked] - 0.2).mean() == pytest.approx(0.11, rel=0.05)
    twice = Link(rtt_s=0.4, jitter=0.05, spike_probability=0.01)
    assert TripDelays(draws, 5).one_way_s(twice) == pytest.approx(2 * TripDelays(draws, 5).one_way_s(link)), "it scales"


def test_each_trip_of_a_key_takes_the_next_entry_and_neighbours_have_others() -> None:
    link, draws = Link(rtt_s=0.1), RandomTable(0)
    one, other = TripDelays(draws, 4), TripDelays(draws, 5)
    first = [one.one_way_s(link) for _ in range(50)]
    assert len(set(first)) == 50
    assert not set(first) & {other.one_way_s(link) for _ in range(50)}
    again = TripDelays(draws, 4)
    assert again.round_trip_s(link) == first[0] + first[1]
    assert (again.uniform(), again.one_way_s(link)) == (draws.uniform[(4 * 40_503 + 2) % TABLE_SIZE], first[3])


def test_the_table_of_draws_begins_again_at_its_end() -> None:
    link, draws = Link(rtt_s=0.1), RandomTable(0)
    trips = TripDelays(draws, 0)
    taken = [trips.one_way_s(link) for _ in range(TABLE_SIZE + 2)]
    assert taken[:2] == taken[-2:]
    assert RandomTable(0).uniform == draws.uniform != RandomTable(1).uniform


def test_pings_open_no_window_and_idling_closes_one() -> None:
    """60 kB: three flights after pings, two of them 58,400 bytes and the rest, one, and three after a minute."""
    connection = SimConnection(path(Link(rtt_s=0.1)))
    sizes_and_times = [(0, 0.0), (0, 0.1), (60_000, 0.2), (60_000, 0.3), (60_000, 0.4), (60_000, 60.0)]
    waits = [connection.waits(size, now=now) for size, now in sizes_and_times]
    assert waits == [1, 0, 2, 1, 0, 2]


def test_no_distance_takes_no_time() -> None:
    here = path(Link(rtt_s=0.0))
    assert here.request_s(new_connection=True) == 0.0


def test_the_tables_and_the_jitter_of_links_are_as_the_replays_have_them() -> None:
    assert (links.JITTER, links._DRAWS, TABLE_SIZE, links._STRIDE) == (0.02, 2048, 65_536, 40_503)


def test_a_link_without_spikes_has_none_whatever_is_drawn() -> None:
    draws = RandomTable(0)
    draws.uniform = [0.0] * TABLE_SIZE
    assert TripDelays(draws, 0).one_way_s(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)) == 0.05


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
