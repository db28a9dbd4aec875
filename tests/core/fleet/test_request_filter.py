"""Which replicas may serve a request now: the whole rule, and each of its pauses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.fleet.request_filter import (
    FIRST_PAUSE_S,
    FIRST_TRIAL_S,
    LONGEST_TRIAL_S,
    MAX_KINDS,
    MOST_IN_A_ROW,
    REFUSALS_OF_A_KIND,
    WITHOUT_KIND_S,
    RequestFilter,
)
from gorgo.core.limits import OutlierLimits, RouterLimits
from gorgo.core.messages.actions import Dispatch, Reject
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.router import Router
from tests.core.routers import BUSY, COMPLETED, a_request, dispatched, finished, make_router, rejected, specs, submitted

# -- the whole rule


def filter_of(*names: str, ramp_s: float = 7.0) -> tuple[Fleet, RequestFilter]:
    fleet = Fleet(stale_after_s=90.0, rtt_ewma_alpha=0.3, panic_threshold=0.5, ejection=OutlierLimits())
    fleet.replace([ReplicaSpec(name, "here") for name in names])
    return fleet, RequestFilter(fleet, slow_start_s=ramp_s)


def names_of(request_filter: RequestFilter, request: RouteRequest, now: float) -> str:
    return "".join(request_filter.eligible(request, now).names)


def refuse(request_filter: RequestFilter, fleet: Fleet, name: str, request: RouteRequest, *, now: float = 0.0) -> None:
    for _ in range(REFUSALS_OF_A_KIND):
        request_filter.refused_kinds.on_proven(fleet.member(name), request, 404, now=now)


def busy(request_filter: RequestFilter, fleet: Fleet, name: str, *, now: float = 0.0) -> None:
    request_filter.busy.on_busy(fleet.member(name), dispatched_s=now, retry_after_s=None, now=now)


def answer_shortly(request_filter: RequestFilter, fleet: Fleet, name: str, *, now: float = 0.0) -> None:
    request_filter.short_answers.on_short(fleet.member(name), doubtful=True, now=now)


def fill_ramp(request_filter: RequestFilter, fleet: Fleet, name: str, *, now: float = 0.0) -> None:
    request_filter.slow_start.begin(fleet.member(name), now=now)
    for _ in range(2):
        fleet.reserve(fleet.member(name), 10)


PAUSES = ("refuses", "busy", "answers shortly", "slow_start", "warming")


def pause(request_filter: RequestFilter, fleet: Fleet, name: str, why: str, request: RouteRequest) -> None:
    """Begin the pause that excludes with the reason `why`."""
    if why == "refuses":
        refuse(request_filter, fleet, name, request)
    elif why == "busy":
        busy(request_filter, fleet, name)
    elif why == "answers shortly":
        answer_shortly(request_filter, fleet, name)
    elif why == "warming":
        fleet.warming[fleet.member(name)] = None
    else:
        fill_ramp(request_filter, fleet, name)


@pytest.mark.parametrize("why", PAUSES)
def test_a_paused_replica_is_excluded_with_the_reason(why: str) -> None:
    fleet, request_filter = filter_of("a", "b", "c")
    request = a_request()
    pause(request_filter, fleet, "b", why, request)
    found = request_filter.eligible(request, 0.1)
    assert (found.names, dict(found.excluded)) == (("a", "c"), {"b": why})


@pytest.mark.parametrize("why", PAUSES)
def test_a_pause_does_not_count_where_all_candidates_are_in_it(why: str) -> None:
    fleet, request_filter = filter_of("a")
    request = a_request()
    pause(request_filter, fleet, "a", why, request)
    assert names_of(request_filter, request, 0.1) == "a"


def test_the_pauses_together_leave_a_replica_too() -> None:
    fleet, request_filter = filter_of("a", "b", "c", "d")
    request = a_request()
    for name, why in zip("abcd", PAUSES[:4], strict=True):
        pause(request_filter, fleet, name, why, request)
    found = request_filter.eligible(request, 0.1)
    assert found.names == ("d",)
    assert dict(found.excluded) == {"a": "refuses", "b": "busy", "c": "answers shortly"}, "slow start comes last"


@pytest.mark.parametrize("why", PAUSES)
def test_a_pinned_request_reaches_its_replica_in_any_pause(why: str) -> None:
    fleet, request_filter = filter_of("a", "b")
    request = a_request(pinned_replica="a")
    pause(request_filter, fleet, "a", why, request)
    assert names_of(request_filter, request, 0.1) == "a"


def test_a_retry_goes_to_a_replica_at_its_limit_where_the_others_are_tried() -> None:
    fleet, request_filter = filter_of("a", "b")
    fill_ramp(request_filter, fleet, "a")
    assert request_filter.untried(a_request(), {"b"}, 0.0).names == ("a",)
    assert not request_filter.untried(a_request(pinned_replica="a"), set(), 0.0).names


def test_replicas_that_leave_take_every_pause_along_and_those_that_join_begin_a_ramp() -> None:
    fleet, request_filter = filter_of("a", "b")
    request = a_request()
    for why in ("refuses", "busy", "answers shortly", "warming"):
        pause(request_filter, fleet, "a", why, request)
    change = fleet.replace([ReplicaSpec(name, "here") for name in "bc"])
    request_filter.on_fleet_change(change.joined, now=0.1)
    assert request_filter.slow_start.allowed(fleet.member("c"), now=0.1) == 2.0
    fleet.replace([ReplicaSpec(name, "here") for name in "ab"])
    assert sorted(names_of(request_filter, request, 0.1)) == ["a", "b"]


# -- refused kinds


def test_a_replica_gets_no_request_of_a_kind_after_three_proven_refusals_for_ten_seconds() -> None:
    fleet, request_filter = filter_of("a", "b")
    kind, other = a_request(model="m"), a_request(model="n")
    for count in range(REFUSALS_OF_A_KIND):
        assert names_of(request_filter, kind, 1.0) == "ab", f"after {count}"
        request_filter.refused_kinds.on_proven(fleet.member("a"), kind, 404, now=1.0)
    assert (names_of(request_filter, kind, 1.0), names_of(request_filter, other, 1.0)) == ("b", "ab")
    assert names_of(request_filter, kind, 1.0 + WITHOUT_KIND_S) == "ab"


def test_an_answer_of_its_kind_ends_a_refusal_at_once() -> None:
    fleet, request_filter = filter_of("a", "b")
    kind = a_request(model="m")
    refuse(request_filter, fleet, "a", kind)
    request_filter.refused_kinds.on_answer(fleet.member("a"), a_request(model="n"), now=0.0)
    assert names_of(request_filter, kind, 0.0) == "b"
    request_filter.refused_kinds.on_answer(fleet.member("a"), kind, now=0.0)
    assert names_of(request_filter, kind, 0.0) == "ab"


def test_the_oldest_kind_is_forgotten_beyond_the_bound() -> None:
    fleet, request_filter = filter_of("a", "b")
    kinds = [a_request(model=f"m{number}") for number in range(MAX_KINDS + 1)]
    for kind in kinds:
        refuse(request_filter, fleet, "a", kind)
    assert names_of(request_filter, kinds[0], 0.0) == "ab"
    assert {names_of(request_filter, kind, 0.0) for kind in kinds[1:]} == {"b"}


def test_a_doubtful_replica_gets_the_next_trial_after_its_pause() -> None:
    fleet, request_filter = filter_of("a", "b")
    answer_shortly(request_filter, fleet, "a")
    assert names_of(request_filter, a_request(), FIRST_TRIAL_S - 0.1) == "b"
    assert names_of(request_filter, a_request(), FIRST_TRIAL_S) == "ab"


# -- busy engines


#: No retry costs anything but the busy ones.
NO_BUDGET = RouterLimits(retry_budget_ratio=0.0, retry_budget_minimum=0, max_attempts=1)


def busy_first(router: Router, number: int, *, now: float, outcome: Outcome = BUSY) -> list[str]:
    """Serve a request on the first replica that is not busy; `a` is. Return the replicas that had it."""
    action: object = dispatched(submitted(router, a_request(f"r{number}", received_s=now), now=now))
    names = []
    while isinstance(action, Dispatch):
        names.append(action.replica)
        end = outcome if action.replica == "a" else COMPLETED
        action = next(iter(finished(router, action.attempt_id, end, now=now)), None)
    return names


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_replica_passes_each_request_to_an_open_one_outside_the_budget(status: int) -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    for number in range(100):
        names = busy_first(router, number, now=1.0 + number, outcome=replace(BUSY, status=status))
        assert names[-1] == "b"


def test_as_many_busy_replicas_are_passed_over_as_there_are() -> None:
    router = make_router(*"abcdef", limits=NO_BUDGET)
    action = dispatched(submitted(router, a_request(), now=1.0))
    names = [action.replica]
    for _ in range(5):
        action = dispatched(finished(router, action.attempt_id, BUSY, now=1.0))
        names.append(action.replica)
    assert names == list("abcdef")
    assert rejected(finished(router, action.attempt_id, BUSY, now=1.0)).code == "replicas_busy"
    # All pause now: an overloaded fleet gets each request once.
    action = dispatched(submitted(router, a_request("next"), now=1.1))
    assert rejected(finished(router, action.attempt_id, BUSY, now=1.1)).code == "replicas_busy"


def test_each_refusal_doubles_the_pause_and_the_last_one_ejects() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    now, pause_s = 1.0, FIRST_PAUSE_S
    for number in range(MOST_IN_A_ROW - 1):
        assert busy_first(router, 2 * number, now=now) == ["a", "b"]
        assert busy_first(router, 2 * number + 1, now=now + 0.99 * pause_s) == ["b"]
        now, pause_s = now + pause_s, 2 * pause_s
    assert router.view.health_states()["a"] == "healthy"
    assert busy_first(router, 100, now=now) == ["a", "b"]
    (view, _) = router.view.snapshots(now=now)
    assert (view.state, view.ejected_by, view.failures) == ("ejected", "busy", 0)
    # On probation one refusal is enough.
    router.replicas.on_probe("a", 0.01, now=now + 5.0)
    router.handle_timer(now=now + 5.0)
    assert busy_first(router, 101, now=now + 5.0) == ["a", "b"]
    assert router.view.snapshots(now=now + 5.0)[0].ejected_for_s == 10.0


def test_a_burst_of_refusals_is_one_and_an_answer_ends_the_count() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    burst = [dispatched(submitted(router, a_request(f"b{n}"), now=1.0)) for n in range(50)]
    for sent in burst:
        assert dispatched(finished(router, sent.attempt_id, BUSY, now=1.1)).replica == "b"
    assert router.view.health_states()["a"] == "healthy"
    now = 10.0
    for number in range(20):
        assert busy_first(router, number, now=now)[-1] == "b"
        served = dispatched(submitted(router, a_request(f"s{number}", pinned_replica="a"), now=now))
        router.on_first_token(served.attempt_id, now=now)
        finished(router, served.attempt_id, COMPLETED, now=now)
        now += 1.0
    assert router.view.health_states()["a"] == "healthy"


def test_retry_after_of_an_engine_holds_up_to_the_longest_back_off() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    assert busy_first(router, 0, now=1.0, outcome=replace(BUSY, status=429, retry_after_s=20.0)) == ["a", "b"]
    assert busy_first(router, 1, now=20.9) == ["b"]
    assert busy_first(router, 2, now=21.0, outcome=replace(BUSY, status=429, retry_after_s=1e9)) == ["a", "b"]
    assert busy_first(router, 3, now=80.9) == ["b"]
    assert busy_first(router, 4, now=81.0) == ["a", "b"]


def test_a_client_learns_when_the_first_busy_engine_is_open_again() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    first = dispatched(submitted(router, a_request(), now=1.0))
    second = dispatched(finished(router, first.attempt_id, replace(BUSY, status=429, retry_after_s=30.0), now=1.0))
    end = finished(router, second.attempt_id, replace(BUSY, status=429, retry_after_s=12.0), now=1.0)
    assert isinstance(end[0], Reject)
    assert (end[0].status, end[0].retry_after_s) == (429, 12.0)


def test_a_proxy_without_a_free_connection_is_no_busy_engine() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    full = Outcome(AttemptResult.BUSY, error="connections_exhausted")
    for number in range(20):
        sent = dispatched(submitted(router, a_request(f"r{number}"), now=1.0 + number))
        assert sent.replica == "a"
        finished(router, sent.attempt_id, full, now=1.0 + number)
    assert router.view.health_states()["a"] == "healthy"


def test_a_replica_that_leaves_takes_its_pause_along() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    busy_first(router, 0, now=1.0, outcome=replace(BUSY, retry_after_s=50.0))
    router.replicas.set_fleet(specs("b"), now=2.0)
    router.replicas.set_fleet(specs("a", "b"), now=3.0)
    router.replicas.on_probe("a", 0.001, now=3.0)
    assert busy_first(router, 1, now=3.0) == ["a", "b"]


# -- short answers


LONG = Outcome(AttemptResult.COMPLETED, status=200, output_tokens=50, sent=True)
SHORT = Outcome(AttemptResult.COMPLETED, status=200, output_tokens=1, sent=True, short=True)


def serve(router: Router, number: int, ends: dict[str, Outcome], *, now: float) -> str:
    """Serve a request of a gateway's client; return the replica that had it."""
    action = dispatched(submitted(router, a_request(f"r{number}", received_s=now), now=now))
    assert not finished(router, action.attempt_id, ends.get(action.replica, LONG), now=now + 0.01)
    return action.replica


def test_a_replica_of_short_answers_gets_trials_ever_more_rarely_and_all_its_requests_after_a_longer_one() -> None:
    router = make_router("a", "b", "c")
    served = [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(600)]
    assert served[:4] == ["a"] * 4, "three that make it doubtful, and one that should have been withheld"
    trials = [number for number, name in enumerate(served) if name == "a"][4:]
    assert [later - earlier for earlier, later in pairwise(trials)] == [41, 81, 161]
    assert router.view.health_states() == {"a": "healthy", "b": "healthy", "c": "healthy"}, "nothing is proven"
    now = 61.0 + LONGEST_TRIAL_S
    while serve(router, int(1000 * now), {}, now=now) != "a":
        now += 0.1
    for number in range(10):
        now += 0.1
        decision = dispatched(submitted(router, a_request(f"then{number}"), now=now)).decision
        assert "a" in decision.candidates


def test_a_longer_answer_to_a_request_before_the_first_short_one_changes_nothing() -> None:
    router = make_router("a", "b", "c")
    early = dispatched(submitted(router, a_request("early"), now=0.5))
    assert early.replica == "a"
    served = [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(2)]
    finished(router, early.attempt_id, LONG, now=1.2)
    served += [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(3, 20)]
    assert served.count("a") == 4, "three that make it doubtful, and one that should have been withheld"


def test_a_short_answer_of_another_replica_is_not_the_requests_being_like_that() -> None:
    router = make_router("a", "b", "c")
    early = dispatched(submitted(router, replace(a_request("early"), pinned_replica="b"), now=0.5))
    served = [serve(router, 0, {"a": SHORT}, now=1.0)]
    finished(router, early.attempt_id, SHORT, now=1.05)
    served += [serve(router, number, {"a": SHORT}, now=1.0 + number / 10) for number in range(1, 20)]
    assert served.count("a") == 4


def test_requests_that_get_short_answers_everywhere_pause_nobody() -> None:
    router = make_router(*"abcd")
    ends = dict.fromkeys("abcd", SHORT)
    served = [serve(router, number, ends, now=1.0 + number / 100) for number in range(100)]
    assert served[-50:] == ["a"] * 50, "each has had its turn, and the best is chosen again"


def test_an_answer_of_one_token_to_a_request_for_one_says_nothing() -> None:
    router = make_router("a", "b")
    one = Outcome(AttemptResult.COMPLETED, status=200, output_tokens=1, sent=True, short=None)
    assert {serve(router, number, {"a": one}, now=1.0 + number / 10) for number in range(50)} == {"a"}


def test_a_replica_that_leaves_is_forgotten() -> None:
    router = make_router("a", "b", "c")
    for number in range(10):
        serve(router, number, {"a": SHORT}, now=1.0 + number / 100)
    router.replicas.set_fleet(specs("b", "c"), now=2.0)
    router.replicas.set_fleet(specs("a", "b", "c"), now=2.1)
    decision = dispatched(submitted(router, a_request("r10"), now=2.2)).decision
    assert "a" in decision.candidates, "a new one of that name"


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), max_size=200), st.integers(1, 5))
def test_no_client_keeps_more_than_half_of_the_replicas_from_others(
    answers: list[tuple[bool, float]], count: int
) -> None:
    """Whatever a client sends, at least half of the replicas stay candidates, and none is ejected."""
    names = [f"r{number}" for number in range(count)]
    router, now = make_router(*names), 1.0
    for number, (short, pause_s) in enumerate(answers):
        now += pause_s
        serve(router, number, dict.fromkeys(names, SHORT) if short else {}, now=now)
        decision = dispatched(submitted(router, a_request(f"other{number}", received_s=now), now=now)).decision
        finished(router, f"other{number}/1", Outcome(AttemptResult.CLIENT_DISCONNECTED, sent=True), now=now)
        assert 2 * len(decision.candidates) >= count
    assert set(router.view.health_states().values()) == {"healthy"}


# -- slow start


@pytest.mark.parametrize(
    ("now", "allowed", "left_s"),
    [(100.0, 2.0, 7.0), (99.0, 2.0, 8.0), (101.0, 4.0, 6.0), (106.0, 128.0, 1.0), (107.0, float("inf"), None)],
)
def test_the_bound_of_a_ramp_doubles_each_seventh_of_it(now: float, allowed: float, left_s: float | None) -> None:
    fleet, request_filter = filter_of("a")
    request_filter.slow_start.begin(fleet.member("a"), now=100.0)
    assert request_filter.slow_start.allowed(fleet.member("a"), now=now) == pytest.approx(allowed)
    assert request_filter.slow_start.remaining_s(fleet.member("a"), now=now) == left_s


def test_a_replica_off_its_ramp_has_no_bound() -> None:
    fleet, request_filter = filter_of("a", "b")
    request_filter.slow_start.begin(fleet.member("a"), now=0.0)
    slow_start, off_ramp = request_filter.slow_start, fleet.member("b")
    assert slow_start.allowed(off_ramp, now=0.0) == float("inf")
    assert slow_start.remaining_s(off_ramp, now=0.0) is None
    _, without = filter_of("a", ramp_s=0.0)
    without.slow_start.begin(fleet.member("a"), now=0.0)
    assert without.slow_start.allowed(fleet.member("a"), now=0.0) == float("inf")


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
    fleet, request_filter = filter_of("a", "b", "c")
    request_filter.slow_start.begin(fleet.member("a"), now=0.0)
    for name, count in in_flight.items():
        for _ in range(count):
            fleet.reserve(fleet.member(name), 10)
    eased = request_filter.eligible(a_request(), now)
    assert "".join(eased.names) == names
    assert dict(eased.excluded) == {name: "slow_start" for name in "abc" if name not in names}


def test_a_bound_does_not_count_where_all_replicas_are_at_theirs() -> None:
    fleet, request_filter = filter_of("a", "b")
    for name in "ab":
        request_filter.slow_start.begin(fleet.member(name), now=0.0)
        for _ in range(2):
            fleet.reserve(fleet.member(name), 10)
    assert request_filter.eligible(a_request(), 0.0).names == ("a", "b")
    fleet.release(fleet.member("b"), 10)
    assert request_filter.eligible(a_request(), 0.0).names == ("b",)


def test_a_ramp_that_is_over_stays_over_when_the_clock_goes_back() -> None:
    fleet, request_filter = filter_of("a", "b")
    request_filter.slow_start.begin(fleet.member("a"), now=0.0)
    for _ in range(9):
        fleet.reserve(fleet.member("a"), 10)
    assert request_filter.eligible(a_request(), 7.0).names == ("a", "b")
    assert request_filter.eligible(a_request(), 1.0).names == ("a", "b")
    assert request_filter.slow_start.remaining_s(fleet.member("a"), now=1.0) is None


def test_a_replica_that_has_never_answered_a_probe_is_not_taken_for_a_near_one() -> None:
    router = make_router("known", policy="nearest")
    router.replicas.set_fleet(specs("known", "new"), now=0.0)
    router.replicas.on_probe("new", None, now=0.0)
    for number in range(8):
        sent = dispatched(submitted(router, a_request(f"r{number}", received_s=1.0), now=1.0))
        assert (sent.replica, sent.decision.excluded) == ("known", {"new": "not probed yet"})
    router.replicas.drain("known", now=2.0)
    assert dispatched(submitted(router, a_request("alone", received_s=2.0), now=2.0)).replica == "new", (
        "better than none"
    )
    router.replicas.on_probe("new", 0.001, now=3.0)
    router.replicas.drain("known", draining=False, now=3.0)
    assert dispatched(submitted(router, a_request("later", received_s=3.0), now=3.0)).replica == "new"


def test_a_replica_that_leaves_before_it_was_probed_is_forgotten() -> None:
    router = make_router("known", policy="nearest")
    router.replicas.set_fleet(specs("known", "new"), now=0.0)
    router.replicas.on_probe("new", None, now=0.0)
    router.replicas.set_fleet(specs("known", "other"), now=1.0)
    sent = dispatched(submitted(router, a_request("r", received_s=1.0), now=1.0))
    assert sent.decision.excluded == {}


@pytest.mark.parametrize(("later_s", "rtt_s"), [(2.0, 0.1), (60.0, 0.3 * 0.1 + 0.7 * 0.9)])
def test_of_the_first_probes_the_shortest_counts(later_s: float, rtt_s: float) -> None:
    router = make_router("near", policy="nearest")
    router.replicas.set_fleet(specs("near", "new"), now=0.0)
    router.replicas.on_probe("new", 0.9, now=10.0)
    router.replicas.on_probe("new", 0.1, now=10.0 + later_s)
    (row,) = [each for each in router.view.snapshots(now=80.0) if each.name == "new"]
    assert row.rtt_ms == pytest.approx(rtt_s * 1e3)
