from __future__ import annotations

import numpy as np
import pytest

from gorgo.sim.network import Connection, Link, Network, Path


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
    connection = Connection(path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)))
    delays = [connection.request_s(100_000, now=now) for now in (0.0, 0.2, 0.4, 10.0)]
    # A handshake and three flights, two until the receiver has opened its window too, one; three after idling.
    assert delays == pytest.approx([0.35, 0.15, 0.05, 0.25])


def test_a_ping_takes_one_trip_on_an_open_connection() -> None:
    connection = Connection(path(Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)))
    assert [connection.request_s(0, now=now) for now in (0.0, 60.0)] == pytest.approx([0.15, 0.05])


def test_nothing_overtakes_on_one_stream() -> None:
    far = path(Link(rtt_s=0.1, jitter=0.5))
    arrival_s, arrivals = 0.0, []
    for number in range(1_000):
        arrival_s = far.arrival_s(number * 0.001, arrival_s)
        arrivals.append(arrival_s)
    assert arrivals == sorted(arrivals)


def test_no_distance_takes_no_time() -> None:
    here = path(Link(rtt_s=0.0))
    assert here.request_s(new_connection=True) == 0.0


def test_a_network_is_symmetric_and_names_a_missing_pair() -> None:
    network = Network({("us", "eu"): Link(rtt_s=0.095)}, local_rtt_s=0.001)
    assert network.link("us", "eu") == network.link("eu", "us")
    assert network.link("eu", "eu").rtt_s == 0.001
    with pytest.raises(KeyError, match="no link between 'us' and 'asia'"):
        network.link("us", "asia")
