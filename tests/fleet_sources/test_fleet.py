"""The sources of one proxy: results, failures, first sync, changes of the configuration, and what is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.config.fleet import FleetSourceConfig, ReplicaConfig
from gorgo.config.model import Config, ProxyConfig, RegionConfig
from gorgo.fleet_sources.entries import MAX_REPLICAS, Found, FoundReplica, ReplicaState
from gorgo.fleet_sources.fleet import FIRST_SYNC_S, MAX_SHOWN, FoundFleet

ONE = FleetSourceConfig(name="one", kind="dns", host="one.llm", port=1)
PODS = FleetSourceConfig(name="one", kind="pods", selector={"app": "engine"}, port=1)
TWO = replace(ONE, name="two")
A = ReplicaConfig(name="a", region="here", url="http://10.0.0.1:1")
B = ReplicaConfig(name="b", region="here", url="http://10.0.0.2:1")


def found(*entries: ReplicaConfig) -> Found:
    return Found(tuple(FoundReplica(entry) for entry in entries))


def config(*sources: FleetSourceConfig) -> Config:
    return Config(proxy=ProxyConfig(region="here"), regions=(RegionConfig(name="here"),), fleet_sources=sources)


def test_result_is_a_change_once() -> None:
    fleet = FoundFleet([ONE])
    changes: list[int] = []
    fleet.on_change = lambda: changes.append(1)
    assert fleet.apply_result("one", found(A), now=1.0) is not None
    assert fleet.apply_result("one", found(A), now=2.0) is None
    assert (len(changes), fleet.sources["one"].answered_s) == (1, 2.0)
    assert fleet.merged(config(ONE)).replicas == (A,)
    assert fleet.origin == {"a": "one"}


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "127.0.0.1", "127.8.9.1", "[::1]", "[fe80::1]", "[::ffff:169.254.169.254]"),
        *("0.0.0.0", "[::]", "255.255.255.255", "224.0.0.1", "[ff02::1]"),
    ],
)
def test_replica_at_an_address_of_the_own_machine_or_of_none_is_refused(host: str) -> None:
    for source in (ONE, PODS):
        fleet = FoundFleet([source])
        state = fleet.apply_result("one", found(A, replace(B, url=f"http://{host}:1")), now=1.0)
        assert state is not None
        assert host.strip("[]") in state.rejected["b"]
        assert fleet.merged(config(source)).replicas == (A,)


@pytest.mark.parametrize(
    "host",
    [
        # Other spellings that resolvers read as 127.0.0.1 or 169.254.169.254.
        *("localhost", "engine.localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "a.0x7f"),
        *("[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "[::127.0.0.1]"),
        # Services of clouds for their machines, at addresses of networks.
        *("[fd00:ec2::254]", "100.100.100.200", "168.63.129.16"),
        *("0.1.2.3", "240.0.0.1"),
    ],
)
def test_other_spellings_of_such_addresses_are_refused_where_a_name_may_be_too(host: str) -> None:
    fleet = FoundFleet([ONE])
    state = fleet.apply_result("one", found(A, replace(B, url=f"http://{host}:1")), now=1.0)
    assert state is not None
    assert "b" in state.rejected
    assert fleet.merged(config(ONE)).replicas == (A,)


@pytest.mark.parametrize(
    "host", ["engine-0.engines.llm", "10.0.0.5", "[fd00::5]", "100.64.0.7", "e2e", "0xdead.beef.llm"]
)
def test_usual_addresses_and_names_are_accepted(host: str) -> None:
    fleet = FoundFleet([ONE])
    near = replace(A, url=f"http://{host}:1")
    fleet.apply_result("one", found(near), now=1.0)
    (merged,) = fleet.merged(config(ONE)).replicas
    assert (merged.name, merged.url) == (near.name, near.url)


@pytest.mark.parametrize("host", ["169.254.169.254", "127.0.0.1", "[::1]"])
def test_local_addresses_are_accepted_where_the_source_allows_them(host: str) -> None:
    local = replace(PODS, local_addresses=True)
    fleet = FoundFleet([local])
    near, nobody = replace(A, url=f"http://{host}:1"), replace(B, url="http://0.0.0.0:1")
    fleet.apply_result("one", found(near, nobody), now=1.0)
    assert fleet.merged(config(local)).replicas == (near,)


def test_a_pod_has_an_address_and_a_name_in_dns_may_have_a_name() -> None:
    named = replace(A, url="http://metadata.internal:1")
    for source, urls in ((PODS, []), (ONE, [named.url])):
        fleet = FoundFleet([source])
        fleet.apply_result("one", found(named), now=1.0)
        assert [each.url for each in fleet.merged(config(source)).replicas] == urls


def test_empty_first_result_is_one() -> None:
    fleet = FoundFleet([ONE])
    assert fleet.apply_result("one", Found(), now=1.0) is not None
    assert fleet.sources["one"].synced


def test_source_that_fails_is_down_until_it_succeeds_and_its_replicas_stay() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    assert fleet.fail("one", "refused", now=2.0)
    assert not fleet.fail("one", "refused", now=3.0)
    assert fleet.merged(config(ONE)).replicas == (A,)
    (row,) = fleet.as_rows(5.0)
    assert (row["up"], row["error"], row["age_s"], row["replicas"]) == (False, "refused", 4.0, 1)
    assert fleet.succeed("one", now=6.0)
    assert not fleet.succeed("one", now=7.0)
    assert fleet.sources["one"].up


def test_first_result_is_waited_for_until_it_is_late() -> None:
    fleet = FoundFleet([ONE, TWO], now=10.0)
    fleet.apply_result("one", Found(), now=11.0)
    assert fleet.pending(12.0) == ["two"]
    assert fleet.pending(10.0 + FIRST_SYNC_S) == []


def test_other_configuration_keeps_the_replicas_until_its_first_result() -> None:
    fleet = FoundFleet([ONE, TWO])
    fleet.apply_result("one", found(A), now=1.0)
    fleet.apply_result("two", found(B), now=1.0)
    changed = replace(ONE, port=2)
    fleet.configure([changed], now=5.0)
    assert fleet.merged(config(changed)).replicas == (A,)
    assert not fleet.sources["one"].synced
    assert fleet.apply_result("two", found(B), now=6.0) is None
    assert not fleet.fail("two", "late", now=6.0)
    assert not fleet.succeed("two", now=6.0)
    fleet.apply_result("one", found(B), now=7.0)
    assert fleet.merged(config(changed)).replicas == (B,)


def test_same_configuration_changes_nothing() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    fleet.configure([ONE, TWO], now=5.0)
    assert fleet.sources["one"].synced
    assert fleet.pending(6.0) == ["two"]


def test_problems_are_listed_to_a_bound_and_counted() -> None:
    fleet = FoundFleet([ONE])
    bad = {f"p{n:03}": "bad" for n in range(MAX_SHOWN + 5)}
    fleet.apply_result("one", Found((FoundReplica(replace(A, region="mars")),), bad), now=1.0)
    fleet.merged(config(ONE))
    (row,) = fleet.as_rows(1.0)
    assert row["problem_count"] == MAX_SHOWN + 6
    assert row["problems"][0] == "a: its region 'mars' is not one of `regions`"
    assert len(row["problems"]) == MAX_SHOWN


def test_too_many_replicas_are_a_failure() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    many = found(*(replace(A, name=f"a{n}") for n in range(MAX_REPLICAS + 1)))
    assert fleet.apply_result("one", many, now=2.0) is None
    assert fleet.sources["one"].error == "10001 replicas; expected at most 10000"
    assert list(fleet.sources["one"].entries) == ["a"]


def test_replica_that_was_not_ready_joins_when_it_is() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", Found((FoundReplica(A, ReplicaState.NOT_READY),)), now=1.0)
    assert fleet.merged(config(ONE)).replicas == ()
    fleet.apply_result("one", found(A), now=2.0)
    fleet.apply_result("one", Found((FoundReplica(A, ReplicaState.NOT_READY),)), now=3.0)
    assert fleet.merged(config(ONE)).replicas == (replace(A, draining=True),)


def test_a_replica_that_announces_its_end_is_named_once_it_does_and_no_longer_when_it_is_gone() -> None:
    fleet = FoundFleet([ONE])
    for state, stopping in ((ReplicaState.READY, []), (ReplicaState.NOT_READY, []), (ReplicaState.STOPPING, ["a"])):
        assert fleet.apply_result("one", Found((FoundReplica(A, state), FoundReplica(B))), now=1.0) is not None
        fleet.merged(config(ONE))
        assert fleet.stopping() == stopping
    assert fleet.apply_result("one", Found((FoundReplica(A, ReplicaState.STOPPING), FoundReplica(B))), now=2.0) is None
    fleet.apply_result("one", found(B), now=3.0)
    fleet.merged(config(ONE))
    assert fleet.stopping() == []


def test_replica_that_comes_into_an_unknown_region_stays_as_it_was_and_is_named() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A, B), now=1.0)
    assert fleet.merged(config(ONE)).replicas == (A, B)
    mistyped = [replace(each, region="heer") for each in (A, B)]
    fleet.apply_result("one", found(*mistyped), now=2.0)
    for _ in range(2):  # a reload of the file merges again
        assert fleet.merged(config(ONE)).replicas == (A, B)
    (row,) = fleet.as_rows(3.0)
    assert (row["replicas"], row["problem_count"]) == (2, 2)
    assert row["problems"][0] == "a: its region 'heer' is not one of `regions`: it stays as it was, in 'here'"
    # It still drains and leaves as its source says.
    not_ready = Found((FoundReplica(mistyped[0], ReplicaState.NOT_READY),))
    fleet.apply_result("one", not_ready, now=4.0)
    assert fleet.merged(config(ONE)).replicas == (replace(A, draining=True),)
    fleet.apply_result("one", found(A), now=5.0)
    assert fleet.merged(config(ONE)).replicas == (A,)
    assert fleet.refused == {}


def test_replica_of_an_unknown_region_is_not_the_one_of_another_address() -> None:
    fleet = FoundFleet([ONE])
    fleet.apply_result("one", found(A), now=1.0)
    fleet.merged(config(ONE))
    fleet.apply_result("one", found(replace(A, url=B.url, region="heer")), now=2.0)
    assert fleet.merged(config(ONE)).replicas == ()
