"""The ramp of a replica that has come, or come back: from two in flight to 256, doubling by a fixed pace."""

from __future__ import annotations

import pytest

from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.slow_start import SlowStart
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import OutlierLimits


def ramp_of(*names: str, ramp_s: float = 7.0) -> tuple[Fleet, SlowStart]:
    fleet = Fleet(stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=0.5, ejection=OutlierLimits())
    fleet.replace([ReplicaSpec(name, "here") for name in names])
    return fleet, SlowStart(fleet, ramp_s=ramp_s)


@pytest.mark.parametrize(
    ("now", "allowed", "left_s"),
    [(100.0, 2.0, 7.0), (99.0, 2.0, 8.0), (101.0, 4.0, 6.0), (106.0, 128.0, 1.0), (107.0, float("inf"), None)],
)
def test_the_bound_of_a_ramp_doubles_each_seventh_of_it(now: float, allowed: float, left_s: float | None) -> None:
    fleet, slow_start = ramp_of("a")
    slow_start.begin(fleet.member("a"), now=100.0)
    assert slow_start.allowed(fleet.member("a"), now=now) == pytest.approx(allowed)
    assert slow_start.remaining_s(fleet.member("a"), now=now) == left_s


def test_a_replica_off_its_ramp_has_no_bound() -> None:
    fleet, slow_start = ramp_of("a", "b")
    slow_start.begin(fleet.member("a"), now=0.0)
    assert (slow_start.allowed(fleet.member("b"), now=0.0), slow_start.remaining_s(fleet.member("b"), now=0.0)) == (
        float("inf"),
        None,
    )
    _, without = ramp_of("a", ramp_s=0.0)
    without.begin(fleet.member("a"), now=0.0)
    assert without.allowed(fleet.member("a"), now=0.0) == float("inf")


@pytest.mark.parametrize(
    ("in_flight", "now", "names"),
    [
        ({"a": 1}, 0.0, "abc"),
        ({"a": 2}, 0.0, "bc"),
        ({"a": 3, "b": 9}, 1.0, "abc"),  # b is on no ramp
        ({"a": 4}, 1.0, "bc"),
        ({"a": 500}, 7.0, "abc"),
    ],
)
def test_a_replica_at_its_bound_is_excluded_with_the_reason(in_flight: dict[str, int], now: float, names: str) -> None:
    fleet, slow_start = ramp_of("a", "b", "c")
    slow_start.begin(fleet.member("a"), now=0.0)
    for name, count in in_flight.items():
        for _ in range(count):
            fleet.reserve(fleet.member(name), 10)
    eased = slow_start.exclude_full(fleet.eligibility.for_model(None), now=now)
    assert "".join(eased.names) == names
    assert dict(eased.excluded) == {name: "slow_start" for name in "abc" if name not in names}


def test_a_bound_does_not_count_where_all_replicas_are_at_theirs() -> None:
    fleet, slow_start = ramp_of("a", "b")
    for name in "ab":
        slow_start.begin(fleet.member(name), now=0.0)
        for _ in range(2):
            fleet.reserve(fleet.member(name), 10)
    assert slow_start.exclude_full(fleet.eligibility.for_model(None), now=0.0).names == ("a", "b")
    fleet.release(fleet.member("b"), 10)
    assert slow_start.exclude_full(fleet.eligibility.for_model(None), now=0.0).names == ("b",)


def test_a_ramp_that_is_over_stays_over_when_the_clock_goes_back() -> None:
    fleet, slow_start = ramp_of("a", "b")
    slow_start.begin(fleet.member("a"), now=0.0)
    for _ in range(9):
        fleet.reserve(fleet.member("a"), 10)
    assert slow_start.exclude_full(fleet.eligibility.for_model(None), now=7.0).names == ("a", "b")
    assert slow_start.exclude_full(fleet.eligibility.for_model(None), now=1.0).names == ("a", "b")
    assert slow_start.remaining_s(fleet.member("a"), now=1.0) is None
