"""A busy engine gets nothing while another is open, slows down, and is ejected in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.fleet.busy import FIRST_PAUSE_S, MOST_IN_A_ROW
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Dispatch, Reject
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.router import Router
from tests.core.routers import BUSY, COMPLETED, a_request, dispatched, finished, make_router, rejected, specs, submitted

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
    assert router.health_states()["a"] == "healthy"
    assert busy_first(router, 100, now=now) == ["a", "b"]
    (view, _) = router.fleet_view(now=now)
    assert (view.state, view.ejected_by, view.failures) == ("ejected", "busy", 0)
    # On probation one refusal is enough.
    router.on_probe("a", 0.01, now=now + 5.0)
    router.handle_timer(now=now + 5.0)
    assert busy_first(router, 101, now=now + 5.0) == ["a", "b"]
    assert router.fleet_view(now=now + 5.0)[0].ejected_for_s == 10.0


def test_a_burst_of_refusals_is_one_and_an_answer_ends_the_count() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    burst = [dispatched(submitted(router, a_request(f"b{n}"), now=1.0)) for n in range(50)]
    for sent in burst:
        assert dispatched(finished(router, sent.attempt_id, BUSY, now=1.1)).replica == "b"
    assert router.health_states()["a"] == "healthy"
    now = 10.0
    for number in range(20):
        assert busy_first(router, number, now=now)[-1] == "b"
        served = dispatched(submitted(router, a_request(f"s{number}", pinned_replica="a"), now=now))
        router.on_first_token(served.attempt_id, now=now)
        finished(router, served.attempt_id, COMPLETED, now=now)
        now += 1.0
    assert router.health_states()["a"] == "healthy"


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
    assert router.health_states()["a"] == "healthy"


def test_a_replica_that_leaves_takes_its_pause_along() -> None:
    router = make_router("a", "b", limits=NO_BUDGET)
    busy_first(router, 0, now=1.0, outcome=replace(BUSY, retry_after_s=50.0))
    router.set_fleet(specs("b"), now=2.0)
    router.set_fleet(specs("a", "b"), now=3.0)
    router.on_probe("a", 0.001, now=3.0)
    assert busy_first(router, 1, now=3.0) == ["a", "b"]
