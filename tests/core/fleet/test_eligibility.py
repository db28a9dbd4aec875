"""Who may serve a request: what a panic opens, what stays shut, and a region that is cut off as one event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.fleet.eligibility import CandidateSet
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import HealthState, ReplicaSpec
from gorgo.core.limits import OutlierLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch, HealthChanged, Hold, RegionChanged
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, FAILED, a_request, dispatched, finished, make_router, rejected, submitted

# --- Who may serve a request: what a panic opens, to whom, and what stays shut.


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
    assert fleet.timers.next_s == 5.0, "and no back-off is cut short"


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


# --- A region that is cut off is one event; a cold replica is not given everything; who may serve where.


FLEET = [ReplicaSpec("e0", "east"), ReplicaSpec("e1", "east"), ReplicaSpec("w0", "west")]


def fleet(**limits: object) -> Router:
    return make_router(replicas=FLEET, limits=RouterLimits(**limits))  # type: ignore[arg-type]


def test_a_region_whose_replicas_all_fail_one_probe_is_left_out_at_once() -> None:
    router = fleet(panic_threshold=0.0)
    router.replicas.on_probe("e0", None, now=10.0)
    assert router.view.unreachable_regions == frozenset()
    router.replicas.on_probe("e1", None, now=11.0)
    assert router.view.unreachable_regions == frozenset({"east"})
    assert router.view.health_states() == {"e0": "ejected", "e1": "ejected", "w0": "healthy"}
    assert dispatched(submitted(router, a_request(), now=11.0)).replica == "w0"


def test_loss_and_return_of_a_region_are_events_of_the_region_and_of_each_replica() -> None:
    router = fleet(panic_threshold=0.0)
    for name in ("e0", "e1", "w0"):
        router.replicas.on_probe(name, None, now=10.0)
    ejected = [HealthChanged(name, "ejected", by="region", for_s=5.0) for name in ("e0", "e1")]
    assert list(router.fleet_events) == [RegionChanged("east", reachable=False), *ejected]
    router.fleet_events.clear()
    router.replicas.on_probe("e0", 0.01, now=11.0)
    router.replicas.on_probe("e0", 0.01, now=12.0)
    assert set(router.fleet_events) == {
        HealthChanged("e0", "half_open"),
        RegionChanged("east", reachable=True),
        HealthChanged("e1", "half_open"),
        HealthChanged("e0", "healthy"),
    }


def test_region_that_leaves_the_fleet_while_unreachable_is_reported_as_reachable() -> None:
    router = fleet(panic_threshold=0.0)
    for name in ("e0", "e1"):
        router.replicas.on_probe(name, None, now=10.0)
    router.fleet_events.clear()
    router.replicas.set_fleet([FLEET[2]], now=11.0)
    assert list(router.fleet_events) == [RegionChanged("east", reachable=True)]


def test_a_region_that_is_cut_off_is_left_out_however_few_are_left() -> None:
    """Panic is for judgements that may be wrong. That nobody answers a ping is none."""
    east = [ReplicaSpec(f"e{number}", "east") for number in range(6)]
    router = make_router(replicas=[*east, ReplicaSpec("w0", "west"), ReplicaSpec("w1", "west")])
    for number in range(6):
        router.replicas.on_probe(f"e{number}", None, now=10.0)
    sent = [dispatched(submitted(router, a_request(request_id=f"r{n}"), now=11.0)) for n in range(8)]
    assert {dispatch.replica for dispatch in sent} <= {"w0", "w1"}


def test_when_nobody_at_all_answers_everybody_is_tried() -> None:
    router = fleet()
    for now in (10.0, 11.0, 12.0):
        for replica in FLEET:
            router.replicas.on_probe(replica.name, None, now=now)
    assert set(router.view.health_states().values()) == {"ejected"}
    assert dispatched(submitted(router, a_request(), now=12.0)).replica in {"e0", "e1", "w0"}


def test_failures_far_apart_are_no_cut() -> None:
    router = fleet(region_window_s=30.0)
    router.replicas.on_probe("e0", None, now=10.0)
    router.replicas.on_probe("e1", None, now=50.0)
    assert router.view.unreachable_regions == frozenset()


@pytest.mark.parametrize(("second_s", "cut"), [(40.0, True), (40.1, False)])
def test_failures_within_the_window_are_a_cut(second_s: float, cut: bool) -> None:
    router = fleet(region_window_s=30.0, panic_threshold=0.0)
    router.replicas.on_probe("e0", None, now=10.0)
    router.replicas.on_probe("e1", None, now=second_s)
    assert router.view.unreachable_regions == ({"east"} if cut else frozenset())


def test_a_replica_that_answered_in_between_has_not_failed() -> None:
    router = fleet()
    router.replicas.on_probe("e0", None, now=10.0)
    router.replicas.on_probe("e0", 0.02, now=11.0)
    router.replicas.on_probe("e1", None, now=12.0)
    assert router.view.unreachable_regions == frozenset()
    assert set(router.view.health_states().values()) == {"healthy"}


def test_a_region_that_answers_again_lets_in_its_own_replicas_alone() -> None:
    router = make_router(replicas=[*FLEET, ReplicaSpec("w1", "west")], limits=RouterLimits(panic_threshold=0.0))
    for name in ("e0", "e1", "w0", "w1"):
        router.replicas.on_probe(name, None, now=10.0)
    assert router.view.unreachable_regions == {"east", "west"}
    router.replicas.on_probe("e1", 0.02, now=11.0)
    assert router.view.unreachable_regions == {"west"}
    assert {name for name, state in router.view.health_states().items() if state == "ejected"} == {"w0", "w1"}


def test_a_region_cut_off_again_ejects_again() -> None:
    router = fleet(panic_threshold=0.0)
    for round_s in (10.0, 50.0):
        for name in ("e0", "e1"):
            router.replicas.on_probe(name, None, now=round_s)
        assert [router.view.health_states()[name] for name in ("e0", "e1")] == ["ejected", "ejected"]
        for name in ("e0", "e1", "e0", "e1"):
            router.replicas.on_probe(name, 0.02, now=round_s + 5.0)
        assert [router.view.health_states()[name] for name in ("e0", "e1")] == ["healthy", "healthy"]


def test_a_replica_that_left_does_not_count_as_failed_when_its_name_comes_back() -> None:
    router = fleet()
    router.replicas.on_probe("e0", None, now=10.0)
    router.replicas.set_fleet(FLEET[1:], now=11.0)
    router.replicas.set_fleet(FLEET, now=12.0)
    router.replicas.on_probe("e1", None, now=13.0)
    assert router.view.unreachable_regions == frozenset()


def test_a_region_that_answers_again_may_be_tried_at_once() -> None:
    router = fleet(outlier=OutlierLimits(base_s=100.0))
    for name in ("e0", "e1"):
        router.replicas.on_probe(name, None, now=10.0)
    router.replicas.on_probe("e1", 0.02, now=20.0)
    assert router.view.unreachable_regions == frozenset()
    assert set(router.view.health_states().values()) == {"half_open", "healthy"}


def test_a_replica_that_was_out_of_reach_may_be_tried_as_soon_as_it_answers() -> None:
    """However long its back-off has grown: what it was ejected for is over."""
    router = fleet(outlier=OutlierLimits(base_s=100.0))
    for now in (10.0, 11.0, 12.0):
        router.replicas.on_probe("w0", None, now=now)
    assert router.view.health_states()["w0"] == "ejected"
    router.replicas.on_probe("w0", 0.02, now=13.0)
    assert router.view.health_states()["w0"] == "half_open"
    router.replicas.on_probe("w0", 0.02, now=14.0)
    assert router.view.health_states()["w0"] == "healthy"


def test_a_single_replica_is_ejected_by_its_own_count() -> None:
    router = fleet()
    router.replicas.on_probe("w0", None, now=10.0)
    assert (router.view.health_states()["w0"], router.view.unreachable_regions) == ("healthy", frozenset())
    for now in (11.0, 12.0):
        router.replicas.on_probe("w0", None, now=now)
    assert (router.view.health_states()["w0"], router.view.unreachable_regions) == ("ejected", frozenset({"west"}))


def test_a_region_that_leaves_the_fleet_is_forgotten() -> None:
    router = fleet()
    for name in ("e0", "e1"):
        router.replicas.on_probe(name, None, now=10.0)
    router.replicas.set_fleet([FLEET[2]], now=20.0)
    assert router.view.unreachable_regions == frozenset()


def test_a_region_whose_replicas_were_all_replaced_is_there_again_when_the_new_one_answers() -> None:
    router = fleet()
    for name in ("e0", "e1"):
        router.replicas.on_probe(name, None, now=10.0)
    router.replicas.set_fleet([ReplicaSpec("e2", "east"), FLEET[2]], now=20.0)
    router.replicas.on_probe("e2", 0.02, now=21.0)
    assert router.view.unreachable_regions == frozenset()


def test_a_request_goes_only_where_it_may() -> None:
    router = fleet()
    request = replace(a_request(), regions=frozenset({"west"}))
    dispatch = dispatched(submitted(router, request, now=0.0))
    assert (dispatch.replica, dispatch.decision.excluded) == ("w0", {"e0": "region", "e1": "region"})


def test_a_request_that_may_go_nowhere_is_a_403_not_an_outage() -> None:
    refusal = rejected(submitted(fleet(), replace(a_request(), regions=frozenset({"south"})), now=0.0))
    assert (refusal.status, refusal.code) == (403, "region_not_allowed")
    assert "south" in refusal.message


def test_a_request_whose_model_is_served_elsewhere_only_is_told_so_and_not_to_come_back() -> None:
    served = [replace(FLEET[0], models=("large",)), replace(FLEET[2], models=("small",))]
    limits = OverloadLimits(no_replica_wait_s=2.0)
    router = make_router(replicas=served, limits=RouterLimits(overload=limits))
    large = replace(a_request(model="large"), regions=frozenset({"west"}))
    refusal = rejected(submitted(router, large, now=0.0))
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (403, "region_not_allowed", None)
    assert dispatched(submitted(router, replace(large, regions=frozenset({"east"})), now=0.0)).replica == "e0"


def test_a_request_whose_region_is_down_is_a_503_and_goes_nowhere_else() -> None:
    router = fleet()
    router.replicas.drain("w0", now=0.0)
    refusal = rejected(submitted(router, replace(a_request(), regions=frozenset({"west"})), now=0.0))
    assert (refusal.status, refusal.code) == (503, "no_replica")


def test_a_retry_stays_where_it_may() -> None:
    router = fleet()
    request = replace(a_request(), regions=frozenset({"east"}))
    first = dispatched(submitted(router, request, now=0.0))
    second = dispatched(finished(router, first.attempt_id, FAILED, now=0.1))
    assert {first.replica, second.replica} == {"e0", "e1"}
    assert rejected(finished(router, second.attempt_id, FAILED, now=0.2)).status == 502


def test_a_request_bound_to_a_replica_elsewhere_is_a_403() -> None:
    """A follow-up goes where its past is held, and no further than it may."""
    router = fleet()
    bound = replace(a_request(pinned_replica="w0"), regions=frozenset({"east"}))
    refusal = rejected(submitted(router, bound, now=0.0))
    assert (refusal.status, refusal.code) == (403, "region_not_allowed")
    assert "its stored response is elsewhere" in refusal.message
    assert dispatched(submitted(router, replace(bound, regions=frozenset({"west"})), now=0.0)).replica == "w0"


def test_a_request_bound_to_a_replica_that_moves_while_it_waits_does_not_follow() -> None:
    limits = OverloadLimits(queue_enabled=True, max_concurrency_per_replica=1, no_replica_wait_s=2.0)
    router = make_router(replicas=FLEET, policy="gorgo-ms", limits=RouterLimits(overload=limits))
    first = dispatched(submitted(router, a_request("first", pinned_replica="e0"), now=0.0))
    waits = replace(a_request("waits", pinned_replica="e0"), regions=frozenset({"east"}))
    assert isinstance(submitted(router, waits, now=0.0)[-1], Hold)
    router.replicas.set_fleet([replace(FLEET[0], region="west"), *FLEET[1:]], now=1.0)
    assert not any(isinstance(action, Dispatch) for action in finished(router, first.attempt_id, COMPLETED, now=1.0))
    assert rejected(router.handle_timer(now=9.0)).code == "no_replica"


def test_a_replica_that_joins_gets_more_by_and_by() -> None:
    router = make_router("a", limits=RouterLimits(slow_start_s=7.0))
    router.replicas.set_fleet([ReplicaSpec("new", "here"), ReplicaSpec("a", "region-of-a")], now=100.0)
    router.replicas.on_probe("new", 0.001, now=100.0)  # nearest by far
    router.replicas.on_probe("a", 0.01, now=100.0)

    def sent_to_new(count: int, now: float) -> int:
        names = [
            dispatched(submitted(router, a_request(f"{now}-{number}"), now=now)).replica for number in range(count)
        ]
        return names.count("new")

    assert sent_to_new(10, 100.0) == 2
    assert sent_to_new(10, 101.0) == 2  # four in all: it doubles each second
    assert sent_to_new(300, 107.0) == 300


def test_a_retry_goes_to_a_replica_on_its_ramp_when_nobody_else_is_left() -> None:
    router = make_router("old", limits=RouterLimits(slow_start_s=10.0))
    router.replicas.set_fleet([ReplicaSpec("old", "here"), ReplicaSpec("new", "here")], now=1.0)
    router.replicas.on_probe("new", 0.5, now=1.0)  # farther by far
    for number in range(5):  # two are the bound of the new one
        first = dispatched(submitted(router, a_request(f"r{number}"), now=1.0))
        assert first.replica == "old"
        assert (
            dispatched(
                finished(
                    router, first.attempt_id, Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="no_content"), now=1.0
                )
            ).replica
            == "new"
        )
        # In good standing, so that it is the bound of the new one that matters.
        for name in (f"well-{number}", f"too-{number}"):
            finished(router, dispatched(submitted(router, a_request(name), now=1.0)).attempt_id, COMPLETED, now=1.0)


def test_a_readmitted_replica_is_on_its_ramp_and_the_last_one_left_is_not() -> None:
    router = make_router("a", "b", limits=RouterLimits(slow_start_s=7.0))
    for now in (1.0, 2.0, 3.0):
        router.replicas.on_probe("a", None, now=now)
    router.handle_timer(now=8.0)
    router.replicas.on_probe("a", 0.001, now=8.0)
    names = [dispatched(submitted(router, a_request(f"r{number}"), now=8.0)).replica for number in range(5)]
    assert names == ["a", "a", "b", "b", "b"]
    router.replicas.drain("b", now=8.0)
    assert dispatched(submitted(router, a_request("last"), now=8.0)).replica == "a"


def test_a_fleet_that_fails_everything_is_not_sent_three_times_the_load() -> None:
    limits = RouterLimits(retry_budget_ratio=0.2, retry_budget_minimum=2, outlier=OutlierLimits(failures=10**6))
    router = make_router("a", "b", "c", limits=limits)
    attempts = 0
    for number in range(100):
        actions = submitted(router, a_request(f"r{number}"), now=1.0)
        while isinstance(actions[-1], Dispatch):
            attempts += 1
            actions = finished(router, actions[-1].attempt_id, FAILED, now=1.0)
    assert 100 < attempts <= 100 + max(2, 0.2 * 100)


def test_a_replica_that_is_gone_costs_no_budget() -> None:
    gone = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed")
    router = make_router("a", "b", limits=RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=0))
    for number in range(3):
        first = dispatched(submitted(router, a_request(f"r{number}"), now=1.0))
        second = dispatched(finished(router, first.attempt_id, gone, now=1.0))
        router.on_finish(second.attempt_id, COMPLETED, now=1.0)


def test_a_fleet_of_which_nobody_listens_is_a_503_that_says_when_to_come_back() -> None:
    gone = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed")
    router = make_router("a", "b")
    for number in range(5):  # before they are ejected, and in the panic after it
        first = dispatched(submitted(router, a_request(f"r{number}"), now=1.0))
        second = dispatched(finished(router, first.attempt_id, gone, now=1.0))
        refusal = rejected(finished(router, second.attempt_id, gone, now=1.0))
        assert (refusal.status, refusal.code, refusal.retry_after_s) == (503, "no_replica", 1.0)


def test_who_is_refused_while_another_is_well_is_told_of_the_failure() -> None:
    gone = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="connect_failed")
    router = make_router("a", "b", limits=RouterLimits(max_attempts=1))
    first = dispatched(submitted(router, a_request(), now=1.0))
    assert rejected(finished(router, first.attempt_id, gone, now=1.0)).status == 502


def test_a_time_out_costs_budget() -> None:
    slow = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout")
    router = make_router("a", "b", limits=RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=0))
    first = dispatched(submitted(router, a_request("r"), now=1.0))
    assert rejected(finished(router, first.attempt_id, slow, now=1.0)).status == 504


@pytest.mark.parametrize("error", ["no_content", "protocol_error"])
def test_an_answer_that_is_none_costs_budget(error: str) -> None:
    """The replica has done its work, whatever it made of it."""
    router = make_router("a", "b", limits=RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=0))
    first = dispatched(submitted(router, a_request("r"), now=1.0))
    outcome = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error=error)
    assert rejected(finished(router, first.attempt_id, outcome, now=1.0)).status == 502


def test_a_fleet_that_breaks_every_connection_is_not_sent_three_times_the_load() -> None:
    broke = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected")
    router = make_router("a", "b", "c", limits=RouterLimits(retry_budget_ratio=0.2, retry_budget_minimum=2))
    attempts = 0
    for number in range(100):
        actions = submitted(router, a_request(f"r{number}"), now=1.0)
        while isinstance(actions[-1], Dispatch):
            attempts += 1
            actions = finished(router, actions[-1].attempt_id, broke, now=1.0)
    before_all_are_ejected = 2 * 3
    assert 100 < attempts <= 100 + before_all_are_ejected + 0.2 * 100


def test_a_replica_that_dies_with_many_requests_costs_no_budget_while_another_is_well() -> None:
    broke = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="disconnected")
    router = make_router("a", "b", limits=RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=0))
    first = [dispatched(submitted(router, a_request(f"r{number}"), now=1.0)) for number in range(50)]
    again = [dispatched(finished(router, dispatch.attempt_id, broke, now=1.0)) for dispatch in first]
    assert {dispatch.replica for dispatch in again} == {"b"}
