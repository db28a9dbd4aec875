from __future__ import annotations

import numpy as np
import pytest

from gorgo.sim.network import links
from gorgo.sim.network.links import TABLE_SIZE, Link, Network, Path, RandomTable, SimConnection, TripDelays


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


def test_a_network_is_symmetric_and_names_a_missing_pair() -> None:
    network = Network({("us", "eu"): Link(rtt_s=0.095)}, local_rtt_s=0.001)
    assert network.link("us", "eu") == network.link("eu", "us")
    assert network.link("eu", "eu").rtt_s == 0.001
    with pytest.raises(KeyError, match="no link between 'us' and 'asia'"):
        network.link("us", "asia")


def test_the_tables_and_the_jitter_of_links_are_as_the_replays_have_them() -> None:
    assert (links.JITTER, links._DRAWS, TABLE_SIZE, links._STRIDE) == (0.02, 2048, 65_536, 40_503)


def test_a_link_without_spikes_has_none_whatever_is_drawn() -> None:
    draws = RandomTable(0)
    draws.uniform = [0.0] * TABLE_SIZE
    assert TripDelays(draws, 0).one_way_s(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)) == 0.05
