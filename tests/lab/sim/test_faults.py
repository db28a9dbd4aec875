"""The table of scenarios: what each makes of a fleet, of a run, of arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.latency.prefill import PrefillPrior
from gorgo.errors import ScenarioError, UnknownReplica, UnknownScenario
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.faults import (
    DelaySpikes,
    Drain,
    FailFast,
    Fault,
    FaultInjector,
    Hang,
    Kill,
    Partition,
    PeriodicStall,
    RttShift,
    Slow,
    StaleMetrics,
    StaleProbes,
    region_rtt_s,
)
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.scenarios import SCENARIOS, burst, find_scenario, nearest
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest, scaled
from gorgo.policies.registry import make_policy
from tests.lab.sim.drawn import draw_faults
from tests.lab.sim.fleets import three_regions

FLEET = three_regions()


def p_of(replica: SimReplica) -> float:
    """What the Router believes a prefill of 10,000 tokens behind 5,000 takes."""
    spec = replica.spec
    prior = PrefillPrior.of(spec.prefill_base_s, spec.prefill_tokens_per_s, spec.prefill_kappa_s)
    assert prior.known
    return prior.seconds(10_000, 5_000)


def test_an_unknown_scenario_is_told_which_there_are() -> None:
    with pytest.raises(UnknownScenario, match=r"'nope'; there are: steady, slow-replica, .*priors-slow"):
        find_scenario("nope")


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_fits_three_regions_and_keeps_names_unique(name: str) -> None:
    scenario = find_scenario(name)
    fleet = scenario.applied_to(FLEET)
    scenario.planned(fleet, 600.0)
    names = [replica.name for replica in fleet.replicas]
    assert len(set(names)) == len(names) >= 3


def test_steady_changes_nothing() -> None:
    steady = find_scenario("steady")
    assert steady.applied_to(FLEET) is FLEET
    assert not steady.planned(FLEET, 600.0)


def test_faults_hit_the_nearest_replica_at_their_share_of_the_run() -> None:
    assert find_scenario("slow-replica").planned(FLEET, 600.0) == [Slow("us-ashburn-0", 3.0, 200.0, 400.0)]
    assert find_scenario("killed").planned(FLEET, 600.0) == [Kill("us-ashburn-0", 200.0, 300.0)]
    assert find_scenario("rtt-shift").planned(FLEET, 600.0) == [RttShift("eu-frankfurt", 0.32, 300.0)]
    assert find_scenario("stale-metrics").planned(FLEET, 600.0) == [
        StaleMetrics(None, 200.0, 400.0),
        StaleProbes(None, 200.0, 400.0),
    ]
    assert find_scenario("late-path").planned(FLEET, 600.0) == [
        DelaySpikes(region) for region in ("us-ashburn", "eu-frankfurt", "ap-seoul")
    ]


def test_an_rtt_shift_needs_its_region() -> None:
    with pytest.raises(ScenarioError, match="'eu-frankfurt'; the fleet has replicas in: us-ashburn"):
        find_scenario("rtt-shift").planned(SimFleet(FLEET.replicas[:1]), 600.0)


def test_a_mixed_fleet_has_one_faster_replica_and_the_router_knows() -> None:
    mixed = find_scenario("mixed-fleet").applied_to(FLEET)
    assert [replica.profile.name.split("-")[0] for replica in mixed.replicas] == ["2xL40S", "1xH100", "2xL40S"]
    assert [replica.spec.kv_capacity_tokens for replica in mixed.replicas] == [983_549, 788_766, 983_549]
    assert p_of(mixed.replicas[1]) < 0.85 * p_of(mixed.replicas[0])
    with pytest.raises(ScenarioError, match="two replicas"):
        find_scenario("mixed-fleet").applied_to(SimFleet(FLEET.replicas[:1]))


def test_six_replicas_are_two_per_region_each_like_its_sibling() -> None:
    six = find_scenario("six-replicas").applied_to(FLEET)
    assert [replica.name for replica in six.replicas] == [
        *("us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0"),
        *("us-ashburn-1", "eu-frankfurt-1", "ap-seoul-1"),
    ]
    for one, other in zip(six.replicas[:3], six.replicas[3:], strict=True):
        assert (one.link, one.profile, one.region) == (other.link, other.profile, other.region)
    assert find_scenario("six-replicas").applied_to(six) == six, "a region that has two stays"


def test_one_region_is_near_all_over() -> None:
    one = find_scenario("one-region").applied_to(FLEET)
    assert {(replica.region, replica.link.rtt_s) for replica in one.replicas} == {("us-ashburn", 0.002)}


def test_wrong_priors_are_wrong_by_three_and_engines_as_they_were() -> None:
    fast, slow = (find_scenario(name).applied_to(FLEET) for name in ("priors-fast", "priors-slow"))
    for right, faster, slower in zip(FLEET.replicas, fast.replicas, slow.replicas, strict=True):
        assert p_of(faster) == pytest.approx(p_of(right) / 3)
        assert p_of(slower) == pytest.approx(p_of(right) * 3)
        assert faster.profile is slower.profile is right.profile
        assert faster.spec.kv_capacity_tokens == right.spec.kv_capacity_tokens
    assert with_accurate_priors(fast) == FLEET


def test_engines_that_find_part_of_a_prefix_are_otherwise_as_they_were() -> None:
    found = {"partial-hits-30": (0.3, 1), "partial-hits-60": (0.6, 1), "checkpoints-1024": (1.0, 1024)}
    for name, (hit_share, checkpoint_tokens) in found.items():
        for replica, before in zip(find_scenario(name).applied_to(FLEET).replicas, FLEET.replicas, strict=True):
            assert (replica.profile.hit_share, replica.profile.checkpoint_tokens) == (hit_share, checkpoint_tokens)
            assert replace(replica.profile, hit_share=1.0, checkpoint_tokens=1) == before.profile
            assert (replica.spec, replica.link) == (before.spec, before.link)


def test_right_priors_are_the_profile_s() -> None:
    (replica,) = with_accurate_priors(SimFleet(FLEET.replicas[:1])).replicas
    assert p_of(replica) == pytest.approx(replica.profile.prefill_s(10_000, 10_000 * (5_000 + 5_000)))


@given(st.lists(st.floats(0.0, 1e5), max_size=50))
def test_bursts_keep_count_order_and_period(drawn: list[float]) -> None:
    arrivals_s = np.sort(np.array(drawn))
    moved_s = burst(arrivals_s)
    assert len(moved_s) == len(arrivals_s)
    assert np.all(np.diff(moved_s) >= 0)
    assert np.array_equal(moved_s // 30.0, arrivals_s // 30.0), "so the mean rate stays"
    assert np.all(moved_s % 30.0 <= 5.0 + 1e-9)


def test_a_period_of_30_seconds_arrives_in_its_first_5() -> None:
    assert burst(np.array([0.0, 15.0, 29.4, 30.0, 45.0])).tolist() == pytest.approx([0.0, 2.5, 4.9, 30.0, 32.5])
    assert find_scenario("bursts").moved(np.array([15.0, 45.0])).tolist() == pytest.approx([2.5, 32.5])
    assert burst(np.array([3.0, 12.0]), every_s=10.0, lasts_s=1.0).tolist() == pytest.approx([0.3, 10.2])
    as_they_are = np.array([0.0, 31.0])
    assert find_scenario("steady").moved(as_they_are) is as_they_are


def test_a_freezing_replica_freezes_for_as_long_as_requests_may_run() -> None:
    assert find_scenario("freezing").planned(FLEET, 600.0) == [
        PeriodicStall("us-ashburn-0", 1200.0, 40.0, 8.0, 100.0, 0.0)
    ]


def test_right_priors_are_all_that_the_router_reads_of_an_engine() -> None:
    for replica in with_accurate_priors(FLEET).replicas:
        spec, profile = replica.spec, replica.profile
        assert (spec.kv_capacity_tokens, spec.max_running_requests) == (profile.kv_tokens, profile.max_running_requests)
        assert spec.prefill_base_s == profile.prefill_base_s
        assert spec.prefill_tokens_per_s == profile.prefill_tokens_per_s
        assert spec.prefill_kappa_s == profile.prefill_kappa_s


def test_wrong_priors_are_wrong_in_every_part_of_a_prefill() -> None:
    for name, factor in (("priors-fast", 3.0), ("priors-slow", 1 / 3)):
        spec, profile = find_scenario(name).applied_to(FLEET).replicas[0].spec, FLEET.replicas[0].profile
        assert spec.prefill_base_s == pytest.approx(profile.prefill_base_s / factor)
        assert spec.prefill_tokens_per_s == pytest.approx(profile.prefill_tokens_per_s * factor)
        assert spec.prefill_kappa_s == pytest.approx(profile.prefill_kappa_s / factor)


def test_a_new_sibling_takes_the_first_number_that_is_free() -> None:
    first, *others = FLEET.replicas
    taken = replace(first, spec=replace(first.spec, name="us-ashburn-1"))
    six = find_scenario("six-replicas").applied_to(SimFleet((taken, *others)))
    assert [replica.name for replica in six.replicas[3:]] == ["us-ashburn-0", "eu-frankfurt-1", "ap-seoul-1"]


def test_the_faster_engine_of_a_mixed_fleet_is_the_second_nearest_whatever_the_order() -> None:
    mixed = find_scenario("mixed-fleet").applied_to(SimFleet(FLEET.replicas[::-1]))
    assert [replica.name for replica in mixed.replicas if replica.profile.name.startswith("1xH100")] == [
        "eu-frankfurt-0"
    ]


def test_nearest_is_by_round_trip() -> None:
    assert nearest(three_regions(far=0.1, near=0.01)).name == "near-0"


class Diary(FaultInjector):
    """A world in which nothing runs: a line per thing done, with its time."""

    def __init__(self, fleet: SimFleet) -> None:
        self.kernel = EventQueue()
        self.fleet = fleet
        self.engines = {}
        self.lines: list[tuple[object, ...]] = []

    def _note(self, *line: object) -> None:
        self.lines.append((self.kernel.now, *line))

    def set_slowdown(self, replica: str, factor: float) -> None:
        self._note("slowdown", replica, factor)

    def set_rtt(self, region: str, rtt_s: float) -> None:
        self._note("rtt", region, rtt_s)

    def kill(self, replica: str) -> None:
        self._note("kill", replica)

    def hang(self, replica: str) -> None:
        self._note("hang", replica)

    def set_draining(self, replica: str, draining: bool) -> None:
        self._note("drain", replica, draining)

    def revive(self, replica: str) -> None:
        self._note("revive", replica)

    def set_metrics(self, replica: str, reported: bool) -> None:
        self._note("metrics", replica, reported)

    def set_probes(self, replica: str, reported: bool) -> None:
        self._note("probes", replica, reported)

    def set_failing(self, replica: str, status: int | None) -> None:
        self._note("failing", replica, status)

    def set_path_delay(self, region: str, share: float, low_s: float, high_s: float) -> None:
        self._note("path", region, share, low_s, high_s)

    def set_reachable(self, replica: str, reachable: bool) -> None:
        self._note("reachable", replica, reachable)


def diary(*faults: Fault, world: Diary | None = None) -> list[tuple[object, ...]]:
    world = world or Diary(three_regions())
    for fault in faults:
        fault.start(world)
    world.kernel.run()
    return world.lines


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        (
            Slow("ap-seoul-0", 3.0, 10.0, 20.0),
            [(10.0, "slowdown", "ap-seoul-0", 3.0), (20.0, "slowdown", "ap-seoul-0", 1.0)],
        ),
        (RttShift("eu-frankfurt", 0.32, 5.0), [(5.0, "rtt", "eu-frankfurt", 0.32)]),
        (
            RttShift("eu-frankfurt", 0.32, 5.0, 6.0),
            [(5.0, "rtt", "eu-frankfurt", 0.32), (6.0, "rtt", "eu-frankfurt", 0.095)],
        ),
        (Kill("us-ashburn-0", 1.0, 2.0), [(1.0, "kill", "us-ashburn-0"), (2.0, "revive", "us-ashburn-0")]),
        (Kill("us-ashburn-0", 1.0), [(1.0, "kill", "us-ashburn-0")]),
        (Hang("us-ashburn-0", 1.0), [(1.0, "hang", "us-ashburn-0")]),
        (
            Hang("us-ashburn-0", 1.0, 2.0),
            [(1.0, "hang", "us-ashburn-0"), (2.0, "kill", "us-ashburn-0"), (2.0, "revive", "us-ashburn-0")],
        ),
        (
            Drain("us-ashburn-0", 1.0, 2.0),
            [(1.0, "drain", "us-ashburn-0", True), (2.0, "drain", "us-ashburn-0", False)],
        ),
        (
            StaleMetrics("us-ashburn-0", 1.0, 2.0),
            [(1.0, "metrics", "us-ashburn-0", False), (2.0, "metrics", "us-ashburn-0", True)],
        ),
        (
            FailFast("us-ashburn-0", 401, 1.0, 2.0),
            [(1.0, "failing", "us-ashburn-0", 401), (2.0, "failing", "us-ashburn-0", None)],
        ),
        (StaleProbes("ap-seoul-0", 1.0), [(1.0, "probes", "ap-seoul-0", False)]),
        (
            DelaySpikes("ap-seoul", end_s=9.0),
            [(0.0, "path", "ap-seoul", 0.015, 1.0, 3.0), (9.0, "path", "ap-seoul", 0.0, 0.0, 0.0)],
        ),
    ],
    ids=repr,
)
def test_a_fault_does_at_its_times_what_it_says(fault: Fault, done: list[tuple[object, ...]]) -> None:
    assert diary(fault) == done


def test_metrics_of_all_replicas_stop_at_once() -> None:
    lines = diary(StaleMetrics(None, 1.0))
    assert lines == [(1.0, "metrics", f"{region}-0", False) for region in ("us-ashburn", "eu-frankfurt", "ap-seoul")]


def test_a_partition_cuts_off_all_replicas_of_its_region() -> None:
    six = find_scenario("six-replicas").applied_to(three_regions())
    lines = diary(Partition("ap-seoul", 1.0, 2.0), world=Diary(six))
    assert lines == [
        (1.0, "reachable", "ap-seoul-0", False),
        (1.0, "reachable", "ap-seoul-1", False),
        (2.0, "reachable", "ap-seoul-0", True),
        (2.0, "reachable", "ap-seoul-1", True),
    ]


def test_a_freezing_replica_freezes_again_and_again_until_its_end() -> None:
    lines = diary(PeriodicStall("us-ashburn-0", end_s=305.0))
    assert [(line[0], line[3]) for line in lines] == [
        (100.0, 40.0),
        (108.0, 1.0),
        (200.0, 40.0),
        (208.0, 1.0),
        (300.0, 40.0),
        (305.0, 1.0),
    ]


@pytest.mark.parametrize(
    "fault", [Slow("mars-0", 3.0, 0.0), Kill("mars-0", 0.0), StaleProbes("mars-0", 0.0), PeriodicStall("mars-0", 1.0)]
)
def test_a_fault_of_a_replica_that_is_not_there_says_who_is(fault: Fault) -> None:
    with pytest.raises(UnknownReplica, match=r"'mars-0'.*us-ashburn-0, eu-frankfurt-0, ap-seoul-0"):
        diary(fault)


@pytest.mark.parametrize("fault", [RttShift("mars", 1.0, 0.0), Partition("mars", 0.0), DelaySpikes("mars")])
def test_a_fault_of_a_region_without_replicas_says_which_there_are(fault: Fault) -> None:
    with pytest.raises(ScenarioError, match=r"'mars'.*us-ashburn, eu-frankfurt, ap-seoul"):
        diary(fault)


@pytest.mark.parametrize(("lasts_s", "end_s"), [(8.0, float("inf")), (100.0, 1e3), (0.0, 1e3), (101.0, 1e3)])
def test_a_freeze_without_an_end_or_without_a_pause_is_refused(lasts_s: float, end_s: float) -> None:
    with pytest.raises(ScenarioError, match="expected 0 < lasts_s < every_s and an end"):
        diary(PeriodicStall("us-ashburn-0", end_s=end_s, lasts_s=lasts_s))


def test_a_freezing_replica_freezes_first_a_whole_period_after_its_start_and_never_at_its_end() -> None:
    lines = diary(PeriodicStall("us-ashburn-0", end_s=30.0, factor=5.0, lasts_s=1.0, every_s=10.0, start_s=10.0))
    assert lines == [(20.0, "slowdown", "us-ashburn-0", 5.0), (21.0, "slowdown", "us-ashburn-0", 1.0)]


def test_a_partition_without_an_end_stays() -> None:
    assert diary(Partition("ap-seoul", 1.0)) == [(1.0, "reachable", "ap-seoul-0", False)]


def test_pings_of_all_replicas_come_back_at_once() -> None:
    lines = diary(StaleProbes(None, 1.0, 2.0))
    names = ("us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0")
    assert lines == [(at_s, "probes", name, at_s == 2.0) for at_s in (1.0, 2.0) for name in names]


def test_a_region_is_as_far_away_as_its_first_replica() -> None:
    fleet = three_regions()
    assert [region_rtt_s(fleet, region) for region in ("us-ashburn", "eu-frankfurt", "ap-seoul")] == [
        0.002,
        0.095,
        0.18,
    ]


def test_a_drawn_schedule_is_the_seed_s_and_leaves_somebody_alive() -> None:
    fleet, kinds = three_regions(), set()
    for seed in range(20):
        faults = draw_faults(np.random.default_rng(seed), fleet, 1800.0)
        assert repr(faults) == repr(draw_faults(np.random.default_rng(seed), fleet, 1800.0))
        kinds |= {type(fault) for fault in faults}
        assert 3 <= len(faults) <= 150
        for line in _lanes(faults):
            for (_, end_s), (start_s, _) in pairwise(line):
                assert start_s > end_s, "one after the other"
            assert all(0.0 < start_s < end_s <= 1800.0 for start_s, end_s in line)
        down: set[object] = set()
        for _, what, replica, *_ in diary(*faults):
            if what == "kill":
                down.add(replica)
            elif what == "revive":
                down.discard(replica)
            assert len(down) < len(fleet.replicas)
        assert not down, "all are back at the end"
    assert kinds == {Kill, Partition, Slow, StaleMetrics}


def test_a_partition_that_would_leave_no_replica_is_a_kill() -> None:
    one_region = find_scenario("one-region").applied_to(three_regions())
    drawn = draw_faults(np.random.default_rng(0), one_region, 20_000.0)
    kinds = {type(fault) for fault in drawn}
    assert kinds == {Kill, Slow, StaleMetrics}


def test_a_lone_replica_is_never_drawn_to_die() -> None:
    alone = SimFleet(three_regions().replicas[:1])
    for seed in range(5):
        faults = draw_faults(np.random.default_rng(seed), alone, 1800.0)
        assert faults
        assert not any(isinstance(fault, Kill | Partition) for fault in faults)


def _lanes(faults: Sequence[Fault]) -> list[list[tuple[float, float]]]:
    kinds = ((Kill, Partition), (Slow,), (StaleMetrics,))
    return [[(fault.start_s, fault.end_s) for fault in faults if isinstance(fault, kind)] for kind in kinds]


# Who is meant by a name or a region, and what reaches each replica.


def six() -> Simulation:
    fleet = find_scenario("six-replicas").applied_to(three_regions())
    return Simulation(fleet, make_policy("nearest"), seed=0)


def test_a_region_is_all_of_its_replicas_and_no_other() -> None:
    simulated = six()
    simulated.injector.set_rtt("ap-seoul", 0.5)
    assert {name for name, site in simulated.engines.items() if site.rtt_s == 0.5} == {"ap-seoul-0", "ap-seoul-1"}
    simulated.injector.set_rtt("mars", 9.0)
    assert max(site.rtt_s for site in simulated.engines.values()) == 0.5


def test_a_named_lever_moves_one_replica() -> None:
    simulated = six()
    injector, sites = simulated.injector, simulated.engines
    injector.set_slowdown("ap-seoul-1", 3.0)
    assert [name for name, site in sites.items() if site.model.slowdown == 3.0] == ["ap-seoul-1"]
    injector.kill("ap-seoul-0")
    injector.set_reachable("ap-seoul-1", False)
    assert [name for name, site in sites.items() if not site.alive] == ["ap-seoul-0", "ap-seoul-1"]
    injector.revive("ap-seoul-0")
    injector.set_reachable("ap-seoul-1", True)
    assert all(site.alive for site in sites.values())
    injector.set_metrics("us-ashburn-0", False)
    injector.set_probes("us-ashburn-1", False)
    assert [name for name, site in sites.items() if not site.ports[0].background.reports_metrics] == ["us-ashburn-0"]
    assert [name for name, site in sites.items() if not site.ports[0].background.reports_probes] == ["us-ashburn-1"]


@pytest.mark.parametrize(
    "act",
    [
        lambda injector: injector.set_slowdown("mars-0", 2.0),
        lambda injector: injector.kill("mars-0"),
        lambda injector: injector.revive("mars-0"),
        lambda injector: injector.set_reachable("mars-0", False),
        lambda injector: injector.set_metrics("mars-0", False),
        lambda injector: injector.set_probes("mars-0", False),
    ],
)
def test_an_unknown_replica_is_answered_with_the_known_ones(act: Callable[[FaultInjector], None]) -> None:
    with pytest.raises(UnknownReplica, match=r"'mars-0'; the fleet has: us-ashburn-0, .*ap-seoul-1"):
        act(six().injector)


def test_a_scale_stretches_the_time_and_nothing_else() -> None:
    feed = [
        SimRequest(index=n, arrival_s=float(n), prompt_tokens=10, output_tokens=1, blocks=b"", prefix_hash=n)
        for n in range(3)
    ]
    assert [request.arrival_s for request in scaled(feed, 2.0)] == [0.0, 2.0, 4.0]
    assert [(request.index, request.prefix_hash) for request in scaled(feed, 2.0)] == [(0, 0), (1, 1), (2, 2)]
    assert scaled(feed, 1.0) == tuple(feed)
