"""Scenarios from files: the same records as the named ones, and errors that name file, line and key."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from gorgo.errors import ConfigError, ScenarioError, UnknownProfile, UnknownReplica, UnknownScenario
from gorgo.lab.sim.faults import DelaySpikes, FailFast, Kill, PeriodicStall, Slow
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
from tests.lab.sim.fleets import three_regions

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
    page = (Path(__file__).parents[4] / "docs" / "reference.md").read_text()
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
