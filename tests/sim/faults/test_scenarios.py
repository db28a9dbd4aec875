"""The table of scenarios: what each makes of a fleet, of a run, of arrivals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.latency.prefill import PrefillPrior
from gorgo.errors import ScenarioError, UnknownScenario
from gorgo.sim.faults.kinds import DelaySpikes, Kill, PeriodicStall, RttShift, Slow, StaleMetrics, StaleProbes
from gorgo.sim.faults.scenarios import SCENARIOS, burst, find_scenario, nearest, with_accurate_priors
from gorgo.sim.fleet import SimFleet, SimReplica
from tests.sim.fleets import three_regions

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
    fleet = scenario.fleet(FLEET)
    scenario.faults(fleet, 600.0)
    names = [replica.name for replica in fleet.replicas]
    assert len(set(names)) == len(names) >= 3


def test_steady_changes_nothing() -> None:
    steady = find_scenario("steady")
    assert steady.fleet(FLEET) is FLEET
    assert not steady.faults(FLEET, 600.0)


def test_faults_hit_the_nearest_replica_at_their_share_of_the_run() -> None:
    assert find_scenario("slow-replica").faults(FLEET, 600.0) == [Slow("us-ashburn-0", 3.0, 200.0, 400.0)]
    assert find_scenario("killed").faults(FLEET, 600.0) == [Kill("us-ashburn-0", 200.0, 300.0)]
    assert find_scenario("rtt-shift").faults(FLEET, 600.0) == [RttShift("eu-frankfurt", 0.32, 300.0)]
    assert find_scenario("stale-metrics").faults(FLEET, 600.0) == [
        StaleMetrics(None, 200.0, 400.0),
        StaleProbes(None, 200.0, 400.0),
    ]
    assert find_scenario("late-path").faults(FLEET, 600.0) == [
        DelaySpikes(region) for region in ("us-ashburn", "eu-frankfurt", "ap-seoul")
    ]


def test_an_rtt_shift_needs_its_region() -> None:
    with pytest.raises(ScenarioError, match="'eu-frankfurt'; the fleet has replicas in: us-ashburn"):
        find_scenario("rtt-shift").faults(SimFleet(FLEET.replicas[:1]), 600.0)


def test_a_mixed_fleet_has_one_faster_replica_and_the_router_knows() -> None:
    mixed = find_scenario("mixed-fleet").fleet(FLEET)
    assert [replica.profile.name.split("-")[0] for replica in mixed.replicas] == ["2xL40S", "1xH100", "2xL40S"]
    assert [replica.spec.kv_capacity_tokens for replica in mixed.replicas] == [983_549, 788_766, 983_549]
    assert p_of(mixed.replicas[1]) < 0.85 * p_of(mixed.replicas[0])
    with pytest.raises(ScenarioError, match="two replicas"):
        find_scenario("mixed-fleet").fleet(SimFleet(FLEET.replicas[:1]))


def test_six_replicas_are_two_per_region_each_like_its_sibling() -> None:
    six = find_scenario("six-replicas").fleet(FLEET)
    assert [replica.name for replica in six.replicas] == [
        *("us-ashburn-0", "eu-frankfurt-0", "ap-seoul-0"),
        *("us-ashburn-1", "eu-frankfurt-1", "ap-seoul-1"),
    ]
    for one, other in zip(six.replicas[:3], six.replicas[3:], strict=True):
        assert (one.link, one.profile, one.region) == (other.link, other.profile, other.region)
    assert find_scenario("six-replicas").fleet(six) == six, "a region that has two stays"


def test_one_region_is_near_all_over() -> None:
    one = find_scenario("one-region").fleet(FLEET)
    assert {(replica.region, replica.link.rtt_s) for replica in one.replicas} == {("us-ashburn", 0.002)}


def test_wrong_priors_are_wrong_by_three_and_engines_as_they_were() -> None:
    fast, slow = (find_scenario(name).fleet(FLEET) for name in ("priors-fast", "priors-slow"))
    for right, faster, slower in zip(FLEET.replicas, fast.replicas, slow.replicas, strict=True):
        assert p_of(faster) == pytest.approx(p_of(right) / 3)
        assert p_of(slower) == pytest.approx(p_of(right) * 3)
        assert faster.profile is slower.profile is right.profile
        assert faster.spec.kv_capacity_tokens == right.spec.kv_capacity_tokens
    assert with_accurate_priors(fast) == FLEET


def test_engines_that_find_part_of_a_prefix_are_otherwise_as_they_were() -> None:
    found = {"partial-hits-30": (0.3, 1), "partial-hits-60": (0.6, 1), "checkpoints-1024": (1.0, 1024)}
    for name, (hit_share, checkpoint_tokens) in found.items():
        for replica, before in zip(find_scenario(name).fleet(FLEET).replicas, FLEET.replicas, strict=True):
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
    assert find_scenario("bursts").reshape(np.array([15.0, 45.0])).tolist() == pytest.approx([2.5, 32.5])
    assert burst(np.array([3.0, 12.0]), every_s=10.0, lasts_s=1.0).tolist() == pytest.approx([0.3, 10.2])
    as_they_are = np.array([0.0, 31.0])
    assert find_scenario("steady").reshape(as_they_are) is as_they_are


def test_a_freezing_replica_freezes_for_as_long_as_requests_may_run() -> None:
    assert find_scenario("freezing").faults(FLEET, 600.0) == [
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
        spec, profile = find_scenario(name).fleet(FLEET).replicas[0].spec, FLEET.replicas[0].profile
        assert spec.prefill_base_s == pytest.approx(profile.prefill_base_s / factor)
        assert spec.prefill_tokens_per_s == pytest.approx(profile.prefill_tokens_per_s * factor)
        assert spec.prefill_kappa_s == pytest.approx(profile.prefill_kappa_s / factor)


def test_a_new_sibling_takes_the_first_number_that_is_free() -> None:
    first, *others = FLEET.replicas
    taken = replace(first, spec=replace(first.spec, name="us-ashburn-1"))
    six = find_scenario("six-replicas").fleet(SimFleet((taken, *others)))
    assert [replica.name for replica in six.replicas[3:]] == ["us-ashburn-0", "eu-frankfurt-1", "ap-seoul-1"]


def test_the_faster_engine_of_a_mixed_fleet_is_the_second_nearest_whatever_the_order() -> None:
    mixed = find_scenario("mixed-fleet").fleet(SimFleet(FLEET.replicas[::-1]))
    assert [replica.name for replica in mixed.replicas if replica.profile.name.startswith("1xH100")] == [
        "eu-frankfurt-0"
    ]


def test_nearest_is_by_round_trip() -> None:
    assert nearest(three_regions(far=0.1, near=0.01)).name == "near-0"
