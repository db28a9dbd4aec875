"""The named fleets: data that every comparison shares."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.config.model import SimulationConfig
from gorgo.core.fleet.replica import accelerator_name
from gorgo.errors import UnknownFleet
from gorgo.lab.sim.faults.scenarios import with_accurate_priors
from gorgo.lab.sim.named_fleets import FLEETS, NamedFleet, PooledFleet, ReplicaPool, find_fleet
from gorgo.policies.learned.lodestar import ACCELERATORS
from tests.lab.sim.fleets import three_regions

PAPER = "2xL40S-Qwen3.5-35B-A3B-FP8-fitted"


def test_every_named_fleet_says_its_accelerators_and_lodestar_knows_those_of_its_paper() -> None:
    found = {
        name: {accelerator_name(row.spec.accelerator or "") for row in find_fleet(name).replicas} for name in FLEETS
    }
    assert all("" not in names for names in found.values())
    assert found["paper"] == {"l40s"}
    assert found["7xL20-8xA30"] == {"l20", "a30"}
    assert found["7xA30-8xV100"] == {"a30", "v100"}
    known = {accelerator_name(name) for name in ACCELERATORS}
    assert found["mixed-gpus"] <= known


@pytest.mark.parametrize("name", FLEETS)
def test_a_fleet_has_its_name_accurate_priors_and_distinct_replicas(name: str) -> None:
    fleet = find_fleet(name)
    assert fleet.name == name
    assert with_accurate_priors(fleet) == fleet
    assert len({replica.name for replica in fleet.replicas}) == len(fleet.replicas) >= 3


def test_the_paper_s_fleet_is_that_of_the_shipped_regions_file() -> None:
    assert {replica.profile.name for replica in find_fleet("paper").replicas} == {SimulationConfig().profile}
    assert [replica.link.rtt_s for replica in find_fleet("paper").replicas] == [0.002, 0.095, 0.180]
    assert replace(find_fleet("sglang"), name="") == three_regions()


def test_a_fleet_is_found_by_its_name_alone() -> None:
    with pytest.raises(UnknownFleet, match="no fleet named 'papers'; there are: paper, h100, "):
        find_fleet("papers")


def test_profiles_are_one_for_all_or_one_per_region() -> None:
    one = NamedFleet(name="a", description="", profiles=[PAPER], changes={"kv_tokens": 9})
    assert {replica.profile.kv_tokens for replica in one.fleet().replicas} == {9}
    assert {replica.spec.kv_capacity_tokens for replica in one.fleet().replicas} == {9}
    with pytest.raises(ValueError, match="zip"):
        NamedFleet(name="a", description="", profiles=[PAPER, PAPER]).fleet()


def test_fleets_differ_in_engines_or_links() -> None:
    def seen(name: str) -> tuple[object, ...]:
        return tuple((replica.profile, replica.link) for replica in find_fleet(name).replicas)

    assert len({seen(name) for name in FLEETS}) == len(FLEETS)


def test_pools_are_so_many_equal_replicas_in_one_region_under_vllm() -> None:
    fleet = find_fleet("7xA30-8xV100")
    assert [replica.name for replica in fleet.replicas] == [
        *(f"a30-{number}" for number in range(7)), *(f"v100-{number}" for number in range(8)),
    ]  # fmt: skip
    assert {replica.region for replica in fleet.replicas} == {"local"}
    assert {replica.profile.scheduler for replica in fleet.replicas} == {"vllm"}
    assert {replica.name[:4]: replica.profile.prefix_cache for replica in fleet.replicas} == {
        "a30-": True,
        "v100": False,
    }


def test_a_pool_s_changes_are_of_its_own_replicas() -> None:
    pools = [
        ReplicaPool(count=1, name=name, profile=PAPER, changes={"kv_tokens": size})
        for name, size in (("a", 7), ("b", 9))
    ]
    fleet = PooledFleet(name="two", description="", pools=pools).fleet()
    assert {replica.name: replica.spec.kv_capacity_tokens for replica in fleet.replicas} == {"a-0": 7, "b-0": 9}


def test_a_region_may_have_several_replicas_each_with_a_name_of_its_own() -> None:
    assert [(replica.name, replica.profile.name) for replica in find_fleet("mixed-gpus-x2").replicas] == [
        (f"{replica.spec.region}-{number}", replica.profile.name)
        for replica in find_fleet("mixed-gpus").replicas
        for number in (0, 1)
    ]
