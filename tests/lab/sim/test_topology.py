"""A topology of several regions: clients with a way to their router, links by a matrix, and what a row then says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gorgo.errors import ConfigError, ScenarioError
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.lower_bound import lower_bound
from gorgo.lab.sim.network import Link, RandomTable, SimConnection
from gorgo.lab.sim.records import SimResult
from gorgo.lab.sim.routers import ONE_ROUTER, RouterGroup
from gorgo.lab.sim.scenarios import NetworkSettings, Scenario
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.topology import Clients, Topology
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.registry import make_policy
from tests.lab.sim.fleets import conversations, three_regions

FLEET = three_regions()
FEED = conversations(80, every_s=0.5)
MATRIX = {"us-ashburn": {"eu-frankfurt": 95.0, "ap-seoul": 180.0}, "eu-frankfurt": {"ap-seoul": 240.0}}
EVERYWHERE = {"us-ashburn": 1.0, "eu-frankfurt": 1.0, "ap-seoul": 2.0}
#: Without chance, so that times can be computed.
STILL = NetworkSettings(rtt_ms=MATRIX, jitter=0.0, spike_probability=0.0)
ONE = Scenario(network=STILL, routers=("us-ashburn",), clients=EVERYWHERE)
EACH = replace(ONE, routers=("us-ashburn", "eu-frankfurt", "ap-seoul"))


def topology_of(scenario: Scenario) -> Topology:
    assert scenario.topology is not None
    return scenario.topology


def run(
    scenario: Scenario, feed: Sequence[SimRequest] = FEED, policy: str = "gorgo-ms", fleet: SimFleet = FLEET
) -> SimResult:
    group = ONE_ROUTER.placed(scenario.topology)
    return Simulation(scenario.applied_to(fleet), make_policy(policy), seed=0, routers=group).run(feed)


def regions_of(topology: Topology) -> dict[str, str | None]:
    return {str(request.index): topology.region_of(request, seed=0) for request in FEED}


def test_a_matrix_is_the_same_both_client_trips_and_names_a_pair_that_it_lacks() -> None:
    topology = topology_of(ONE)
    assert topology.link_between("ap-seoul", "eu-frankfurt") == topology.link_between("eu-frankfurt", "ap-seoul")
    assert topology.link_between("eu-frankfurt", "eu-frankfurt").rtt_s == 0.002
    with pytest.raises(ScenarioError, match=r"network.rtt_ms: no round trip between 'us-ashburn' and 'sa-paulo'"):
        replace(ONE, clients={"sa-paulo": 1.0}).applied_to(FLEET)


def test_a_fleet_has_the_links_of_the_first_router_s_region() -> None:
    links = [replica.link.rtt_s for replica in EACH.applied_to(FLEET).replicas]
    assert links == [0.002, 0.095, 0.180]
    from_seoul = replace(ONE, routers=("ap-seoul",)).applied_to(FLEET)
    assert [replica.link.rtt_s for replica in from_seoul.replicas] == [0.180, 0.240, 0.002]


def test_a_session_s_clients_are_in_one_region_and_regions_have_their_shares() -> None:
    topology = topology_of(ONE)
    sessions = {(request.session_id, topology.region_of(request, seed=0)) for request in FEED}
    assert len(sessions) == len({request.session_id for request in FEED})
    drawn = [topology.region_of(replace(FEED[0], session_id=f"{number}"), seed=0) for number in range(4_000)]
    shares = {region: drawn.count(region) / len(drawn) for region in EVERYWHERE}
    assert shares == pytest.approx({"us-ashburn": 0.25, "eu-frankfurt": 0.25, "ap-seoul": 0.5}, abs=0.03)


def test_latencies_are_those_of_the_client_who_waits_for_both_its_trips() -> None:
    """A small request in a session that has a connection: half a round trip there, and half back."""
    first = SimRequest(index=0, arrival_s=0.0, prompt_tokens=600, output_tokens=3, blocks=b"", prefix_hash=0)
    first = replace(first, session_id="a", body_bytes=400)
    feed = [first, replace(first, index=1, arrival_s=20.0)]
    far = replace(ONE, clients={"ap-seoul": 1.0})
    beside = run(replace(ONE, clients={}), feed).records
    away = run(far, feed).records
    assert (away[1].ttft_ms or 0) - (beside[1].ttft_ms or 0) == pytest.approx(180.0)
    assert (away[1].e2e_s or 0) - (beside[1].e2e_s or 0) == pytest.approx(0.180)
    assert away[1].client_network_ms == pytest.approx(180.0)
    assert (away[0].ttft_ms or 0) - (beside[0].ttft_ms or 0) == pytest.approx(360.0), "it sets its connection up"
    assert [record.scheduled_s for record in away] == [0.0, 20.0]
    assert all(record.queued_s == 0.0 for record in away)


def test_with_a_router_in_each_region_clients_use_their_own_and_its_distances() -> None:
    topology = topology_of(EACH)
    assert [topology.router_of(region) for region in EVERYWHERE] == [0, 1, 2]
    result, places = run(EACH, policy="nearest"), regions_of(topology)
    assert all(record.region == places[record.id] for record in result.records)
    by_one = run(ONE, policy="nearest")
    assert {record.region for record in by_one.records} == {"us-ashburn"}


def test_records_are_in_the_order_in_which_clients_sent_them() -> None:
    for scenario in (ONE, EACH):
        records = run(scenario).records
        assert [record.id for record in records] == [str(request.index) for request in FEED]
        assert all(one.scheduled_s <= other.scheduled_s for one, other in pairwise(records))
        assert all((record.e2e_s or 0) + 1e-9 >= (record.ttft_ms or 0) / 1e3 > 0 for record in records)


def test_a_client_far_away_sends_its_next_turn_when_it_has_the_answer() -> None:
    first = replace(FEED[0], session_id="a", index=0, arrival_s=0.0)
    feed = [first, replace(first, index=1, arrival_s=9.0, after=0, think_s=5.0)]
    one, two = run(replace(ONE, clients={"ap-seoul": 1.0}), feed).records
    assert two.scheduled_s == pytest.approx((one.e2e_s or 0) + 5.0)


@pytest.mark.parametrize("scenario", [ONE, EACH, replace(EACH, network=replace(STILL, tcp_windows=False))])
@pytest.mark.parametrize("policy", ["gorgo-ms", "nearest"])
def test_nobody_is_below_the_floor_of_clients_far_away(scenario: Scenario, policy: str) -> None:
    floor = lower_bound(FEED, scenario.applied_to(FLEET), topology=scenario.topology, seed=0)
    for record, ttft_s, e2e_s in zip(run(scenario, policy=policy).records, floor.ttft_s, floor.e2e_s, strict=True):
        assert record.ttft_ms is not None
        assert record.e2e_s is not None
        assert record.ttft_ms >= ttft_s * 1e3 - 1e-6
        assert record.e2e_s >= e2e_s - 1e-9


def test_a_run_with_clients_far_away_is_repeated_by_its_seed() -> None:
    jittery = replace(EACH, network=replace(STILL, jitter=0.2))
    one, again = ([record.ttft_ms for record in run(jittery).records] for _ in range(2))
    assert one == again
    assert one != [record.ttft_ms for record in run(EACH).records]


def test_a_body_takes_the_time_of_the_bandwidth_and_no_flights_without_windows() -> None:
    link = Link(rtt_s=0.1, jitter=0.0, spike_probability=0.0)
    assert link.transfer_s(1_000_000) == 0.0
    assert replace(link, bytes_per_s=1e6).transfer_s(500_000) == 0.5

    class FakePath:
        def __init__(self, link: Link) -> None:
            self.link = link

    connection = SimConnection(FakePath(link))
    assert [connection.waits(500_000, now=now) for now in (0.0, 60.0)][1] > 2
    connection = SimConnection(FakePath(replace(link, tcp_windows=False)))
    assert [connection.waits(500_000, now=now) for now in (0.0, 60.0)] == [1, 0]


def test_without_windows_large_prompts_come_sooner_and_the_router_expects_it() -> None:
    large = [replace(request, arrival_s=20.0 * n, body_bytes=500_000) for n, request in enumerate(FEED[:9])]
    far, alone = replace(ONE, clients={}, routers=("ap-seoul",)), SimFleet(FLEET.replicas[:1])
    loose = replace(far, network=replace(STILL, tcp_windows=False))
    slow, fast = (np.array([one.ttft_ms for one in run(each, large, fleet=alone).records]) for each in (far, loose))
    assert min(slow - fast) >= 180.0, "a round trip more at least"
    errors = [abs((one.predicted_ttft_ms or 0) - (one.ttft_ms or 0)) for one in run(loose, large, fleet=alone).records]
    assert errors[0] < 1e-6, "the router counts no flight that is not there"


def test_routers_with_places_take_no_second_number_or_split() -> None:
    topology = topology_of(EACH)
    assert ONE_ROUTER.placed(topology).shells == 3
    assert RouterGroup(count=3, sharing="store").placed(topology).reports
    with pytest.raises(ConfigError, match="2 routers, and a scenario that has 3"):
        RouterGroup(count=2).placed(topology)
    for wrong in (RouterGroup(split="session"), RouterGroup(sharing="all")):
        with pytest.raises(ConfigError, match="routers with places"):
            wrong.placed(topology)


def test_requests_without_a_session_set_a_connection_up_each() -> None:
    clients = Clients(topology_of(replace(ONE, clients={"ap-seoul": 1.0})), RandomTable(0), seed=0)
    alone = replace(FEED[0], session_id=None, body_bytes=400)
    ways = [clients.start_trip(alone, now=now, key=0)[1].out_s for now in (0.0, 1.0)]
    assert ways == pytest.approx([0.27, 0.27])
    ways = [clients.start_trip(replace(alone, session_id="a"), now=now, key=0)[1].out_s for now in (0.0, 1.0)]
    assert ways == pytest.approx([0.27, 0.09])
