"""Several routers of one fleet in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from gorgo.errors import ConfigError, ScenarioError
from gorgo.lab.sim.engine.driver import SimAttempt
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.lower_bound import lower_bound
from gorgo.lab.sim.network import Link, RandomTable, SimConnection, TripDelays
from gorgo.lab.sim.oracle import make_oracle
from gorgo.lab.sim.records import SimResult
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.routers import ONE_ROUTER, FirstTokenTimeouts, RouterGroup
from gorgo.lab.sim.scenarios import NetworkSettings, Scenario
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.topology import Clients, Topology
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.registry import make_policy
from tests.lab.sim.fleets import conversations, three_regions

FEED = conversations(400, every_s=0.12, users=40)


def simulation(policy: str = "gorgo-ms", *, near: bool = False, **changes: Any) -> Simulation:
    fleet = three_regions(a=0.002, b=0.002, c=0.002) if near else three_regions()
    group = RouterGroup(**{"count": 4, **changes})
    return Simulation(fleet, make_oracle() if policy == "oracle" else make_policy(policy), seed=0, routers=group)


def hit(result: SimResult) -> float:
    cached = [record.cached_tokens or 0 for record in result.records]
    return sum(cached) / sum(record.input_tokens for record in result.records)


def check(run: Simulation) -> None:
    for shell in run.shells:
        shell.router.check()
        assert shell.router.in_flight == 0
        assert {row.in_flight_tokens for row in shell.router.view.snapshots(now=0.0)} == {0}


def test_routers_over_one_set_of_engines_serve_every_request_once() -> None:
    run = simulation(sharing="store", loss=0.2)
    result = run.run(FEED)
    check(run)
    assert [record.id for record in result.records] == [str(request.index) for request in FEED]
    assert {record.status for record in result.records} == {200}
    served = [len(shell.router.view.newest_decisions(len(FEED))) for shell in run.shells]
    assert min(served) > 60
    assert sum(served) == len(FEED)


@pytest.mark.parametrize("sharing", [pytest.param("store", marks=pytest.mark.system), "local"])
def test_reports_give_routers_the_hit_of_one_that_sees_all(sharing: str) -> None:
    """Of three feeds: one decision that differs moves the hits of one feed by up to a point either way."""
    feeds = [conversations(400, every_s=0.12, users=40, seed=seed) for seed in range(3)]
    alone, shared, one = (
        np.mean([hit(simulation(near=True, sharing=each).run(feed)) for feed in feeds])
        for each in ("none", sharing, "all")
    )
    assert alone < one - 0.1
    assert shared > one - 0.01


def test_workers_of_one_machine_report_every_10_ms_and_routers_with_a_store_every_100() -> None:
    local, store = RouterGroup(count=2, sharing="local"), RouterGroup(count=2, sharing="store")
    assert (local.interval_s, local.report_delay_s) == (0.01, 0.001)
    assert (store.interval_s, store.report_delay_s) == (0.1, 0.005)
    assert RouterGroup(count=2, sharing="local", delay_s=0.25).report_delay_s == 0.25
    sent = []
    for sharing in ("local", "store"):
        run = simulation(count=2, sharing=sharing)
        run.run(FEED[:100])
        assert run.store is not None
        sent.append(run.store.reports)
    assert sent[0] > sent[1], "a router without news does not report"


def test_one_router_that_sees_all_decides_as_a_router_without_a_group() -> None:
    single = Simulation(three_regions(), make_policy("gorgo-ms"), seed=0).run(FEED)
    grouped = simulation(count=8, sharing="all").run(FEED)
    assert [record.as_json() for record in grouped.records] == [record.as_json() for record in single.records]


def test_a_run_with_a_store_is_the_same_every_time() -> None:
    runs = [simulation(sharing="store", loss=0.3).run(FEED[:200]) for _ in range(2)]
    assert [record.as_json() for record in runs[0].records] == [record.as_json() for record in runs[1].records]


def test_policies_with_a_state_are_one_per_router() -> None:
    run = simulation("multi-depth", sharing="store")
    run.run(FEED[:100])
    assert len({id(shell.router.settings.policy) for shell in run.shells}) == 4
    check(run)


def test_the_oracle_of_each_router_sees_the_engines_from_there() -> None:
    result = simulation("oracle", split="region", count=3).run(FEED[:60])
    assert {record.status for record in result.records} == {200}
    assert {record.region for record in result.records} == {"us-ashburn", "eu-frankfurt", "ap-seoul"}


def test_routers_of_three_regions_serve_their_own_region_first() -> None:
    idle = conversations(60, every_s=2.0, users=40)
    run = simulation(split="region", count=3)
    result = run.run(idle)
    homes = {"us-ashburn": 0, "eu-frankfurt": 1, "ap-seoul": 2}
    group = RouterGroup(count=3, split="region")
    served_at_home = [
        homes[record.region or ""] == group.router_of(request, seed=0)
        for request, record in zip(idle, result.records, strict=True)
    ]
    assert np.mean(served_at_home) > 0.8


def test_the_store_counts_reports_and_their_bytes() -> None:
    run = simulation(sharing="store")
    result = run.run(FEED[:100])
    assert run.store is not None
    # Twice a second if nothing has changed, at most ten times and once per long prefill.
    assert 2 * 4 * (result.ended_s - 1.0) < run.store.reports < 10 * 4 * result.ended_s + 100
    assert run.store.bytes > 50 * run.store.reports


def test_a_router_that_is_killed_fails_its_requests_and_releases_its_engines() -> None:
    run = simulation(sharing="store", count=2)
    killed_s = FEED[200].arrival_s + 0.01
    run.kernel.at(killed_s, lambda: run.replace_router(0))
    result = run.run(FEED)
    check(run)
    broken = [record for record in result.records if record.error == "router_killed"]
    assert broken
    assert all(record.scheduled_s <= killed_s <= record.scheduled_s + (record.e2e_s or 0.0) for record in broken)
    others = [record for record in result.records if record.error is None]
    assert {record.status for record in others} == {200}
    assert all(site.model.running == site.model.queued == 0 for site in run.engines.values())


@pytest.mark.parametrize("sharing", ["none", "store"])
def test_a_new_router_knows_what_the_store_has(sharing: str) -> None:
    run = simulation(sharing=sharing, count=1)
    known: list[int] = []

    def replace() -> None:
        run.replace_router(0)
        peers = run.router.peers.exchange
        known.append(0 if peers is None else len(peers.prefixes))

    run.kernel.at(FEED[200].arrival_s, replace)
    run.run(FEED)
    check(run)
    assert (known[0] > 100) == (sharing == "store")


def test_a_replica_that_one_router_ejects_is_probed_by_the_others() -> None:
    run = simulation(sharing="store", count=2)
    probed: list[float] = []
    port = run.shells[1].ports["ap-seoul-0"][1]
    probe = port.background.probe

    def record() -> None:
        probed.append(run.kernel.now)
        probe()

    port.background.probe = record  # type: ignore[method-assign]

    def eject() -> None:
        for _ in range(3):
            run.shells[0].on_probe("ap-seoul-0", None)

    run.kernel.at(5.0, eject)
    run.run(FEED)
    assert [at for at in probed if 5.0 < at < 5.2]


def test_reports_of_caches_are_for_one_router() -> None:
    with pytest.raises(ConfigError, match="expected none or usage"):
        Simulation(
            three_regions(), make_policy("gorgo-ms"), seed=0, cache_reports="events", routers=RouterGroup(count=2)
        )


def test_an_empty_feed_ends_at_once() -> None:
    feed: list[SimRequest] = []
    assert simulation(sharing="store").run(feed).records == []


# group


GROUP_FEED = conversations(300, every_s=0.1)


def test_random_requests_are_spread_evenly_and_alike_for_one_seed() -> None:
    group = RouterGroup(count=4)
    counts = Counter(group.router_of(request, seed=0) for request in GROUP_FEED)
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 50
    again = [group.router_of(request, seed=0) for request in GROUP_FEED]
    assert again == [group.router_of(request, seed=0) for request in GROUP_FEED]
    assert again != [group.router_of(request, seed=1) for request in GROUP_FEED]


def test_a_session_stays_with_its_router() -> None:
    group = RouterGroup(count=4, split="session")
    routers = {(request.session_id, group.router_of(request, seed=index)) for index, request in enumerate(GROUP_FEED)}
    assert len(routers) == len({request.session_id for request in GROUP_FEED})


def test_one_router_that_sees_all_gets_every_request() -> None:
    group = RouterGroup(count=8, sharing="all")
    assert {group.router_of(request, seed=0) for request in GROUP_FEED} == {0}


def test_a_router_of_another_region_has_that_region_near() -> None:
    group, fleet = RouterGroup(count=3, split="region"), three_regions()
    links = [[round(link.rtt_s, 3) for link in group.links(fleet, number)] for number in range(3)]
    assert links == [[0.002, 0.095, 0.18], [0.097, 0.002, 0.275], [0.182, 0.275, 0.002]]
    random = RouterGroup(count=3)
    assert [link.rtt_s for link in random.links(fleet, 2)] == [0.002, 0.095, 0.18]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "at least 1"),
        ({"split": "region", "sharing": "all"}, "in one region"),
        ({"loss": 1.5}, "share of 0 to 1"),
        ({"delay_s": -1.0}, "not negative"),
    ],
)
def test_a_wrong_group_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterGroup(**wrong)


# How long an attempt may be without content, and that those are given up alone that have none.


DRAWS = RandomTable(0)


class Giver:
    """A site that notes what it is to give up, and when."""

    def __init__(self, kernel: EventQueue) -> None:
        self.kernel = kernel
        self.given_up: list[tuple[float, str]] = []

    def time_out(self, sending: SimAttempt) -> None:
        self.given_up.append((self.kernel.now, sending.request_id))
        sending.done = True


def sending(name: str) -> SimAttempt:
    trips = TripDelays(DRAWS, 0)
    return SimAttempt(name, f"{name}/1", b"", prompt_tokens=1, output_tokens=1, body_bytes=0, trips=trips)


class Lab:
    def __init__(self) -> None:
        self.kernel = EventQueue()
        self.site = Giver(self.kernel)
        self.deadlines = FirstTokenTimeouts(self.kernel)

    def watch(self, name: str, *, at_s: float) -> SimAttempt:
        one = sending(name)
        self.kernel.at(at_s, lambda: self.deadlines.watch(one, cast(RemoteReplica, self.site)))
        return one


def test_an_attempt_is_given_up_two_minutes_after_it_was_sent() -> None:
    lab = Lab()
    for name, at_s in (("one", 0.0), ("two", 0.0), ("three", 50.0)):
        lab.watch(name, at_s=at_s)
    lab.kernel.run()
    assert lab.site.given_up == [(120.0, "one"), (120.0, "two"), (170.0, "three")]


def test_an_attempt_with_content_or_an_end_is_not_given_up_and_holds_up_no_other() -> None:
    lab = Lab()
    content, over = lab.watch("content", at_s=0.0), lab.watch("over", at_s=1.0)
    lab.watch("late", at_s=2.0)
    lab.kernel.at(100.0, lambda: setattr(content, "has_first_token", True))
    lab.kernel.at(100.0, lambda: setattr(over, "done", True))
    lab.kernel.run()
    assert lab.site.given_up == [(122.0, "late")]


def test_a_pause_in_the_traffic_ends_no_watch() -> None:
    lab = Lab()
    lab.watch("one", at_s=0.0)
    lab.watch("two", at_s=500.0)
    lab.kernel.run()
    assert lab.site.given_up == [(120.0, "one"), (620.0, "two")]
    assert lab.kernel.handled == 4, "and asks for no event in between"


# --- A topology of several regions: clients with a way to their router, links by a matrix, and what a row then says.


FLEET = three_regions()
FEED_OF_REGIONS = conversations(80, every_s=0.5)
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
    scenario: Scenario, feed: Sequence[SimRequest] = FEED_OF_REGIONS, policy: str = "gorgo-ms", fleet: SimFleet = FLEET
) -> SimResult:
    group = ONE_ROUTER.placed(scenario.topology)
    return Simulation(scenario.applied_to(fleet), make_policy(policy), seed=0, routers=group).run(feed)


def regions_of(topology: Topology) -> dict[str, str | None]:
    return {str(request.index): topology.region_of(request, seed=0) for request in FEED_OF_REGIONS}


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
    sessions = {(request.session_id, topology.region_of(request, seed=0)) for request in FEED_OF_REGIONS}
    assert len(sessions) == len({request.session_id for request in FEED_OF_REGIONS})
    drawn = [topology.region_of(replace(FEED_OF_REGIONS[0], session_id=f"{number}"), seed=0) for number in range(4_000)]
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
        assert [record.id for record in records] == [str(request.index) for request in FEED_OF_REGIONS]
        assert all(one.scheduled_s <= other.scheduled_s for one, other in pairwise(records))
        assert all((record.e2e_s or 0) + 1e-9 >= (record.ttft_ms or 0) / 1e3 > 0 for record in records)


def test_a_client_far_away_sends_its_next_turn_when_it_has_the_answer() -> None:
    first = replace(FEED_OF_REGIONS[0], session_id="a", index=0, arrival_s=0.0)
    feed = [first, replace(first, index=1, arrival_s=9.0, after=0, think_s=5.0)]
    one, two = run(replace(ONE, clients={"ap-seoul": 1.0}), feed).records
    assert two.scheduled_s == pytest.approx((one.e2e_s or 0) + 5.0)


@pytest.mark.parametrize("scenario", [ONE, EACH, replace(EACH, network=replace(STILL, tcp_windows=False))])
@pytest.mark.parametrize("policy", ["gorgo-ms", "nearest"])
def test_nobody_is_below_the_floor_of_clients_far_away(scenario: Scenario, policy: str) -> None:
    floor = lower_bound(FEED_OF_REGIONS, scenario.applied_to(FLEET), topology=scenario.topology, seed=0)
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
    large = [replace(request, arrival_s=20.0 * n, body_bytes=500_000) for n, request in enumerate(FEED_OF_REGIONS[:9])]
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
    alone = replace(FEED_OF_REGIONS[0], session_id=None, body_bytes=400)
    ways = [clients.start_trip(alone, now=now, key=0)[1].out_s for now in (0.0, 1.0)]
    assert ways == pytest.approx([0.27, 0.27])
    ways = [clients.start_trip(replace(alone, session_id="a"), now=now, key=0)[1].out_s for now in (0.0, 1.0)]
    assert ways == pytest.approx([0.27, 0.09])
