"""Scenarios, oracle, floor and named fleets where they belong: in real simulations, of a small made-up window."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from gorgo.config.model import SimulationConfig
from gorgo.core.fleet.replica import accelerator_name
from gorgo.core.policy.interface import Policy
from gorgo.errors import ConfigError, ScenarioError, UnknownFleet, UnknownProfile, UnknownReplica, UnknownScenario
from gorgo.lab.sim.faults import DelaySpikes, FailFast, Fault, Kill, Partition, PeriodicStall, Slow
from gorgo.lab.sim.fleet import FLEETS, NamedFleet, PooledFleet, ReplicaPool, find_fleet, with_accurate_priors
from gorgo.lab.sim.lower_bound import lower_bound
from gorgo.lab.sim.oracle import Oracle
from gorgo.lab.sim.records import SimRecord, SimResult
from gorgo.lab.sim.scenarios import (
    KINDS,
    SCENARIOS,
    FleetSettings,
    Kind,
    NetworkSettings,
    Scenario,
    as_document,
    chosen_scenario,
    find_scenario,
    read_scenario,
)
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.learned.lodestar import ACCELERATORS
from gorgo.policies.registry import POLICIES, make_policy
from tests.lab.sim.drawn import draw_faults
from tests.lab.sim.fleets import three_regions

# --- Scenarios, oracle and floor where they belong: in real simulations, of a small made-up window.


def conversations(requests: int = 150, *, every_s: float = 0.8, seed: int = 0) -> list[SimRequest]:
    """Users who come back with all that was said and a little more, in random order."""
    rng = np.random.default_rng(seed)
    said = [b"" for _ in range(20)]
    arrivals_s = np.cumsum(rng.exponential(every_s, requests))
    feed = []
    for index, arrival_s in enumerate(arrivals_s.tolist()):
        user = int(rng.integers(len(said)))
        more = b"".join(rng.bytes(8) for _ in range(int(rng.integers(1, 9))))
        said[user] = said[user] + more if len(said[user]) < 8 * 30 else more
        prompt_tokens = len(said[user]) // 8 * 512 + int(rng.integers(1, 512))
        feed.append(
            SimRequest(
                index=index,
                arrival_s=arrival_s,
                prompt_tokens=prompt_tokens,
                output_tokens=int(rng.integers(1, 60)),
                blocks=said[user],
                prefix_hash=user,
                body_bytes=4 * prompt_tokens,
            )
        )
    return feed


FEED = conversations()
#: Long enough for staleness to set in and for freezes to come.
DURATION_S = FEED[-1].arrival_s


def run(
    scenario: Scenario | str, policy: Policy, feed: Sequence[SimRequest] = FEED, faults: Sequence[Fault] | None = None
) -> SimResult:
    found = find_scenario(scenario) if isinstance(scenario, str) else scenario
    fleet = found.applied_to(three_regions())
    arrivals_s = found.moved(np.array([request.arrival_s for request in feed]))
    feed = [replace(request, arrival_s=at_s) for request, at_s in zip(feed, arrivals_s.tolist(), strict=True)]
    faults = found.planned(fleet, feed[-1].arrival_s) if faults is None else faults
    return Simulation(fleet, policy, seed=0, faults=faults).run(feed)


def between(result: SimResult, start: float, end: float) -> list[SimRecord]:
    """Records that came in this part of the run."""
    return [record for record in result.records if start * DURATION_S <= record.scheduled_s < end * DURATION_S]


def share(records: Sequence[SimRecord], replica: str) -> float:
    return Counter(record.replica for record in records)[replica] / len(records)


def ttft_ms(records: Sequence[SimRecord]) -> list[float]:
    return [record.ttft_ms for record in records if record.ttft_ms is not None]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("policy", ["gorgo-ms", "oracle"])
def test_every_request_of_every_scenario_is_served_and_none_faster_than_the_floor(name: str, policy: str) -> None:
    result = run(name, Oracle() if policy == "oracle" else make_policy(policy))
    assert not [record for record in result.records if record.error is not None]
    continued = [record for record in result.records if record.continued]
    assert not continued or name in ("killed", "hung", "drained"), "what had content when its replica left"
    assert_above_the_floor(name, result)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_is_below_the_floor(policy: str) -> None:
    assert_above_the_floor("steady", run("steady", make_policy(policy)))


@pytest.mark.parametrize("seed", range(3))
def test_drawn_faults_lose_nothing_that_had_no_content_yet_and_never_beat_the_floor(seed: int) -> None:
    faults = draw_faults(np.random.default_rng(seed), three_regions(), DURATION_S, every_s=25.0, lasts_s=8.0)
    assert faults
    result = run("steady", make_policy("gorgo-ms"), faults=faults)
    assert all(record.ttft_ms is not None for record in result.records)
    assert_above_the_floor("steady", result)


def assert_above_the_floor(name: str, result: SimResult) -> None:
    floor = lower_bound(FEED, find_scenario(name).applied_to(three_regions()))
    for record, ttft_s, e2e_s in zip(result.records, floor.ttft_s, floor.e2e_s, strict=True):
        assert record.ttft_ms is None or record.ttft_ms >= ttft_s * 1e3 - 1e-6
        assert record.error is not None or (record.e2e_s is not None and record.e2e_s >= e2e_s - 1e-9)


def test_the_oracle_foresees_first_tokens_but_for_jitter_and_later_arrivals() -> None:
    result = run("steady", Oracle())
    errors_ms = [abs((record.predicted_ttft_ms or 0.0) - (record.ttft_ms or 0.0)) for record in result.records]
    assert np.median(errors_ms) < 3.0
    believed = run("steady", make_policy("gorgo-ms"))
    theirs_ms = [abs((record.predicted_ttft_ms or 0.0) - (record.ttft_ms or 0.0)) for record in believed.records]
    assert np.mean(errors_ms) < np.mean(theirs_ms)


def test_a_run_with_the_oracle_is_the_same_again() -> None:
    assert run("bursts", Oracle()).records == run("bursts", Oracle()).records


def test_a_slow_replica_is_avoided_while_it_is_slow() -> None:
    result = run("slow-replica", Oracle())
    shares = [share(between(result, third / 3, (third + 1) / 3), "us-ashburn-0") for third in range(3)]
    assert shares[1] < 0.6 * min(shares[0], shares[2])


def test_a_shifted_region_is_used_less_from_then_on() -> None:
    shifted: list[SimRecord] = []
    steady: list[SimRecord] = []
    for seed in range(4):  # Of one feed of 150 requests the share varies threefold.
        feed = conversations(seed=seed)
        runs = run("rtt-shift", Oracle(), feed).records, run("steady", Oracle(), feed).records
        at_s = feed[-1].arrival_s
        for all_records, late in zip(runs, (shifted, steady), strict=True):
            late += [record for record in all_records if record.scheduled_s >= 0.5 * at_s]
        first_half = [[one.ttft_ms for one in records if one.scheduled_s < 0.45 * at_s] for records in runs]
        assert first_half[0] == first_half[1]
    assert share(shifted, "eu-frankfurt-0") < 0.6 * share(steady, "eu-frankfurt-0")


def test_a_killed_replica_serves_nobody_and_comes_back_cold() -> None:
    result = run("killed", Oracle())
    assert not share(between(result, 1 / 3, 1 / 2), "us-ashburn-0")
    later = [record for record in between(result, 1 / 2, 1.0) if record.replica == "us-ashburn-0"]
    assert later
    assert later[0].cached_tokens == 0


def test_stale_figures_are_unknown_to_the_policies_that_read_them() -> None:
    long = conversations(400, every_s=1.2)  # the middle third is longer than it takes to go stale
    fresh, stale = (run(name, make_policy("gorgo-ms"), long) for name in ("steady", "stale-metrics"))
    assert all(record.predicted_ttft_ms is not None for record in fresh.records)
    assert any(record.predicted_ttft_ms is None for record in stale.records), "no prediction without a round trip"


def test_bursts_and_freezes_and_late_paths_make_the_tail_longer() -> None:
    def p95_ms(result: SimResult) -> float:
        return float(np.quantile(ttft_ms(result.records), 0.95))

    policy = make_policy("round-robin")
    steady_ms = p95_ms(run("steady", policy))
    assert p95_ms(run("bursts", make_policy("round-robin"))) > 1.5 * steady_ms
    freezing: Fault = PeriodicStall("us-ashburn-0", end_s=DURATION_S, every_s=20.0)
    assert p95_ms(run("steady", make_policy("round-robin"), faults=[freezing])) > 1.5 * steady_ms
    late = [
        one
        for one, other in zip(
            run("late-path", make_policy("round-robin")).records,
            run("steady", make_policy("round-robin")).records,
            strict=True,
        )
        if one.ttft_ms is not None and other.ttft_ms is not None and one.ttft_ms > other.ttft_ms + 900.0
    ]
    assert 1 <= len(late) <= 12


def test_a_partition_keeps_the_cache_of_who_is_cut_off() -> None:
    cut = Partition("us-ashburn", DURATION_S / 3, DURATION_S / 2)
    result = run("steady", Oracle(), faults=[cut])
    assert not share(between(result, 1 / 3, 1 / 2), "us-ashburn-0")
    later = [record for record in between(result, 1 / 2, 1.0) if record.replica == "us-ashburn-0"]
    assert any(record.cached_tokens for record in later[:5])


def test_engines_find_their_part_of_what_is_cached() -> None:
    """Placement under `session-affinity` does not depend on reports, so that each request meets the same cache."""

    def cached(name: str) -> int:
        return sum(record.cached_tokens or 0 for record in run(name, make_policy("simple-session-affinity")).records)

    whole = cached("steady")
    assert 0.25 * whole <= cached("partial-hits-30") <= 0.3 * whole
    assert 0.5 * whole <= cached("partial-hits-60") <= 0.6 * whole
    assert 0.8 * whole <= cached("checkpoints-1024") < whole


def test_wrong_priors_are_believed_at_first() -> None:
    def first_error_ms(name: str) -> float:
        record = run(name, make_policy("gorgo-ms")).records[0]
        assert record.predicted_ttft_ms is not None
        assert record.ttft_ms is not None
        return record.predicted_ttft_ms - record.ttft_ms

    fast, right, slow = (first_error_ms(name) for name in ("priors-fast", "steady", "priors-slow"))
    # A step per chunk of a long prompt is nobody's prior: 12 ms each.
    assert fast < -50.0 < -25.0 < right < 25.0 < 50.0 < slow


# --- The named fleets: data that every comparison shares.


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


# --- Scenarios from files: the same records as the named ones, and errors that name file, line and key.


FLEET = three_regions()
TWO_FAULTS = """\
description: an engine slows down, and another one dies
faults:
  - {kind: slow, replica: nearest, factor: 4, start: 1/4, end: 1/2}
  - {kind: kill, replica: eu-frankfurt-0, start: 60, end: 90.5}
"""


def written(folder: Path, text: str, name: str = "two-faults.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_has_faults_at_seconds_and_at_shares_of_the_run(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, TWO_FAULTS))
    assert scenario.name == "two-faults"
    assert scenario.planned(FLEET, 400.0) == [
        Slow("us-ashburn-0", 4.0, 100.0, 200.0),
        Kill("eu-frankfurt-0", 60.0, 90.5),
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_named_scenario_written_to_a_file_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(as_document(SCENARIOS[name])), "own.yaml")
    assert read_scenario(path) == SCENARIOS[name]


def test_a_fault_without_a_target_is_one_of_every_replica_or_region(tmp_path: Path) -> None:
    text = "faults: [{kind: fail-fast, status: 500, end: 9}, {kind: delay-spikes, share: 0.5}, {kind: periodic-stall}]"
    found = read_scenario(written(tmp_path, text)).planned(FLEET, 100.0)
    names, regions = [one.name for one in FLEET.replicas], [one.region for one in FLEET.replicas]
    assert found[:3] == [FailFast(name, 500, 0.0, 9.0) for name in names]
    assert found[3:6] == [DelaySpikes(region, 0.5) for region in regions]
    assert found[6:] == [PeriodicStall(name, 700.0) for name in names], "it repeats until the last request has ended"


def test_the_page_s_own_file_is_read_and_the_page_has_every_kind_and_key(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()
    section = page.split("### A world and faults of your own")[1].split("\n## ")[0]
    (text,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    scenario = read_scenario(written(tmp_path, text))
    assert chosen_scenario(scenario, FLEET) is scenario
    assert [len(scenario.routers), len(scenario.clients), len(scenario.faults)] == [2, 3, 2]
    named = set(re.findall(r"[`.]([a-z_-]+)[`:]", section))
    keys = {one.name for kind in (Scenario, NetworkSettings, FleetSettings) for one in fields(kind)}
    assert named >= {*KINDS, *keys - {"network"}}


def test_kinds_of_a_file_are_all_that_there_are() -> None:
    assert set(get_args(Kind)) == set(KINDS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("faults: [{kind: slwo}]", r"faults\[0\].kind \(line 1\): 'slwo'; expected 'slow', 'kill'"),
        (
            "faults:\n  - {kind: slow, replica: a}",
            r"faults\[0\].factor \(line 2\): missing; expected this key",
        ),
        ("faults: [{kind: kill, factor: 2}]", r"faults\[0\].factor .*: no key of kill; expected one of kind, replica"),
        ("faults: [{kind: kill, start: 4/3}]", "'4/3'; expected seconds from the start, or a share of the run as 1/3"),
        (
            "faults: [{kind: kill, start: 2/3, end: 1/3}]",
            "1/3 is no later than start; expected an end behind",
        ),
        ("faults: [{kind: kill, start: -1}]", r"faults\[0\].start .*: -1; expected seconds"),
        ("faults: [{kind: periodic-stall, lasts_s: 8, every_s: 4}]", "8 is not below every_s"),
        ("faults: [{kind: delay-spikes, low_s: 3, high_s: 1}]", "1 is below low_s"),
        ("fautls: []", "unknown key .did you mean 'faults'"),
        ("network: {jitter: fast}", "network.jitter .line 1.: 'fast'; expected a number"),
        ("network: {bandwidth_mbps: 0}", "network.bandwidth_mbps .*; expected a number greater than 0"),
        ("routers: [us]", "network.rtt_ms .*: missing; expected round trips between the regions"),
        ("clients: {us: 1}", "routers .*: missing; expected the region of each router"),
        ("routers: [us, eu]\nnetwork: {rtt_ms: {us: {eu: 9}}}", "clients .*: missing; expected the share"),
        ("routers: [us, us]\nclients: {us: 1}\nnetwork: {rtt_ms: {us: {eu: 9}}}", "a region twice"),
        ("routers: [us]\nnetwork: {rtt_ms: {us: {eu: 9}, eu: {us: 8}}}", r"rtt_ms.eu.us \(line 2\): 8; expected 9, as"),
        ("arrivals: {every_s: 5, lasts_s: 9}", "arrivals.lasts_s .*: 9; expected at most every_s"),
        ("faults: [", "1 error"),
    ],
)
def test_an_error_names_file_line_key_and_what_was_expected(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_scenario(written(tmp_path, text))
    assert str(raised.value).startswith(f"{tmp_path}/two-faults.yaml: 1 error\n")


def test_a_file_that_does_not_fit_the_fleet_says_what_the_fleet_has(tmp_path: Path) -> None:
    path = written(tmp_path, "faults: [{kind: kill, replica: x-0}]")
    with pytest.raises(UnknownReplica, match=r"two-faults.yaml: no replica named 'x-0'; the fleet has: us-ashburn-0"):
        chosen_scenario(path, FLEET)
    path = written(tmp_path, "fleet: {profile: {replica: nearest, name: 9xH100}}")
    with pytest.raises(UnknownProfile, match=r"two-faults.yaml: .*9xH100"):
        chosen_scenario(path, FLEET)
    path = written(tmp_path, "faults: [{kind: partition, region: x}]")
    with pytest.raises(ScenarioError, match=r"two-faults.yaml: no replica in region 'x'; the fleet has replicas in"):
        chosen_scenario(str(path), FLEET)
    path = written(tmp_path, "routers: [us-ashburn]\nnetwork: {rtt_ms: {us-ashburn: {eu-frankfurt: 95}}}")
    with pytest.raises(ScenarioError, match=r"two-faults.yaml: network.rtt_ms: no round trip .* and 'ap-seoul'"):
        chosen_scenario(path, FLEET)


def test_a_name_is_no_file_and_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert chosen_scenario("killed", FLEET) == "killed"
    with pytest.raises(UnknownScenario, match=r"no scenario named 'kiled'; there are: steady, .* and files"):
        chosen_scenario("kiled", FLEET)
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read"):
        chosen_scenario(tmp_path / "none.yaml", FLEET)


def test_a_network_of_a_file_changes_jitter_bandwidth_and_windows_of_any_fleet(tmp_path: Path) -> None:
    text = "network: {jitter: 0.3, bandwidth_mbps: 80, tcp_windows: false}"
    for replica, before in zip(
        read_scenario(written(tmp_path, text)).applied_to(FLEET).replicas, FLEET.replicas, strict=True
    ):
        assert (replica.link.jitter, replica.link.bytes_per_s, replica.link.tcp_windows) == (0.3, 1e7, False)
        assert replica.link.rtt_s == before.link.rtt_s
    assert find_scenario(Scenario()).applied_to(FLEET) is FLEET
