"""Who may serve a request: what a panic opens, to whom, and what stays shut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import HealthState, ReplicaSpec
from gorgo.core.limits import OutlierLimits


def fleet_of(*specs: ReplicaSpec, panic_threshold: float = 0.5) -> Fleet:
    limits = OutlierLimits(failures=1, base_s=5.0)
    made = Fleet(stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=panic_threshold, ejection=limits)
    made.replace(specs)
    return made


def named(names: str, *, panic_threshold: float = 0.5) -> Fleet:
    return fleet_of(*(ReplicaSpec(name, f"region-of-{name}") for name in names), panic_threshold=panic_threshold)


def fail(fleet: Fleet, names: str, *, by: str, now: float = 0.0) -> None:
    for name in names:
        health = fleet.member(name).health
        if by == "attempts":
            health.attempt_failed(dispatched_s=now, now=now)
        else:
            health.probe_failed(now=now)


@pytest.mark.parametrize(
    ("attempts", "probes", "names", "panic"),
    [
        ("", "", "abcd", False),
        ("ab", "", "cd", False),  # half of them are well
        ("abc", "", "d", True),  # the ejection of the three ends sooner, and stands until then
        ("abcd", "", "abcd", True),  # nobody is well: what failed may be the fault of load
        ("ab", "cd", "ab", True),  # who answers no ping is asked by none who can ask another
        ("", "abcd", "abcd", True),
        ("", "abc", "d", True),
    ],
)
def test_in_a_panic_failed_attempts_are_doubted_before_unanswered_pings(
    attempts: str, probes: str, names: str, panic: bool
) -> None:
    fleet = named("abcd")
    fail(fleet, attempts, by="attempts")
    fail(fleet, probes, by="probes")
    eligible = fleet.eligibility.for_model(None)
    assert ("".join(eligible.names), eligible.panic) == (names, panic)
    assert eligible.excluded == {name: "ejected" for name in "abcd" if name not in names}
    assert eligible.is_all == (names == "abcd")


def test_with_no_healthy_replica_a_trial_under_way_excludes_none() -> None:
    fleet = named("ab")
    fail(fleet, "ab", by="attempts")
    fleet.handle_timer(now=5.0)
    member = fleet.member("a")
    member.health.attempt_started("r/1")
    assert fleet.eligibility.for_model(None).names == ("a", "b")


def test_a_threshold_of_zero_knows_no_panic() -> None:
    fleet = named("ab", panic_threshold=0.0)
    fail(fleet, "ab", by="attempts")
    eligible = fleet.eligibility.for_model(None)
    assert (eligible.names, eligible.panic) == ((), False)
    assert fleet.next_timer() == 5.0, "and no back-off is cut short"


def test_a_panic_is_judged_over_the_replicas_that_could_serve_the_request() -> None:
    """One of two of a region is ill: half of those who could serve there, a quarter of all."""
    east = [ReplicaSpec(name, "east") for name in "ab"]
    fleet = fleet_of(*east, *(ReplicaSpec(name, "west") for name in "cd"))
    fail(fleet, "ab", by="attempts")
    only_east = fleet.eligibility.for_model(None, frozenset({"east"}))
    assert (only_east.names, only_east.panic) == (("a", "b"), True)
    assert only_east.excluded == {"c": "region", "d": "region"}
    assert fleet.eligibility.for_model(None).names == ("c", "d")


def test_rows_are_in_the_order_of_slots_whatever_the_order_of_joining() -> None:
    fleet = named("abc")
    fleet.replace([ReplicaSpec(name, "x") for name in ("b", "c", "late")])
    assert fleet.eligibility.for_model(None).names == ("late", "b", "c")
    assert fleet.eligibility.for_model(None).slots.tolist() == [0, 1, 2]


def excluded(eligible: CandidateSet) -> dict[str, str]:
    return dict(eligible.excluded)


def test_later_exclusions_stand_beside_earlier_ones_with_their_reasons() -> None:
    fleet = named("abcd")
    fleet.drain("d", True, now=0.0)
    left = fleet.eligibility.for_model(None).excluding({"c", "a"})
    assert (left.names, left.slots.tolist(), left.is_all) == (("b",), [1], False)
    assert excluded(left) == {"d": "draining", "a": "tried", "c": "tried"}
    assert excluded(left.excluding({"b"}, "full")) == {"d": "draining", "a": "tried", "c": "tried", "b": "full"}


def test_excluding_no_replica_leaves_the_fleet_whole() -> None:
    everyone = named("ab").eligibility.for_model(None)
    assert everyone.excluding(set()).is_all
    assert everyone.excluding({"elsewhere"}).is_all
    assert not everyone.excluding({"a"}).is_all


def test_an_exclusion_keeps_the_panic() -> None:
    fleet = named("ab")
    fail(fleet, "ab", by="attempts")
    assert fleet.eligibility.for_model(None).excluding({"a"}).panic


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_pinned_request_has_its_replica_alone_as_a_candidate(names: str) -> None:
    fleet = named(names)
    only = fleet.eligibility.pinned(fleet.member("a"))
    assert (only.names, only.is_all, only.panic) == (("a",), names == "a", False)
    assert excluded(only) == {name: "pinned" for name in names if name != "a"}
    nobody = fleet.eligibility.none
    assert (nobody.names, nobody.is_all, nobody.panic) == ((), False, False)
    assert excluded(nobody) == dict.fromkeys(names, "pinned")


@pytest.mark.parametrize(
    ("specs", "model", "regions", "serves", "there"),
    [
        ([], "m", {"east"}, True, True),  # an empty fleet may fill
        ([ReplicaSpec("a", "east", ("m",))], "m", {"east"}, True, True),
        ([ReplicaSpec("a", "east", ("m",))], "m", {"west"}, True, False),
        ([ReplicaSpec("a", "east", ("m",))], "n", {"east"}, False, False),
        ([ReplicaSpec("a", "east", ("m",))], None, {"east"}, True, True),
        ([ReplicaSpec("a", "east")], "n", {"east"}, True, True),
        ([ReplicaSpec("a", "east", ("m",)), ReplicaSpec("b", "west")], "n", {"east"}, True, False),
        ([ReplicaSpec("a", "east", ("m",)), ReplicaSpec("b", "west", ("n",))], "n", {"east"}, True, False),
        ([ReplicaSpec("a", "east", ("m",)), ReplicaSpec("b", "west", ("n",))], "n", {"east", "west"}, True, True),
    ],
)
def test_models_and_regions_are_served_by_healthy_and_ejected_replicas_alike(
    specs: Sequence[ReplicaSpec], model: str | None, regions: set[str], serves: bool, there: bool
) -> None:
    fleet = fleet_of(*specs)
    for spec in specs:
        fail(fleet, spec.name, by="probes")
    assert fleet.eligibility.serves(model) is serves
    assert fleet.eligibility.has_replica_in(frozenset(regions), model) is there


def test_a_drain_counts_beside_models_and_regions_and_is_named_last() -> None:
    fleet = fleet_of(ReplicaSpec("a", "east", ("m",)), ReplicaSpec("b", "east", ("n",)), ReplicaSpec("c", "west"))
    for name in "abc":
        fleet.drain(name, True, now=0.0)
    assert excluded(fleet.eligibility.for_model("m", frozenset({"east"}))) == {
        "a": "draining",
        "b": "model",
        "c": "region",
    }


def test_a_listed_model_is_served_in_the_regions_of_its_replicas_and_of_those_for_any_model() -> None:
    fleet = fleet_of(ReplicaSpec("a", "us", ("m", "n")), ReplicaSpec("b", "eu", ("n",)), ReplicaSpec("c", "ap"))
    assert fleet.eligibility.regions_of_models() == {"m": {"us", "ap"}, "n": {"us", "eu", "ap"}}
    assert fleet_of(ReplicaSpec("c", "ap")).eligibility.regions_of_models() == {}


def expected(fleet: Fleet, model: str | None, regions: frozenset[str] | None, subset: frozenset[str] | None) -> object:
    """The naive twin: each replica is visited."""
    why: dict[str, str] = {}
    available = []
    for name, replica in fleet.replicas.items():
        if model is not None and replica.spec.models and model not in replica.spec.models:
            why[name] = "model"
        elif regions is not None and replica.spec.region not in regions:
            why[name] = "region"
        elif subset is not None and name not in subset:
            why[name] = "subset"
        elif replica.draining:
            why[name] = "draining"
        else:
            available.append(replica)
    healthy = [replica for replica in available if replica.health.state is HealthState.HEALTHY]
    panic = len(healthy) < 0.5 * len(available)
    left = [replica for replica in available if replica.health.can_accept]
    if panic and not healthy:
        left = [each for each in available if each.health.can_accept or not each.health.probe_down] or available
    why |= {replica.spec.name: "ejected" for replica in available if replica not in left}
    names = [replica.spec.name for replica in sorted(left, key=lambda replica: replica.slot)]
    return names, why, panic, len(left) == len(fleet.columns.salt)


@pytest.mark.parametrize("seed", range(8))
def test_candidates_are_those_of_a_visit_to_each_replica_after_any_events(seed: int) -> None:
    rng = np.random.default_rng(seed)
    specs = [ReplicaSpec(f"r{n}", "east" if n % 2 else "west", ("m",) if n % 3 else ()) for n in range(9)]
    fleet, now = fleet_of(*specs[:6]), 0.0
    for step in range(300):
        now += float(rng.uniform(0.0, 2.0))
        member = list(fleet.replicas.values())[rng.integers(len(fleet.replicas))]
        match rng.integers(8):
            case 0 | 1:
                member.health.attempt_failed(dispatched_s=now, now=now)
            case 2:
                fleet.probed(member, None, now=now)
            case 3:
                fleet.probed(member, 0.1, now=now)
            case 4:
                fleet.drain(member.spec.name, bool(rng.integers(2)), now=now)
            case 5:
                member.health.attempt_started(f"r/{step}")
            case 6:
                fleet.handle_timer(now=now)
            case _:
                fleet.replace([specs[n] for n in np.flatnonzero(rng.random(9) < 0.7)] or specs[:1])
        key = (
            [None, "m", "unlisted"][rng.integers(3)],
            [None, frozenset({"east"})][rng.integers(2)],
            [None, frozenset({"r0", "r1", "r4"})][rng.integers(2)],
        )
        found = fleet.eligibility.for_model(*key)
        assert (list(found.names), dict(found.excluded), found.panic, found.is_all) == expected(fleet, *key)
        assert [replica.slot for replica in found.replicas] == found.slots.tolist()
        assert all((replica in found) == (name in found.names) for name, replica in fleet.replicas.items())
        some = [replica for replica in found.replicas if rng.random() < 0.3]
        left = found.excluding_some(some, "busy")
        assert dict(left.excluded) == {**found.excluded, **{replica.spec.name: "busy" for replica in some}}
        assert left.names == tuple(name for name in found.names if fleet.replicas[name] not in some)


def test_name_that_no_replica_lists_is_served_by_those_that_may_have_it() -> None:
    """By any while one model is served; by those without a list once there are two; else by none."""
    fleet = named("abc")
    eligibility = fleet.eligibility
    assert eligibility.serves("x")
    fleet.list_models(fleet.member("a"), ("m",))
    fleet.list_models(fleet.member("b"), ("m",))
    assert eligibility.for_model("x").names == ("a", "b", "c")
    fleet.list_models(fleet.member("b"), ("n",))
    assert (eligibility.for_model("x").names, eligibility.serves("x")) == (("c",), True)
    fleet.list_models(fleet.member("c"), ("n",))
    assert (eligibility.for_model("x").names, eligibility.serves("x")) == ((), False)
    assert eligibility.for_model("n").names == ("b", "c")
    fleet.list_models(fleet.member("a"), ("n",))
    assert eligibility.for_model("x").names == ("a", "b", "c")
